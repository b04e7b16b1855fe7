"""Loss relative to softmax, and state size, against the power p.

Reproduces the tables of "Symmetric Power Transformers" (Buckman, Gelada, Zhang 2024). The first is the loss of
even-power attention, trained in its attention form at context 4,096 (toy: 1,024). The second is the size of the state
that the same model has in its recurrent form, with tensor and with symmetric powers, for the 124M model at 2 bytes per
element. The third is the state of vanilla linear attention, in elements.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import _shared
from sympow_jax import config, models

POWERS = (2, 4, 6)
PLANS = {
    "toy": _shared.Plan(seeds=(0,), steps=300, contexts=(1024,)),
    "paper": _shared.Plan(seeds=(0,), steps=100_000, contexts=(4096,)),
    "tiny": _shared.Plan(seeds=(0,), steps=2, contexts=(16,)),
}
_BASE = "softmax"
_ATTENTIONS = {
    _BASE: config.preset("softmax"),
    **{f"p={power}": config.preset("even_power", power=power) for power in POWERS},
}
# Names of the runs' folders.
_LABELS = {_BASE: _BASE, **{f"p={power}": f"even_power_p{power}" for power in POWERS}}
_STATE_POWERS = (2, 4, 6, 8)
_LINEAR_SIZES = ("gpt2_124m", "gpt2_335m", "gpt2_774m", "gpt2_1558m")


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment with the arguments after its name; returns the exit code."""
    return _shared.run(
        "powers",
        __doc__,
        arguments,
        _experiment,
        plans=PLANS,
        variants=tuple(_ATTENTIONS),
        base=_BASE,
    )


def _experiment(options: _shared.Options) -> None:
    folders = _shared.train(options, _ATTENTIONS, _LABELS.__getitem__)
    losses = {key: _shared.final_loss(folder) for key, folder in folders.items()}
    rows = [
        {"variant": variant, "seed": seed, "context": context, "loss": loss}
        | {"relative_loss": loss / losses[_BASE, context, seed]}
        for (variant, context, seed), loss in losses.items()
    ]
    ratios = _shared.medians(rows, ("variant",), "relative_loss")
    states = state_sizes()
    path = _shared.write(options, rows, folders.values(), state_bytes=states, linear_state=linear_states())
    (context,), seeds = options.plan.contexts, len(options.plan.seeds)
    trained = f"context {context:,}, {'one seed' if seeds == 1 else f'median and range of {seeds} seeds'}"
    _shared.draw_lines(
        path,
        _panels(options, ratios, states),
        title="Loss and state against the power",
        subtitle=f"left: final training loss, {trained}; right: 124M parameters, 2 bytes an element; gray: 80 GB",
    )
    _print(options, ratios, _shared.medians(rows, ("variant",), "loss"), states)


def state_sizes() -> list[dict[str, int]]:
    """Computes the bytes of the 124M model's state for each power, at 2 bytes per element, normalizer included."""
    rows = []
    for power in _STATE_POWERS:
        model = _shared.model("gpt2_124m", config.preset("sympow", power=power))
        found = {name: models.state_bytes(model, feature_map=name) for name in ("tensor", "symmetric")}
        rows.append({"power": power} | found)
    return rows


def linear_states(sizes: Sequence[str] = _LINEAR_SIZES) -> list[dict[str, Any]]:
    """Counts the elements of vanilla linear attention's state, without a normalizer, and of its weights."""
    rows: list[dict[str, Any]] = []
    for name in sizes:
        model = _shared.model(name, config.preset("linear"))
        weights = _shared.parameters(model)
        state = models.state_bytes(model, bytes_per_element=1, normalizer=False)
        rows.append({"model": name, "weights": weights, "state": state, "ratio": state / weights})
    return rows


def _panels(options, ratios: Mapping, states: Sequence[Mapping[str, int]]) -> list[_shared.Panel]:
    powers = [power for power in POWERS if f"p={power}" in options.variants]
    loss = (powers, *zip(*(ratios[f"p={power}",] for power in powers)))
    at = [row["power"] for row in states]
    sizes = {f"{name} power": (at, [row[name] / 1e9 for row in states]) for name in ("symmetric", "tensor")}
    common: dict[str, Any] = {"x_label": "power p", "linear": True}
    return [
        _shared.Panel(
            lines={"even power": loss}, y_label="loss relative to softmax", level=1.0, ticks=POWERS, **common
        ),
        _shared.Panel(lines=sizes, y_label="state (GB)", log_y=True, level=80.0, ticks=at, **common),
    ]


def _print(options, ratios: Mapping, losses: Mapping, states: Sequence[Mapping[str, int]]) -> None:
    _shared.print_table(
        "Final training loss, nats a token, and relative to softmax",
        ("", "loss", "relative"),
        ((name, losses[name,][0], ratios[name,][0]) for name in options.variants),
    )
    _shared.print_table(
        "Bytes of the state of the 124M model, 2 bytes an element",
        ("power", "tensor", "symmetric", "saved"),
        (
            (str(row["power"]), _amount(row["tensor"]), _amount(row["symmetric"]), _saved(row))
            for row in states
        ),
    )
    _shared.print_table(
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
