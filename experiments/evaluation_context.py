"""Loss by position within and beyond the training context.

Figure 2 of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025): models trained at one
context, evaluated to several times it. The paper trains at 16,384 with p = 4 (--power) and evaluates to 65,536; the
toy scale trains at 1,024 and evaluates to 8,192 on documents of the standard library.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import _shared

PLANS = {
    "toy": _shared.Plan(
        seeds=(0, 1, 2), steps=300, contexts=(1024,), lengths=tuple(2**exponent for exponent in range(1, 14))
    ),
    "paper": _shared.Plan(
        seeds=(0,),
        steps=100_000,
        contexts=(16_384,),
        lengths=tuple(2**exponent for exponent in range(1, 17)),
        documents=64,
    ),
    "tiny": _shared.Plan(seeds=(0, 1), steps=2, contexts=(16,), lengths=(8, 16, 32), documents=2),
}
# Read from the paper's plot: trained at 16,384 with p = 4, at these positions.
_PAPER_POSITIONS = (4_000, 16_000, 32_000, 65_000)
_PAPER_LOSSES = {
    "softmax": (2.36, 2.36, 2.52, 2.80),
    "sympow": (2.27, 2.45, 6.28, 7.10),
    "gated": (2.29, 2.29, 2.28, 2.30),
    "conformal": (2.22, 2.17, 2.17, 2.18),
}
_PAIRS = (("sympow", "gated"), ("softmax", "gated"), ("conformal", "gated"))


def _experiment(options: _shared.Options) -> None:
    folders = _shared.train(options, _shared.power_variants(options.power))
    report(options, folders, f"Loss within and beyond the training context, p = {options.power}")


def report(
    options: _shared.Options,
    folders: _shared.Folders,
    title: str,
    *,
    differences: Sequence[tuple[str, str]] = (),
) -> None:
    """Writes and draws the losses by position of evaluated runs.

    If pairs of variants are given as `differences`, these are drawn in place of the losses.
    """
    rows = [
        {"variant": variant, "seed": seed, "train_context": context}
        | {key: row[key] for key in ("context_length", "loss", "standard_error", "tokens", "documents")}
        for (variant, context, seed), folder in folders.items()
        for row in _shared.evaluation(folder)
    ]
    (context,), lengths = options.plan.contexts, options.plan.lengths
    path = options.write(rows, folders.values())
    means = _shared.means(rows, ("variant", "context_length"), "loss")
    if differences:
        found = _shared.differences(rows, "context_length", "loss", differences)
        means = {(first, length): mean for (first, _, length), mean in found.items()}
    panel = _shared.Panel(
        lines=_shared.lines(means),
        x_label="context length: upper end of each bucket of positions (tokens)",
        y_label=f"held-out loss{f' minus that of {differences[0][1]}' if differences else ''} (nats per token)",
        ticks=lengths,
        mark=(context, f"training context {context:,}"),
        level=0.0 if differences else None,
    )
    _shared.draw_lines(
        path, [panel], title=title, subtitle=f"{options.plan.average}; {options.plan.steps:,} updates each"
    )


def tables(content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the tables of an experiment's JSON."""
    return [
        *position_tables(_PAIRS, content),
        _shared.number_table(
            "The paper's, trained at 16,384 with p = 4",
            "positions near",
            _PAPER_POSITIONS,
            _PAPER_LOSSES,
            digits=2,
        ),
    ]


def position_tables(pairs: Sequence[tuple[str, str]], content: Mapping[str, Any]) -> list[_shared.Table]:
    """Returns the held-out losses by position of an experiment's JSON, and their differences between variants."""
    rows = content["rows"]
    return [
        _shared.loss_table("Held-out loss at positions up to", rows, "context_length"),
        _shared.difference_table("Differences at positions up to", rows, "context_length", pairs),
    ]


main = _shared.Experiment(
    name="evaluation_context",
    description=__doc__,
    plans=PLANS,
    variants=tuple(_shared.power_variants(2)),
    powers=(2, 4, 6),
    run=_experiment,
    tables=tables,
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
