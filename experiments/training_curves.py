"""Training loss against updates at each training context.

Figures 3 (p = 4) and 4 (p = 2) of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025),
from the runs of `context_scaling`, which are trained if they are missing.
"""

import sys
from collections.abc import Sequence

from experiments import _shared, context_scaling


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment with the arguments after its name; returns the exit code."""
    return _shared.run(
        "training_curves",
        __doc__,
        arguments,
        _experiment,
        plans=context_scaling.PLANS,
        variants=context_scaling.VARIANTS,
        powers=tuple(context_scaling.PAPER_CONTEXTS),
    )


def _experiment(options: _shared.Options) -> None:
    options, folders = context_scaling.train(options)
    rows = [
        {"variant": variant, "context": context, "seed": seed, "step": step, "loss": loss}
        for (variant, context, seed), folder in folders.items()
        for step, loss in _shared.curve(folder)
    ]
    medians = _shared.medians(rows, ("variant", "context", "step"), "loss")
    steps = sorted({row["step"] for row in rows})
    path = _shared.write(options, rows, folders.values())
    _shared.draw_lines(
        path,
        [_panel(options, medians, context, steps) for context in options.plan.contexts],
        title=f"Training loss, p = {options.power}",
        subtitle="each point the mean of the updates since the one before; without the first eighth",
    )
    shown = [steps[len(steps) * quarter // 4 - 1] for quarter in range(1, 5) if len(steps) >= 4] or steps
    _shared.print_table(
        "Training loss, nats a token, after so many updates",
        ("", *(f"{step:,}" for step in shown)),
        (
            (f"{name}, context {context:,}", *(medians[name, context, step][0] for step in shown))
            for context in options.plan.contexts
            for name in options.variants
        ),
    )


def _panel(options: _shared.Options, medians, context: int, steps: Sequence[int]) -> _shared.Panel:
    # The high losses of the first updates would compress everything else.
    late = steps[len(steps) // 8 :]
    lines = {
        name: (late, *zip(*(medians[name, context, step] for step in late))) for name in options.variants
    }
    return _shared.Panel(
        lines=lines,
        x_label="updates",
        y_label="training loss (nats per token)",
        title=f"context {context:,}",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
