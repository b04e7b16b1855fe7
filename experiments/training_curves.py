"""Training loss against updates at each training context.

Figures 3 (p = 4) and 4 (p = 2) of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025),
from the runs of `context_scaling`, which are trained if they are missing.
"""

import sys
from collections.abc import Sequence

from experiments import _command, _figures, _report, _runs, context_scaling
from sympow_jax.training import cli

NAME = "training_curves"


def main(arguments: Sequence[str]) -> int:
    """Runs the experiment with the arguments after its name; returns the exit code."""
    with cli.user_errors():
        options = context_scaling.parse(NAME, __doc__ or "", arguments)
        runs, folders = context_scaling.train(options)
        rows = [
            {"variant": variant, "context": context, "seed": seed, "step": step, "loss": loss}
            for run, (variant, context, seed) in runs.items()
            for step, loss in _runs.thinned(_runs.curve(folders[run]))
        ]
        medians = _report.medians(rows, ("variant", "context", "step"), "loss")
        path = _report.write(options, rows, folders)
        _figures.draw_lines(
            path,
            [_panel(options, medians, context) for context in options.plan.contexts],
            title=f"Training loss, p = {options.power}",
            about="each point the mean of the updates since the one before",
        )
        steps = sorted({row["step"] for row in rows})
        shown = [steps[len(steps) * quarter // 4 - 1] for quarter in range(1, 5) if len(steps) >= 4] or steps
        _report.print_table(
            "Training loss, nats a token, after so many updates",
            ("", *(f"{step:,}" for step in shown)),
            (
                (f"{name}, context {context:,}", *(medians[name, context, step][0] for step in shown))
                for context in options.plan.contexts
                for name in options.variants
            ),
        )
        _report.print_place(options)
        return 0


def _panel(options: _command.Options, medians, context: int) -> _figures.Panel:
    lines = []
    for name in options.variants:
        steps = sorted(step for variant, at, step in medians if (variant, at) == (name, context))
        y, low, high = ([medians[name, context, step][part] for step in steps] for part in range(3))
        lines.append(_figures.Line(name=name, x=steps, y=y, low=low, high=high))
    return _figures.curves_panel(lines, title=f"context {context:,}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
