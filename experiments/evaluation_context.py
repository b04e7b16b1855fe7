"""Loss by position within and beyond the training context.

Figure 2 of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025): models trained at one
context, evaluated to several times it. The paper trains at 16,384 with p = 4 and evaluates to 65,536; the toy scale
trains at 1,024 and evaluates to 8,192 on documents of the standard library.
"""

import sys
from collections.abc import Sequence

from experiments import _command, _figures, _report, _runs
from sympow_jax.training import cli

NAME = "evaluation_context"
VARIANTS = tuple(_runs.power_variants(2))
PLANS = {
    "toy": _command.Plan(
        seeds=(0, 1, 2), steps=300, contexts=(1024,), lengths=(128, 256, 512, 1024, 2048, 4096, 8192)
    ),
    "paper": _command.Plan(
        seeds=(0,),
        steps=100_000,
        contexts=(16_384,),
        lengths=tuple(2**exponent for exponent in range(8, 17)),
        documents=64,
    ),
    "tiny": _command.Plan(seeds=(0, 1), steps=2, contexts=(16,), lengths=(8, 16, 32), documents=2),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment with the arguments after its name; returns the exit code."""
    with cli.user_errors():
        options = _command.parse(
            NAME, __doc__ or "", arguments, plans=PLANS, variants=VARIANTS, powers=(2, 4, 6)
        )
        rows, folders = measure(options, _runs.power_variants(options.power))
        (context,) = options.plan.contexts
        medians = _report.medians(rows, ("variant", "context_length"), "loss")
        path = _report.write(options, rows, folders, medians=_nested(medians))
        draw(path, options, medians, title="Loss within and beyond the training context")
        lengths = options.plan.lengths
        _report.print_table(
            options,
            f"Held-out loss by position, nats a token, median of {len(options.plan.seeds)} seeds; "
            f"trained at {context:,}",
            ("positions up to", *(f"{length:,}" for length in lengths)),
            ((name, *(medians[name, length][0] for length in lengths)) for name in options.variants),
        )
        return 0


def measure(options, variants):
    """Trains and evaluates the variants; rows of variant, seed and bucket, and the folders of the runs."""
    (context,) = options.plan.contexts
    chosen = {
        _runs.name(name, variants[name], context, options.plan.steps, seed): (name, seed)
        for seed in options.plan.seeds
        for name in options.variants
    }
    folders = _runs.train_all(
        options,
        {
            run: _runs.settings(options, variants[name], context=context, seed=seed, evaluated=True)
            for run, (name, seed) in chosen.items()
        },
    )
    rows = [
        {"variant": name, "seed": seed, "train_context": context}
        | {key: row[key] for key in ("context_length", "loss", "standard_error", "tokens", "documents")}
        for run, (name, seed) in chosen.items()
        for row in _runs.evaluation(folders[run])
    ]
    return rows, folders


def draw(path, options, medians, *, title):
    """One line a variant, its band from the least to the largest loss of the seeds."""
    (context,) = options.plan.contexts
    lengths = options.plan.lengths
    lines = [
        _figures.Line(
            name=name,
            x=lengths,
            **{
                part: [medians[name, length][i] for length in lengths]
                for i, part in enumerate(("y", "low", "high"))
            },
        )
        for name in options.variants
    ]
    panel = _figures.Panel(
        lines=lines,
        x_label="context length: upper end of each bucket of positions (tokens)",
        y_label="held-out loss (nats per token)",
        ticks=lengths,
        marks=[(context, f"training context {context:,}")],
    )
    seeds = len(options.plan.seeds)
    about = f"median of {seeds} seeds, band from the least to the largest" if seeds > 1 else "one seed"
    _figures.draw_lines(path, [panel], title=title, about=f"{about}; {options.plan.steps:,} updates each")


def _nested(medians):
    nested: dict[str, dict[int, float]] = {}
    for (name, length), (median, _, _) in medians.items():
        nested.setdefault(name, {})[length] = median
    return nested


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
