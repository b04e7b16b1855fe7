"""Loss by position within and beyond the training context.

Figure 2 of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025): models trained at one
context, evaluated to several times it. The paper trains at 16,384 with p = 4 (--power) and evaluates to 65,536; the
toy scale trains at 1,024 and evaluates to 8,192 on documents of the standard library.
"""

import sys
from collections.abc import Mapping, Sequence

from experiments import _shared
from sympow_jax import config

PLANS = {
    "toy": _shared.Plan(
        seeds=(0, 1, 2), steps=300, contexts=(1024,), lengths=(128, 256, 512, 1024, 2048, 4096, 8192)
    ),
    "paper": _shared.Plan(
        seeds=(0,),
        steps=100_000,
        contexts=(16_384,),
        lengths=tuple(2**exponent for exponent in range(8, 17)),
        documents=64,
    ),
    "tiny": _shared.Plan(seeds=(0, 1), steps=2, contexts=(16,), lengths=(8, 16, 32), documents=2),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment with the arguments after its name; returns the exit code."""
    variants = tuple(_shared.power_variants(2))
    return _shared.run(
        "evaluation_context",
        __doc__,
        arguments,
        lambda options: report(
            options,
            _shared.power_variants(options.power),
            title=f"Loss within and beyond the training context, p = {options.power}",
        ),
        plans=PLANS,
        variants=variants,
        powers=(2, 4, 6),
    )


def report(options: _shared.Options, attentions: Mapping[str, config.AttentionConfig], *, title: str) -> None:
    """Trains and evaluates the variants of `options`, then writes and prints their losses by position."""
    folders = _shared.train(
        options, attentions, lambda name: _shared.power_label(name, options.power), evaluated=True
    )
    rows = [
        {"variant": variant, "seed": seed, "train_context": context}
        | {key: row[key] for key in ("context_length", "loss", "standard_error", "tokens", "documents")}
        for (variant, context, seed), folder in folders.items()
        for row in _shared.evaluation(folder)
    ]
    medians = _shared.medians(rows, ("variant", "context_length"), "loss")
    (context,), lengths, seeds = options.plan.contexts, options.plan.lengths, len(options.plan.seeds)
    path = _shared.write(options, rows, folders.values(), medians=_shared.nested(medians))
    panel = _shared.Panel(
        lines={
            name: (lengths, *zip(*(medians[name, length] for length in lengths))) for name in options.variants
        },
        x_label="context length: upper end of each bucket of positions (tokens)",
        y_label="held-out loss (nats per token)",
        ticks=lengths,
        mark=(context, f"training context {context:,}"),
    )
    about = f"median of {seeds} seeds, band from the least to the largest" if seeds > 1 else "one seed"
    _shared.draw_lines(path, [panel], title=title, subtitle=f"{about}; {options.plan.steps:,} updates each")
    _shared.print_table(
        f"Held-out loss by position, nats a token, {'median of ' if seeds > 1 else ''}"
        f"{seeds} seed{'s' if seeds > 1 else ''}; trained at {context:,}",
        ("positions up to", *(f"{length:,}" for length in lengths)),
        ((name, *(medians[name, length][0] for length in lengths)) for name in options.variants),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
