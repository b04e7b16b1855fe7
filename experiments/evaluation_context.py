"""Loss by position within and beyond the training context.

Figure 2 of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025): models trained at one
context, evaluated to several times it. The paper trains at 16,384 with p = 4 (--power) and evaluates to 65,536; the
toy scale trains at 1,024 and evaluates to 8,192 on documents of the standard library.
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence

from experiments import _command, _figures, _report, _runs
from sympow_jax import config
from sympow_jax.training import cli

__all__ = ["PLANS", "main", "report"]

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
        report(
            options,
            _runs.power_variants(options.power),
            title=f"Loss within and beyond the training context, p = {options.power}",
        )
        return 0


def report(
    options: _command.Options, attentions: Mapping[str, config.AttentionConfig], *, title: str
) -> None:
    """Trains and evaluates the variants of `options`, then writes and prints their losses by position."""
    (context,) = options.plan.contexts
    chosen = {
        _runs.name(_runs.labeled(name, options.power), context, options.plan.steps, seed): (name, seed)
        for seed in options.plan.seeds
        for name in options.variants
    }
    wanted = {
        run: _runs.settings(options, attentions[name], context=context, seed=seed, evaluated=True)
        for run, (name, seed) in chosen.items()
    }
    folders = _runs.train_all(options, wanted)
    rows = [
        {"variant": name, "seed": seed, "train_context": context}
        | {key: row[key] for key in ("context_length", "loss", "standard_error", "tokens", "documents")}
        for run, (name, seed) in chosen.items()
        for row in _runs.evaluation(folders[run])
    ]
    medians = _report.medians(rows, ("variant", "context_length"), "loss")
    path = _report.write(options, rows, folders, medians=_report.nested(medians))
    _draw(path, options, medians, title)
    lengths, seeds = options.plan.lengths, len(options.plan.seeds)
    _report.print_table(
        f"Held-out loss by position, nats a token, {'median of ' if seeds > 1 else ''}"
        f"{seeds} seed{'s' if seeds > 1 else ''}; trained at {context:,}",
        ("positions up to", *(f"{length:,}" for length in lengths)),
        ((name, *(medians[name, length][0] for length in lengths)) for name in options.variants),
    )
    _report.print_place(options)


def _draw(path: pathlib.Path, options: _command.Options, medians: Mapping, title: str) -> None:
    (context,) = options.plan.contexts
    lengths, seeds = options.plan.lengths, len(options.plan.seeds)
    lines = []
    for name in options.variants:
        y, low, high = ([medians[name, length][part] for length in lengths] for part in range(3))
        lines.append(_figures.Line(name=name, x=lengths, y=y, low=low, high=high))
    panel = _figures.Panel(
        lines=lines,
        x_label="context length: upper end of each bucket of positions (tokens)",
        y_label="held-out loss (nats per token)",
        ticks=lengths,
        marks=[(context, f"training context {context:,}")],
    )
    about = f"median of {seeds} seeds, band from the least to the largest" if seeds > 1 else "one seed"
    _figures.draw_lines(path, [panel], title=title, about=f"{about}; {options.plan.steps:,} updates each")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
