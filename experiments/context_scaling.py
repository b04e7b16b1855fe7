"""Final training loss against the training context.

Figure 1 of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025): with the same number of
tokens per batch, loss falls as the context grows while the state suffices. The paper trains p = 4 at 1,024 to 65,536
and p = 2 at 256 to 8,192 (--power). The toy scale trains p = 2 at 64, 256 and 1,024.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import _shared

NAME = "context_scaling"
VARIANTS = tuple(_shared.power_variants(2))
PLANS = {
    "toy": _shared.Plan(seeds=(0,), steps=300, contexts=(64, 256, 1024)),
    "paper": _shared.Plan(seeds=(0,), steps=100_000),
    "tiny": _shared.Plan(seeds=(0,), steps=2, contexts=(8, 16)),
}
PAPER_CONTEXTS = {2: (256, 1024, 4096, 8192), 4: (1024, 4096, 16_384, 65_536)}


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment with the arguments after its name; returns the exit code."""
    return _shared.run(
        NAME, __doc__, arguments, _experiment, plans=PLANS, variants=VARIANTS, powers=tuple(PAPER_CONTEXTS)
    )


def _experiment(options: _shared.Options) -> None:
    options, folders = train(options)
    rows = [
        {"variant": variant, "context": context, "seed": seed, "loss": _shared.final_loss(folder)}
        for (variant, context, seed), folder in folders.items()
    ]
    medians = _shared.medians(rows, ("variant", "context"), "loss")
    contexts = options.plan.contexts
    path = _shared.write(options, rows, folders.values(), medians=_shared.nested(medians))
    _shared.draw_lines(
        path,
        _panels(options, medians),
        title="Final training loss at each training context",
        subtitle=f"p = {options.power}; mean of the last tenth of {options.plan.steps:,} updates of as many tokens",
    )
    _shared.print_table(
        "Final training loss, nats a token, against the training context",
        ("training context", *(f"{context:,}" for context in contexts)),
        ((name, *(medians[name, context][0] for context in contexts)) for name in options.variants),
    )


def train(options: _shared.Options):
    """Trains every variant at every context; returns the options with the paper's contexts, and the folders."""
    if options.scale == "paper":
        plan = dataclasses.replace(options.plan, contexts=PAPER_CONTEXTS[options.power])
        options = dataclasses.replace(options, plan=plan)
    attentions = _shared.power_variants(options.power)
    return options, _shared.train(options, attentions, lambda name: _shared.power_label(name, options.power))


def _panels(options: _shared.Options, medians: Mapping) -> list[_shared.Panel]:
    """Returns a panel of losses and, if softmax is among the variants, one of losses relative to softmax's."""
    contexts = options.plan.contexts
    bands = {name: [medians[name, context] for context in contexts] for name in options.variants}
    common: dict[str, Any] = {"x_label": "training context (tokens)", "ticks": contexts}
    losses = {name: (contexts, *zip(*band)) for name, band in bands.items()}
    panels = [_shared.Panel(lines=losses, y_label="training loss (nats per token)", **common)]
    if "softmax" in bands:
        base = [median for median, _, _ in bands.pop("softmax")]
        ratios = {
            name: (contexts, *zip(*([x / one for x in triple] for triple, one in zip(band, base))))
            for name, band in bands.items()
        }
        label = "training loss relative to softmax"
        panels.append(_shared.Panel(lines=ratios, y_label=label, level=1.0, **common))
    return panels


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
