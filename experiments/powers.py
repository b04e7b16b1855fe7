"""Loss relative to softmax, learning curves, and state size, against the power p.

Reproduces the learning curves and tables of "Symmetric Power Transformers" (Buckman, Gelada, Zhang 2024). The first
table is the loss of even-power attention, trained in its attention form at context 4,096 (toy: 1,024). The second is
the size of the state that the same model has in its recurrent form, with tensor and with symmetric powers, for the 124M
model at 2 bytes per element. The third is the state of vanilla linear attention, in elements.
"""

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import _shared
from sympow_jax import config, models, ops

POWERS = (2, 4, 6)
PLANS = {
    "toy": _shared.Plan(seeds=(0, 1, 2), steps=300, contexts=(1024,)),
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
_PAIRS = (("p=2", "softmax"), ("p=4", "softmax"), ("p=6", "softmax"), ("p=4", "p=2"), ("p=6", "p=4"))
# Relative to softmax at context 4,096, after 100,000 updates.
_ARTICLE = {_BASE: "1", "p=2": "1.03", "p=4": "0.98", "p=6": "0.97"}
_STATE_POWERS = (2, 4, 6, 8)
_LINEAR_SIZES = ("gpt2_124m", "gpt2_335m", "gpt2_774m", "gpt2_1558m")
_ARTICLE_RATIOS = ("0.0048", "0.0045", "0.0037", "0.0031")


def _experiment(options: _shared.Options) -> None:
    folders = _shared.train(options, _ATTENTIONS, _LABELS.__getitem__)
    losses = {key: _shared.final_loss(folder) for key, folder in folders.items()}
    rows = [
        {"variant": variant, "seed": seed, "context": context, "loss": loss}
        | {"relative_loss": loss / losses[_BASE, context, seed]}
        for (variant, context, seed), loss in losses.items()
    ]
    states, curves = state_sizes(), _shared.mean_curves(folders)
    path = options.write(
        rows, folders.values(), state_bytes=states, linear_state=linear_states(), curves=curves
    )
    (context,), about = options.plan.contexts, options.plan.average
    ratios = _shared.means(rows, ("variant",), "relative_loss")
    powers = [power for power in POWERS if f"p={power}" in options.variants]
    relative = _shared.lines({("even power", power): ratios[f"p={power}",] for power in powers})
    at = [row["power"] for row in states]
    sizes = {f"{name} power": (at, [row[name] / 1e9 for row in states]) for name in ("symmetric", "tensor")}
    panels = (
        _shared.Panel(
            lines=relative, x_label="power p", y_label="loss relative to softmax", level=1.0, ticks=POWERS
        ),
        _shared.Panel(lines=sizes, x_label="power p", y_label="state (GB)", log_y=True, level=80.0, ticks=at),
    )
    _shared.draw_lines(
        path,
        [dataclasses.replace(panel, linear=True) for panel in panels],
        title="Loss and state against the power",
        subtitle=f"left: context {context:,}, {about}; right: 124M parameters, 2 bytes per element; gray: 80 GB",
    )
    _shared.draw_lines(
        path.with_stem(f"{path.stem}_curves"),
        [dataclasses.replace(_shared.curves_panel(curves, context), title="")],
        title="Training loss of even-power attention",
        subtitle=f"context {context:,}; {about}; without the first eighth",
    )


def state_sizes() -> list[dict[str, int]]:
    """Computes the bytes of the 124M model's state for each power, at 2 bytes per element, normalizer included."""
    rows = []
    for power in _STATE_POWERS:
        model = _shared.model("gpt2_124m", config.preset("sympow", power=power))
        size, symmetric = model.head_size, models.state_bytes(model)
        tensor = symmetric // ops.symmetric_power_dim(size, power) * size**power
        rows.append({"power": power, "tensor": tensor, "symmetric": symmetric})
    return rows


def linear_states(sizes: Sequence[str] = _LINEAR_SIZES) -> list[dict[str, Any]]:
    """Counts the elements of vanilla linear attention's state, without a normalizer, and of its weights."""
    rows: list[dict[str, Any]] = []
    for name in sizes:
        model = _shared.model(name, config.preset("linear"))
        weights = _shared.parameters(model)
        size = model.head_size
        state = models.state_bytes(model, bytes_per_element=1) * size // (size + 1)
        rows.append({"model": name, "weights": weights, "state": state, "ratio": state / weights})
    return rows


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the tables of an experiment's JSON."""
    rows = content["rows"]
    losses, ratios = (_shared.means(rows, ("variant",), column) for column in ("loss", "relative_loss"))

    def amount(size: float) -> str:
        magnitude = math.floor(math.log10(size) / 3)
        return f"{size / 1000**magnitude:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB', 'EB')[magnitude]}"

    return [
        _shared.Table(
            "Final training loss, nats per token",
            ("", "loss", "relative to softmax", "the article's, after 100,000 updates"),
            [(name, str(losses[name,]), str(ratios[name,]), _ARTICLE[name]) for (name,) in losses],
        ),
        _shared.difference_table("Differences, nats per token", rows, None, _PAIRS),
        _shared.Table(
            "State of the 124M model, 2 bytes per element",
            ("p", "tensor power", "symmetric power", "saved"),
            [
                (
                    str(row["power"]),
                    amount(row["tensor"]),
                    amount(row["symmetric"]),
                    f"{1 - row['symmetric'] / row['tensor']:.3%}",
                )
                for row in content["state_bytes"]
            ],
        ),
        _shared.Table(
            "State of vanilla linear attention, elements",
            ("model", "weights", "state", "ratio", "the article's ratio"),
            [
                (row["model"], f"{row['weights']:,}", f"{row['state']:,}", f"{row['ratio']:.4f}", ratio)
                for row, ratio in zip(content["linear_state"], _ARTICLE_RATIOS)
            ],
        ),
    ]


main = _shared.Experiment(
    name="powers",
    description=__doc__,
    plans=PLANS,
    variants=tuple(_ATTENTIONS),
    base=_BASE,
    run=_experiment,
    tables=tables,
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
