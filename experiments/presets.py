"""Language by the presets as they begin by default, and by the delta rule on power features.

Data, sizes and updates are those of `rotation_rates`. `expressive` has the attention of "Reorganizing attention-space
geometry with expressive attention" (Gros 2024) with rotary positions. Other variants are named by their power. `gated
delta` is the preset `power_delta`, and `delta` the same without a decay. With p = 1 they are the rules of "Gated Delta
Networks" (Yang et al. 2025) and of "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (Yang
et al. 2024), with rotary positions and the preset's decay, and without short convolutions. The state of softmax and
expressive attention is the KV cache of a training context.
"""

import sys
from collections.abc import Mapping
from typing import Any

from experiments import _shared, rotation_rates
from sympow_jax import config
from sympow_jax.process import workdir

PLANS = rotation_rates.PLANS
_ATTENTIONS = {
    "softmax": config.preset("softmax"),
    "expressive": config.preset("expressive"),
    **{f"gated p={power}": config.preset("sympow_gated", power=power) for power in (2, 4)},
    "conformal p=2": config.preset("conformal", power=2),
    "delta p=1": config.preset("power_delta", power=1, decay="none"),
    "delta p=2": config.preset("power_delta", power=2, decay="none"),
    **{f"gated delta p={power}": config.preset("power_delta", power=power) for power in (1, 2, 4)},
}
VARIANTS = tuple(_ATTENTIONS)
_PAIRS = (
    *((f"gated delta p={power}", f"gated p={power}") for power in (2, 4)),
    ("gated delta p=1", "gated p=2"),
    ("gated delta p=2", "gated delta p=1"),
    ("gated delta p=4", "gated delta p=2"),
    ("delta p=1", "gated delta p=1"),
    ("delta p=2", "gated delta p=2"),
    ("conformal p=2", "gated p=2"),
    ("expressive", "softmax"),
    ("expressive", "gated p=2"),
    *((name, "softmax") for name in ("gated p=2", "gated p=4", "gated delta p=1", "gated delta p=2")),
)


def _experiment(options: _shared.Options) -> None:
    options = options.at_context()
    folders, rows = rotation_rates.train(
        options, _ATTENTIONS, lambda name: f"preset_{name.replace(' p=', '_p')}"
    )
    (context,) = options.plan.contexts
    sizes = {
        variant: _shared.state_bytes(workdir.read_config(folder).model, context)
        for (variant, _), folder in folders.items()
    }
    path = options.write(rows, folders.values(), state_bytes=sizes)
    within, _ = options.plan.lengths
    found = _shared.means(rows, ("variant",), f"heldout_{within}")
    panel = _shared.Panel(
        lines=_shared.lines({(name, sizes[name] / 1024): mean for (name,), mean in found.items()}),
        x_label="KiB of state",
        y_label="loss (nats per token)",
        ticks=(1, 16, 256, 4096),
    )
    _shared.draw_lines(
        path,
        [panel],
        title="Language by presets",
        subtitle=f"held-out, positions to {within:,}; {options.plan.average}",
    )


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the tables of an experiment's JSON."""
    long, sizes = rotation_rates.loss_rows(content), content["state_bytes"]
    found = _shared.loss_table("Final loss, nats per token", long, "loss of")
    columns = found.columns[0], "bytes of state", *found.columns[1:]
    with_sizes = [(name, f"{sizes[name]:,}", *cells) for name, *cells in found.rows]
    return [
        _shared.Table(found.title, columns, with_sizes),
        _shared.difference_table("Differences, nats per token", long, "loss of", _PAIRS),
    ]


main = _shared.Experiment(
    name="presets",
    description=__doc__,
    plans=PLANS,
    variants=VARIANTS,
    more=_shared.CONTEXT,
    run=_experiment,
    tables=tables,
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
