"""Plots of lines and of values."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from experiments._shared.statistics import Mean, Row
from sympow_jax import plotting

# Presets that variants have shorter names for.
_PRESETS = {"gated": "sympow_gated"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines over one x axis, by name: x, y and, optionally, the edges of a band around y.

    Ticks are those of a logarithmic axis unless `linear` is set. `level` is a gray horizontal line, `mark` a dashed
    vertical one with its name.
    """

    lines: Mapping[str, Sequence[Sequence[float]]]
    x_label: str
    y_label: str
    title: str = ""
    ticks: Sequence[int] | None = None
    linear: bool = False
    log_y: bool = False
    level: float | None = None
    mark: tuple[float, str] | None = None


def lines(means: Mapping[tuple[str, float], Mean]) -> dict[str, Sequence[Sequence[float]]]:
    """Returns the lines of a panel, with bands of one standard error, from means by the name of a line and x."""
    points: dict[str, list[tuple[float, ...]]] = {}
    for (name, x), mean in means.items():
        points.setdefault(name, []).append((x, *mean.band))
    return {name: tuple(zip(*of_line)) for name, of_line in points.items()}


def curves_panel(rows: Sequence[Row], context: int) -> Panel:
    """Returns a panel of the curves at one context, without the first eighth.

    The high losses of the first updates would compress everything else.
    """
    late = {}
    for name in dict.fromkeys(row["variant"] for row in rows):
        points = [row for row in rows if (row["variant"], row["context"]) == (name, context)]
        for row in points[len(points) // 8 :]:
            late[name, row["step"]] = Mean(row["loss"], row["error"])
    label, title = "training loss (nats per token)", f"context {context:,}"
    return Panel(lines=lines(late), x_label="updates", y_label=label, title=title)


def draw_lines(
    path: pathlib.Path, panels: Sequence[Panel], *, title: str, subtitle: str, columns: int | None = None
) -> None:
    """Draws the panels side by side; one panel has its lines named at their ends, several have a legend.

    If `columns` is given, panels are drawn in rows of so many.
    """
    many = len(panels) > 1
    shared = len({panel.y_label for panel in panels}) == 1
    columns = min(columns or len(panels), len(panels))
    rows = -(-len(panels) // columns)
    height = 4.8 if rows == 1 else 1.2 + 2.8 * rows
    figure, all_axes = plotting.make(
        columns, rows=rows, width=max(8.0, 3.6 * columns), height=height, sharey=shared
    )
    for axes in all_axes[len(panels) :]:
        axes.remove()
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    variants = [name.partition(",")[0] for name in names]
    styles = dict(zip(names, plotting.styles([_PRESETS.get(variant, variant) for variant in variants])))
    for axes, panel in zip(all_axes, panels):
        ends = [
            (name, styles[name][0], plotting.draw_line(axes, *line, style=styles[name], label=name))
            for name, line in panel.lines.items()
        ]
        if panel.ticks and panel.linear:
            axes.set_xticks(panel.ticks)
        elif panel.ticks:
            plotting.set_log2_ticks(axes, panel.ticks)
        if panel.log_y:
            axes.set_yscale("log")
        if panel.level is not None:
            axes.axhline(panel.level, color="#999999", linewidth=1.0, zorder=1)
        above = {"title": panel.title} if many else {"title": title, "subtitle": subtitle}
        y_label = "" if shared and all_axes.index(axes) % columns else panel.y_label
        plotting.style(axes, x_label=panel.x_label, y_label=y_label, **above)
        if panel.mark is not None:
            plotting.mark(axes, *panel.mark)
        if not many:
            plotting.label_lines(axes, ends)
    if many:
        figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=12, color=plotting.INK, gid=plotting.TITLE)
        figure.text(0.01, 1 - 0.36 / height, subtitle, fontsize=9, color=plotting.GRAY, gid=plotting.TITLE)
        shown = {
            line.get_label(): line for axes in all_axes for line in axes.lines if line.get_label() in names
        }
        figure.legend(
            handles=list(shown.values()),
            loc="outside lower center",
            ncols=len(shown),
            frameon=False,
            labelcolor=plotting.INK,
        )
    plotting.save(figure, path)


def draw_values(
    path: pathlib.Path,
    values: Sequence[tuple[str, float, float, float]],
    *,
    title: str,
    subtitle: str,
    x_label: str,
) -> None:
    """Draws a dot for each (name, middle, low, high), from the top, with a line from low to high."""
    figure, (axes,) = plotting.make(height=1.6 + 0.28 * len(values))
    places = range(len(values))[::-1]
    for place, (_, middle, low, high) in zip(places, values):
        axes.plot([low, high], [place, place], color=plotting.COLORS[5], linewidth=3, solid_capstyle="round")
        axes.plot(middle, place, marker="o", color=plotting.COLORS[0], markersize=6, markeredgecolor="white")
        axes.annotate(
            f"{middle:.3f}",
            xy=(1.0, place),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=plotting.INK,
        )
    plotting.style(axes, x_label=x_label, y_label="", title=title, subtitle=subtitle)
    axes.set_yticks(places, [name for name, *_ in values])
    plotting.save(figure, path)
