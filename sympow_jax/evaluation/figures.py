"""The look of plots: one palette, quiet axes, lines named where they end."""

import itertools
import math
import pathlib
from collections.abc import Sequence

import matplotlib.axes
import matplotlib.backends.backend_agg
import matplotlib.figure
import matplotlib.ticker
import numpy as np

__all__ = [
    "COLORS",
    "GRAY",
    "INK",
    "MARKERS",
    "label_lines",
    "make",
    "mark",
    "save",
    "set_log2_ticks",
    "style",
]

# Okabe and Ito's palette, its yellow (too light for a line on white) replaced by a brown: told apart by
# readers with any color vision. Markers repeat the distinction for print. As many as there are presets.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C510A")
MARKERS = "osD^vPX>"
INK = "#444444"
GRAY = "#666666"
_LINE_HEIGHT = 0.055  # of a line of a label at 9.5 points, in heights of the axes


def make(
    panels: int = 1,
    *,
    rows: int = 1,
    width: float = 8.0,
    height: float = 4.8,
    sharex: bool = False,
    sharey: bool = True,
) -> tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes]]:
    """A figure of so many panels side by side in each row, and its panels row by row; inches."""
    # Not pyplot: no global state, no display.
    figure = matplotlib.figure.Figure(figsize=(width, height), dpi=160, layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    axes = figure.subplots(rows, panels, sharex=sharex, sharey=sharey, squeeze=False)
    return figure, list(axes.flat)


def save(figure: matplotlib.figure.Figure, path: pathlib.Path) -> None:
    """Writes the figure; the ending of the path says as what."""
    figure.savefig(path)


def style(
    axes: matplotlib.axes.Axes, *, x_label: str, y_label: str, title: str = "", about: str = ""
) -> None:
    """Horizontal grid lines, two spines, and above the axes a title and, smaller, what the plot is about."""
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=INK, labelsize=9)
    axes.margins(y=0.12)
    if title:
        axes.set_title(title, loc="left", fontsize=12, color=INK, pad=36 if about else 18)
    if about:
        axes.annotate(
            about,
            xy=(0.0, 1.0),
            xycoords="axes fraction",
            xytext=(0, 21),
            textcoords="offset points",
            fontsize=9,
            color=GRAY,
        )


def set_log2_ticks(axes: matplotlib.axes.Axes, values: Sequence[int]) -> None:
    """A logarithmic axis of numbers of tokens, with a tick at each value."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def mark(axes: matplotlib.axes.Axes, x: float, text: str) -> None:
    """A dashed vertical line at x, named above the axes, where no curve can run through the name."""
    axes.axvline(x, color="#888888", linestyle=(0, (4, 3)), linewidth=1.1, zorder=1)
    axes.annotate(
        text,
        xy=(x, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="center",
        fontsize=8.5,
        color=GRAY,
    )


def label_lines(axes: matplotlib.axes.Axes, ends: Sequence[tuple[str, str, float]]) -> None:
    """Names each line at its right end, in its color, pushed apart where labels would overlap.

    `ends` are a label, a color and the height at which the line ends, NaN for a line without a finite value.
    """
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
        label, color, _ = ends[index]
        axes.annotate(
            label,
            xy=(1.0, height),
            xycoords="axes fraction",
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=color,
            fontweight="bold",
        )
