"""Loss relative to softmax, and state size, against the power p.

Reproduces the tables of "Symmetric Power Transformers" (Buckman, Gelada, Zhang 2024). The first is the loss of
even-power attention, trained in its attention form at context 4,096 (toy: 1,024). The second is the size of the state
that the same model has in its recurrent form, with tensor and with symmetric powers, for the 124M model at 2 bytes per
element. The third is the state of vanilla linear attention, in elements.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import _command, _figures, _report, _runs
from sympow_jax import config, models
from sympow_jax.training import cli

NAME = "powers"
POWERS = (2, 4, 6)
PLANS = {
    "toy": _command.Plan(seeds=(0,), steps=300, contexts=(1024,)),
    "paper": _command.Plan(seeds=(0,), steps=100_000, contexts=(4096,)),
    "tiny": _command.Plan(seeds=(0,), steps=2, contexts=(16,)),
}
_BASE = "softmax"
_ATTENTIONS = {
    _BASE: config.preset("softmax"),
    **{f"p={power}": config.preset("even_power", power=power) for power in POWERS},
}
_RUNS = {_BASE: (_BASE, 0), **{f"p={power}": ("even_power", power) for power in POWERS}}
_STATE_POWERS = (2, 4, 6, 8)
_LINEAR_SIZES = ("gpt2_124m", "gpt2_335m", "gpt2_774m", "gpt2_1558m")


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment with the arguments after its name; returns the exit code."""
    with cli.user_errors():
        options = _command.parse(NAME, __doc__ or "", arguments, plans=PLANS, variants=tuple(_ATTENTIONS))
        if _BASE not in options.variants:
            raise ValueError(f"--variants leaves out {_BASE}, which losses are relative to; name it too")
        rows, folders = _train(options)
        ratios = _report.medians(rows, ("variant",), "relative_loss")
        states = state_sizes()
        path = _report.write(options, rows, folders, state_bytes=states, linear_state=linear_states())
        _figures.draw_lines(
            path,
            _panels(options, ratios, states),
            title="Loss and state against the power",
            about=_about(options),
        )
        _print(options, ratios, _report.medians(rows, ("variant",), "loss"), states)
        _report.print_place(options)
        return 0


def state_sizes() -> list[dict[str, int]]:
    """Computes the bytes of the 124M model's state for each power, at 2 bytes per element, normalizer included."""
    rows = []
    for power in _STATE_POWERS:
        model = _runs.model("gpt2_124m", config.preset("sympow", power=power))
        found = {name: models.state_bytes(model, feature_map=name) for name in ("tensor", "symmetric")}
        rows.append({"power": power} | found)
    return rows


def linear_states(sizes: Sequence[str] = _LINEAR_SIZES) -> list[dict[str, Any]]:
    """Counts the elements of vanilla linear attention's state, without a normalizer, and of its weights."""
    rows: list[dict[str, Any]] = []
    for name in sizes:
        model = _runs.model(name, config.preset("linear"))
        weights = _runs.parameters(model)
        state = models.state_bytes(model, bytes_per_element=1, normalizer=False)
        rows.append({"model": name, "weights": weights, "state": state, "ratio": state / weights})
    return rows


def _train(options: _command.Options):
    (context,) = options.plan.contexts
    chosen = {
        _runs.name(_runs.labeled(*_RUNS[name]), context, options.plan.steps, seed): (name, seed)
        for seed in options.plan.seeds
        for name in options.variants
    }
    wanted = {
        run: _runs.settings(options, _ATTENTIONS[name], context=context, seed=seed)
        for run, (name, seed) in chosen.items()
    }
    folders = _runs.train_all(options, wanted)
    losses = {chosen[run]: _runs.final_loss(folder) for run, folder in folders.items()}
    rows = [
        {
            "variant": name,
            "seed": seed,
            "context": context,
            "loss": loss,
            "relative_loss": loss / losses[_BASE, seed],
        }
        for (name, seed), loss in losses.items()
    ]
    return rows, folders


def _about(options: _command.Options) -> str:
    (context,), seeds = options.plan.contexts, len(options.plan.seeds)
    trained = f"context {context:,}, {'one seed' if seeds == 1 else f'median and range of {seeds} seeds'}"
    return f"left: final training loss, {trained}; right: 124M parameters, 2 bytes an element; gray: 80 GB"


def _panels(options, ratios: Mapping, states: Sequence[Mapping[str, int]]) -> list[_figures.Panel]:
    powers = [power for power in POWERS if f"p={power}" in options.variants]
    y, low, high = ([ratios[(f"p={power}",)][part] for power in powers] for part in range(3))
    loss = _figures.Line(name="even power", x=powers, y=y, low=low, high=high)
    at = [row["power"] for row in states]
    sizes = [
        _figures.Line(name=f"{name} power", x=at, y=[row[name] / 1e9 for row in states])
        for name in ("symmetric", "tensor")
    ]
    return [
        _figures.Panel(
            lines=[loss], y_label="loss relative to softmax", level=1.0, places=POWERS, x_label="power p"
        ),
        _figures.Panel(
            lines=sizes, y_label="state (GB)", log_y=True, level=80.0, places=at, x_label="power p"
        ),
    ]


def _print(options, ratios: Mapping, losses: Mapping, states: Sequence[Mapping[str, int]]) -> None:
    _report.print_table(
        "Final training loss, nats a token, and relative to softmax",
        ("", "loss", "relative"),
        ((name, losses[name,][0], ratios[name,][0]) for name in options.variants),
    )
    _report.print_table(
        "Bytes of the state of the 124M model, 2 bytes an element",
        ("power", "tensor", "symmetric", "saved"),
        (
            (str(row["power"]), _amount(row["tensor"]), _amount(row["symmetric"]), _saved(row))
            for row in states
        ),
    )
    _report.print_table(
        "Numbers in the state of vanilla linear attention",
        ("model", "weights", "state", "ratio"),
        (tuple(row.values()) for row in linear_states()),
    )


def _saved(row: Mapping[str, int]) -> str:
    return f"{1 - row['symmetric'] / row['tensor']:.3%}"


def _amount(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} EB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
