"""Plot of loss against position, one line per run."""

import itertools
import math
import pathlib
from collections.abc import Sequence

import matplotlib.axes
import numpy as np

from sympow_jax.evaluation import figures, report

__all__ = ["write_plot"]


def write_plot(path: pathlib.Path, rows: Sequence[report.Row]) -> None:
    """Draws loss in nats per token over context length, with a band of one standard error over documents.

    A marker is at the upper end of its bucket, a dashed line at each training context. Losses that are not finite are
    omitted from a line and listed in its label.
    """
    runs = {name: list(group) for name, group in itertools.groupby(rows, key=lambda row: row.run)}
    figure, (axes,) = figures.make()
    contexts = sorted({row.train_context for row in rows})
    ends = []
    for index, (name, run) in enumerate(runs.items()):
        if len(contexts) > 1:
            name += f"\ntrained at {run[0].train_context:,}"
        color = figures.COLORS[index % len(figures.COLORS)]
        ends.append(_draw_run(axes, name, run, color, figures.MARKERS[index % len(figures.MARKERS)]))
    _style_axes(axes, rows)
    for context in contexts:
        text = f"training context {context:,}" if len(contexts) == 1 else f"trained at {context:,}"
        figures.mark(axes, context, text)
    figures.label_lines(axes, ends)
    figures.save(figure, path)


def _draw_run(
    axes: matplotlib.axes.Axes, name: str, run: Sequence[report.Row], color: str, marker: str
) -> tuple[str, str, float]:
    """Draws one line; returns its label, its color and its final height."""
    lengths = np.array([row.context_length for row in run])
    losses = np.array([row.loss if math.isfinite(row.loss) else np.nan for row in run])
    errors = np.array([row.standard_error or 0.0 for row in run])
    axes.fill_between(lengths, losses - errors, losses + errors, color=color, alpha=0.13, linewidth=0)
    axes.plot(
        lengths, losses, color=color, marker=marker, markersize=5, linewidth=1.8, markeredgecolor="white"
    )
    finite = np.isfinite(losses)
    missing = ", ".join(f"{length:,}" for length in lengths[~finite])
    label = f"{name}\nnot finite at {missing}" if missing else name
    return label, color, float(losses[finite][-1]) if finite.any() else math.nan


def _style_axes(axes: matplotlib.axes.Axes, rows: Sequence[report.Row]) -> None:
    figures.set_log2_ticks(axes, sorted({row.context_length for row in rows}))
    documents = rows[0].documents
    subtitle = (
        f"mean of each bucket of positions; the same {documents} document{'s' if documents > 1 else ''}"
    )
    subtitle += " at every length" + ("; band: one standard error over documents" if documents > 1 else "")
    figures.style(
        axes,
        x_label="context length: upper end of each bucket of positions (tokens)",
        y_label="held-out loss (nats per token)",
        title="Loss within and beyond the training context",
        subtitle=subtitle,
    )
