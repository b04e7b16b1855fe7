"""The plot of loss against position, one line a run."""

import itertools
import math
import pathlib
from collections.abc import Sequence

import matplotlib.axes
import matplotlib.backends.backend_agg
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from sympow_jax.evaluation import report

__all__ = ["write_plot"]

# Okabe and Ito's palette, its yellow (too light for a line on white) replaced by a brown: told apart by
# readers with any colour vision. Markers repeat the distinction for print. As many as there are presets.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C510A")
_MARKERS = "osD^vPX>"
_INK = "#444444"
_LINE_HEIGHT = 0.055  # of a line of a label at 9.5 points, in heights of the axes


def write_plot(path: pathlib.Path, rows: Sequence[report.Row]) -> None:
    """Draws loss in nats per token over context length, with a band of one standard error over documents.

    A marker stands at the upper end of its bucket, a dashed line at each training context. Losses that are
    not finite are left out of a line and named at its label.
    """
    runs = {name: list(group) for name, group in itertools.groupby(rows, key=lambda row: row.run)}
    # Not pyplot: no global state, no display.
    figure = matplotlib.figure.Figure(figsize=(8.0, 4.8), dpi=160, layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    contexts = sorted({row.train_context for row in rows})
    ends = []
    for index, (name, run) in enumerate(runs.items()):
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        if len(contexts) > 1:
            name += f"\ntrained at {run[0].train_context:,}"
        ends.append(_draw_run(axes, name, run, colour, marker))
    _style_axes(axes, rows)
    _mark_training_contexts(axes, contexts)
    _label_lines(axes, ends)
    figure.savefig(path)


def _draw_run(
    axes: matplotlib.axes.Axes, name: str, run: Sequence[report.Row], colour: str, marker: str
) -> tuple[str, str, float]:
    """Draws one line; returns its label, its colour and the height at which it ends."""
    lengths = np.array([row.context_length for row in run])
    losses = np.array([row.loss if math.isfinite(row.loss) else np.nan for row in run])
    errors = np.array([row.standard_error or 0.0 for row in run])
    axes.fill_between(lengths, losses - errors, losses + errors, color=colour, alpha=0.13, linewidth=0)
    axes.plot(
        lengths, losses, color=colour, marker=marker, markersize=5, linewidth=1.8, markeredgecolor="white"
    )
    finite = np.isfinite(losses)
    missing = ", ".join(f"{length:,}" for length in lengths[~finite])
    label = f"{name}\nnot finite at {missing}" if missing else name
    return label, colour, float(losses[finite][-1]) if finite.any() else math.nan


def _style_axes(axes: matplotlib.axes.Axes, rows: Sequence[report.Row]) -> None:
    lengths = sorted({row.context_length for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_xlabel("context length: upper end of each bucket of positions (tokens)", color=_INK)
    axes.set_ylabel("held-out loss (nats per token)", color=_INK)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=_INK, labelsize=9)
    axes.margins(y=0.12)
    documents = rows[0].documents
    about = f"mean of each bucket of positions; the same {documents} document{'s' if documents > 1 else ''}"
    about += " at every length" + ("; band: one standard error over documents" if documents > 1 else "")
    axes.set_title("Loss within and beyond the training context", loc="left", fontsize=12, color=_INK, pad=36)
    axes.annotate(
        about,
        xy=(0.0, 1.0),
        xycoords="axes fraction",
        xytext=(0, 21),
        textcoords="offset points",
        fontsize=9,
        color="#666666",
    )


def _mark_training_contexts(axes: matplotlib.axes.Axes, contexts: Sequence[int]) -> None:
    """A dashed line at each training context, named above the axes, where no curve can run through it."""
    for context in contexts:
        axes.axvline(context, color="#888888", linestyle=(0, (4, 3)), linewidth=1.1, zorder=1)
        axes.annotate(
            f"training context {context:,}" if len(contexts) == 1 else f"trained at {context:,}",
            xy=(context, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            color="#666666",
        )


def _label_lines(axes: matplotlib.axes.Axes, ends: Sequence[tuple[str, str, float]]) -> None:
    """Names each line at its right end, in its colour, pushed apart where labels would overlap."""
    low, high = axes.get_ylim()
    heights = [(end - low) / (high - low) if math.isfinite(end) else 0.5 for _, _, end in ends]
    sizes = [_LINE_HEIGHT * (1 + label.count("\n")) for label, _, _ in ends]
    order = np.argsort(heights, kind="stable")
    placed = np.array(heights)[order]
    for below, above in itertools.pairwise(range(len(order))):
        gap = (sizes[order[below]] + sizes[order[above]]) / 2
        placed[above] = max(placed[above], placed[below] + gap)
    placed -= max(0.0, placed[-1] - 1.0)  # a stack of labels stays below the top
    for height, index in zip(placed, order):
        label, colour, _ = ends[index]
        axes.annotate(
            label,
            xy=(1.0, height),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=colour,
            fontweight="bold",
        )
