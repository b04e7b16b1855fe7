"""Plots of the experiments: lines in one or more panels, and dots with ranges by name."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.axes
import matplotlib.figure
import numpy as np
import PIL.Image

from sympow_jax.evaluation import figures

__all__ = ["Line", "Panel", "color", "curves_panel", "draw_lines", "draw_values"]

# Color index per variant, so that a variant has the same color in every plot.
_INDEX = {"softmax": 6, "sympow": 1, "gated": 2, "conformal": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """Points of a line and, optionally, the lower and upper edge of a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines over one x axis, which is logarithmic if `ticks` are set; `marks` are named dashed vertical lines."""

    lines: Sequence[Line]
    x_label: str
    y_label: str
    title: str = ""
    ticks: Sequence[int] | None = None
    places: Sequence[int] | None = None  # ticks of an axis that stays linear
    log_y: bool = False
    marks: Sequence[tuple[float, str]] = ()
    level: float | None = None  # a gray horizontal line
    limits: tuple[float, float] | None = None  # of the y axis


def color(name: str, index: int) -> tuple[str, str]:
    """Returns the color and marker of a variant; `index` is its rank among variants without a fixed color."""
    taken = set(_INDEX.values())
    free = [place for place in range(len(figures.COLORS)) if place not in taken]
    place = _INDEX.get(name, free[index % len(free)])
    return figures.COLORS[place], figures.MARKERS[place]


def curves_panel(lines: Sequence[Line], *, title: str = "") -> Panel:
    """Returns a panel of training losses over updates; the high losses of the first eighth are cut off."""
    lowest = min(min(line.y) for line in lines)
    # An axis that starts at the loss of a uniform guess would compress everything else.
    highest = max(line.y[len(line.y) // 8] for line in lines)
    margin = 0.05 * (highest - lowest)
    return Panel(
        lines=lines,
        x_label="updates",
        y_label="training loss (nats per token)",
        title=title,
        limits=(lowest - margin, highest + margin) if margin > 0 else None,
    )


def draw_lines(path: pathlib.Path, panels: Sequence[Panel], *, title: str, about: str) -> None:
    """Draws the panels side by side; one panel has its lines named at their ends, several have a legend."""
    many = len(panels) > 1
    figure, all_axes = figures.make(
        len(panels), width=max(8.0, 3.6 * len(panels)), sharey=len({panel.y_label for panel in panels}) == 1
    )
    shown: dict[str, matplotlib.axes.Axes] = {}
    names = dict.fromkeys(line.name for panel in panels for line in panel.lines)
    others = [name for name in names if name not in _INDEX]
    for axes, panel in zip(all_axes, panels):
        ends = []
        for line in panel.lines:
            tint, marker = color(line.name, others.index(line.name) if line.name in others else 0)
            shown[line.name] = _draw(axes, line, tint, marker)
            finite = [height for height in line.y if math.isfinite(height)]
            ends.append((line.name, tint, finite[-1] if finite else math.nan))
        if panel.ticks:
            figures.set_log2_ticks(axes, panel.ticks)
        if panel.places:
            axes.set_xticks(panel.places)
        if panel.log_y:
            axes.set_yscale("log")
        if panel.level is not None:
            axes.axhline(panel.level, color="#999999", linewidth=1.0, zorder=1)
        above = {"title": panel.title} if many else {"title": title, "about": about}
        figures.style(axes, x_label=panel.x_label, y_label=panel.y_label, **above)
        if limits := _limits(panel, panels):
            axes.set_ylim(*limits)
        for x, text in panel.marks:
            figures.mark(axes, x, text)
        if not many:
            figures.label_lines(axes, ends)
    if many:
        figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=12, color=figures.INK)
        figure.text(0.01, 0.925, about, fontsize=9, color=figures.GRAY)
        figure.legend(
            list(shown.values()),
            list(shown),
            loc="outside lower center",
            ncols=len(shown),
            frameon=False,
            labelcolor=figures.INK,
        )
        for axes in all_axes[1:]:
            axes.set_ylabel("" if panels[0].y_label == panels[-1].y_label else axes.get_ylabel())
    _save(figure, path)


def _limits(panel: Panel, panels: Sequence[Panel]) -> tuple[float, float] | None:
    """Returns the panel's own y limits, or limits that fit all panels if the panels share the y axis."""
    shared = [other.limits for other in panels if other.y_label == panel.y_label and other.limits]
    return (min(low for low, _ in shared), max(high for _, high in shared)) if shared else None


def _draw(axes: matplotlib.axes.Axes, line: Line, tint: str, marker: str):
    y = np.array([value if math.isfinite(value) else np.nan for value in line.y])
    if line.low is not None and line.high is not None:
        axes.fill_between(line.x, line.low, line.high, color=tint, alpha=0.13, linewidth=0)
    marks: dict[str, Any] = (
        {"marker": marker, "markersize": 5, "markeredgecolor": "white"} if len(y) <= 20 else {}
    )
    return axes.plot(line.x, y, color=tint, linewidth=1.8 if marks else 1.3, **marks)[0]


def _save(figure: matplotlib.figure.Figure, path: pathlib.Path) -> None:
    """Saves the figure as a PNG with a palette, which takes a fifth of the bytes and looks the same."""
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())  # type: ignore[attr-defined]  # Agg has it
    image = PIL.Image.fromarray(pixels).convert("RGB")
    image.quantize(128, dither=PIL.Image.Dither.NONE).save(path, optimize=True)


def draw_values(
    path: pathlib.Path,
    values: Sequence[tuple[str, float, float, float]],
    *,
    title: str,
    about: str,
    x_label: str,
) -> None:
    """Draws a dot for each (name, median, least, largest), from the top, with a line from least to largest."""
    figure, (axes,) = figures.make(height=1.6 + 0.28 * len(values))
    places = np.arange(len(values))[::-1]
    for place, (_, median, least, largest) in zip(places, values):
        axes.plot(
            [least, largest], [place, place], color=figures.COLORS[5], linewidth=3, solid_capstyle="round"
        )
        axes.plot(median, place, marker="o", color=figures.COLORS[0], markersize=6, markeredgecolor="white")
        axes.annotate(
            f"{median:.3f}",
            xy=(1.0, place),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=figures.INK,
        )
    figures.style(axes, x_label=x_label, y_label="", title=title, subtitle=about)
    axes.set_yticks(places, [name for name, *_ in values])
    _save(figure, path)
