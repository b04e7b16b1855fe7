"""Final training loss against the training context, and training curves.

Figures 1, 3 and 4 of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025): with the same
number of tokens per batch, loss falls as the context grows while the state suffices. The paper trains p = 4 at 1,024 to
65,536 (Figure 3) and p = 2 at 256 to 8,192 (Figure 4). The toy scale trains at 64, 256 and 1,024; --power chooses p.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from experiments import _shared
from sympow_jax.config import loading

VARIANTS = tuple(_shared.power_variants(2))
PLANS = {
    "toy": _shared.Plan(seeds=(0, 1, 2), steps=300, contexts=(64, 256, 1024)),
    "paper": _shared.Plan(seeds=(0,), steps=100_000),
    "tiny": _shared.Plan(seeds=(0,), steps=2, contexts=(8, 16)),
}
PAPER_CONTEXTS = {2: (256, 1024, 4096, 8192), 4: (1024, 4096, 16_384, 65_536)}
# Read from the paper's plots, means of the last ten points, at these contexts. Only softmax was trained for 100,000
# updates at 65,536; there all four are means of points up to 51,000 updates.
PAPER_LOSSES = {
    2: {
        "softmax": (2.571, 2.410, 2.387, 2.372),
        "sympow": (2.586, 2.492, 2.472, 2.491),
        "gated": (2.572, 2.438, 2.370, 2.374),
        "conformal": (2.525, 2.376, 2.292, 2.309),
    },
    4: {
        "softmax": (2.410, 2.387, 2.391, 2.527),
        "sympow": (2.410, 2.332, 2.348, 2.624),
        "gated": (2.399, 2.326, 2.307, 2.468),
        "conformal": (2.344, 2.261, 2.236, 2.477),
    },
}
_EQUAL = (
    "What runs at different contexts have as many of; updates are in proportion to the context for documents."
)
_PAIRS = (("sympow", "softmax"), ("gated", "softmax"), ("gated", "sympow"), ("conformal", "gated"))


def _experiment(options: _shared.Options) -> None:
    if options.scale == "paper":
        plan = dataclasses.replace(options.plan, contexts=PAPER_CONTEXTS[options.power])
        options = dataclasses.replace(options, plan=plan)
    contexts, steps = options.plan.contexts, options.plan.steps
    middle = contexts[len(contexts) // 2]
    equal_documents = options.more["equal"] == "documents"

    def label(variant):
        return _shared.power_label(variant, options.power) + ("_documents" if equal_documents else "")

    def change(found, variant):
        if not equal_documents:
            return found
        # An update has the same tokens at every context, and so fewer documents at a longer one.
        return loading.replace(found, {"training.steps": max(1, steps * found.data.context_length // middle)})

    folders = _shared.train(options, _shared.power_variants(options.power), label, change)
    rows: list[dict[str, Any]] = [
        {"variant": variant, "context": context, "seed": seed, "loss": _shared.final_loss(folder)}
        for (variant, context, seed), folder in folders.items()
    ]
    curves = _shared.mean_curves(folders)
    path = options.write(rows, folders.values(), power=options.power, curves=curves)
    about = options.plan.average
    updates = f"{steps:,} updates of equal size"
    if equal_documents:
        updates = f"training, {steps:,} updates at {middle:,}, equal documents"
    # Losses, and if softmax is among the variants, losses relative to softmax's.
    base = {(row["context"], row["seed"]): row["loss"] for row in rows if row["variant"] == "softmax"}
    values = [("loss", "training loss (nats per token)", rows)]
    if base:
        ratios = [
            row | {"ratio": row["loss"] / base[row["context"], row["seed"]]}
            for row in rows
            if row["variant"] != "softmax"
        ]
        values.append(("ratio", "training loss relative to softmax", ratios))
    _shared.draw_lines(
        path,
        [
            _shared.Panel(
                lines=_shared.lines(_shared.means(shown, ("variant", "context"), value)),
                x_label="training context (tokens)",
                y_label=label,
                ticks=contexts,
                level=1.0 if value == "ratio" else None,
            )
            for value, label, shown in values
        ],
        title="Final training loss at each training context",
        subtitle=f"p = {options.power}; last tenth of {updates}; {about}",
    )
    _shared.draw_lines(
        path.with_stem(f"{path.stem}_curves"),
        [_shared.curves_panel(curves, context) for context in contexts],
        title=f"Training loss, p = {options.power}",
        subtitle=f"each point the mean of the updates since the one before; {about}; without the first eighth",
    )


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the tables of an experiment's JSON."""
    rows, power = content["rows"], content["power"]
    paper = "The paper's, 124M parameters, after 100,000 updates"
    return [
        _shared.loss_table(f"Final training loss, nats per token, p = {power}", rows, "context"),
        _shared.difference_table("Differences, nats per token", rows, "context", _PAIRS),
        _shared.number_table(paper, "", PAPER_CONTEXTS[power], PAPER_LOSSES[power]),
    ]


main = _shared.Experiment(
    name="context_scaling",
    description=__doc__,
    plans=PLANS,
    variants=VARIANTS,
    powers=tuple(PAPER_CONTEXTS),
    more={"equal": {"choices": ("tokens", "documents"), "default": "tokens", "help": _EQUAL}},
    run=_experiment,
    tables=tables,
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
