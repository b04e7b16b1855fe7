"""Common style of plots: palette, axes, and labels at the ends of lines."""

import itertools
import math
import pathlib
from collections.abc import Sequence

import matplotlib.axes
import matplotlib.backends.backend_agg
import matplotlib.figure
import matplotlib.font_manager
import matplotlib.ticker
import numpy as np
from numpy.typing import ArrayLike

from sympow_jax import spelling
from sympow_jax.process import atomic

# Okabe and Ito's palette, which readers with any color vision can distinguish. Its yellow, too light for a line on
# white, is replaced by a brown. Markers repeat the distinction for print.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C510A")
MARKERS = "osD^vPX>"
INK = "#444444"
GRAY = "#666666"
TITLE = "title"
"""`gid` of the title of a whole figure, which is not in its PDF."""

# Index in COLORS and MARKERS of a preset, so that it looks the same in every plot.
_PRESETS = {"conformal": 0, "sympow": 1, "sympow_gated": 2, "expressive": 3, "linear": 4, "softmax": 6}
# Order in which other lines get the free ones: last those of the presets that most plots have.
_FREE = (3, 4, 5, 7, 0, 1, 2, 6)
_LINE_HEIGHT = 0.055  # height of a label's line at 9.5 points, as a fraction of the axes' height


def make(
    panels: int = 1,
    *,
    rows: int = 1,
    width: float = 8.0,
    height: float = 4.8,
    sharex: bool = False,
    sharey: bool = True,
) -> tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes]]:
    """Returns a figure with `panels` panels per row, and the panels row by row; sizes are in inches."""
    figure = blank(width=width, height=height)
    axes = figure.subplots(rows, panels, sharex=sharex, sharey=sharey, squeeze=False)
    return figure, list(axes.flat)


def blank(*, width: float, height: float) -> matplotlib.figure.Figure:
    """Returns a figure without panels; sizes are in inches."""
    # Not pyplot, which has global state and may need a display.
    figure = matplotlib.figure.Figure(figsize=(width, height), dpi=160, layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    return figure


def has_glyph(character: str) -> bool:
    """Returns whether a character can be seen in a figure."""
    font = matplotlib.font_manager.get_font(matplotlib.font_manager.findfont("DejaVu Sans"))
    return character.isprintable() and ord(character) in font.get_charmap()


def plain(name: str) -> str:
    """Returns the text with which matplotlib shows a name, shortened, as it is: without formulas or missing glyphs."""
    shown = "".join(
        x if has_glyph(x) else x.encode("unicode_escape").decode() for x in spelling.cut(name, 60)
    )
    # A legend leaves out labels that begin with an underscore.
    return (" " if shown.startswith("_") else "") + shown.replace("$", r"\$")


def save(figure: matplotlib.figure.Figure, path: pathlib.Path) -> None:
    """Writes the figure as PNG to `path`, and without its title as PDF next to it."""
    with atomic.replace(path) as draft:
        figure.savefig(draft)
    for title in figure.findobj(lambda artist: artist.get_gid() == TITLE):
        title.set_visible(False)
        title.set_in_layout(False)
    with atomic.replace(path.with_suffix(".pdf")) as draft:
        figure.savefig(draft, metadata={"CreationDate": None})


def styles(presets: Sequence[str]) -> list[tuple[str, str]]:
    """Returns the color and the marker of each line, from the preset that it shows.

    The first line of a preset has the preset's own. Others, and lines of other presets, have free ones in turn.
    """
    own = [_PRESETS.get(name) if name not in presets[:i] else None for i, name in enumerate(presets)]
    others = itertools.cycle([i for i in _FREE if i not in own] or _FREE)
    indices = [next(others) if i is None else i for i in own]
    return [(COLORS[i], MARKERS[i]) for i in indices]


def style(
    axes: matplotlib.axes.Axes, *, x_label: str, y_label: str, title: str = "", subtitle: str = ""
) -> None:
    """Applies the common style, with a title above the axes.

    With a `subtitle`, which is smaller, both are the `TITLE` of the whole figure.
    """
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=INK, labelsize=9)
    axes.margins(y=0.12)
    if title:
        axes.set_title(
            title,
            loc="left",
            fontsize=12,
            color=INK,
            pad=36 if subtitle else 18,
            gid=TITLE if subtitle else None,
        )
    if subtitle:
        axes.annotate(
            subtitle,
            xy=(0.0, 1.0),
            xycoords="axes fraction",
            xytext=(0, 21),
            textcoords="offset points",
            fontsize=9,
            color=GRAY,
            gid=TITLE,
        )


def set_log2_ticks(axes: matplotlib.axes.Axes, values: Sequence[int]) -> None:
    """Makes x a logarithmic axis of token counts, with a tick at each value."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def mark(axes: matplotlib.axes.Axes, x: float, text: str) -> None:
    """Draws a dashed vertical line at x, labeled above the axes, where no curve crosses the label."""
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


def draw_line(
    axes: matplotlib.axes.Axes,
    x: ArrayLike,
    y: ArrayLike,
    *band: ArrayLike,
    style: tuple[str, str],
    label: str = "",
) -> float:
    """Draws a line and, if their heights are given, the lower and upper edge of a band around it.

    Heights that are not finite are omitted. Lines of many points have no markers.

    Args:
        axes: panel to draw on.
        x: places of the points.
        y: their heights.
        band: heights of the lower and of the upper edge, or nothing.
        style: color and marker, as `styles` returns them.
        label: name in a legend.

    Returns:
        The last finite height; NaN if there is none.
    """
    color, marker = style
    heights = np.where(np.isfinite(y), y, np.nan)
    few = len(heights) <= 20
    if band:
        axes.fill_between(x, band[0], band[1], color=color, alpha=0.13, linewidth=0)
    axes.plot(
        x,
        heights,
        color=color,
        label=label,
        linewidth=1.8 if few else 1.3,
        marker=marker if few else "",
        markersize=5,
        markeredgecolor="white",
    )
    finite = heights[np.isfinite(heights)]
    return float(finite[-1]) if len(finite) else math.nan


def label_lines(axes: matplotlib.axes.Axes, ends: Sequence[tuple[str, str, float]]) -> None:
    """Labels each line at its right end, in its color, and moves labels apart where they would overlap.

    `ends` has a label, a color and the final height of each line, NaN for a line without a finite value.
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
