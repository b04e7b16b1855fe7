"""Pictures of attention maps, half-lives and rotation rates over the tokens of a text."""

import math
import pathlib
from collections.abc import Sequence

import matplotlib.axes
import matplotlib.colors
import matplotlib.figure
import matplotlib.font_manager
import matplotlib.ticker
import numpy as np
from jaxtyping import Float

from sympow_jax.evaluation import attention_maps, figures

__all__ = ["draw_half_lives", "draw_rotations", "draw_weights", "visible"]

# Inches.
_MAP_SIDE = 2.6
_MAPS_WIDTH = 16.0
_TOKEN = 0.115  # what the name of a token takes
_STRIP_WIDTHS = (5.0, 14.0)
_HEAD = 0.24  # of a strip
_COLUMNS = 4  # of the heads of a single layer
# Of names of tokens.
_LONGEST = 12
_SMALL = 7  # points
_UNSEEN = "#e4e4e4"
# What the eye cannot tell apart, and the colours of half-lives leave out.
_HALF_LIVES = (0.1, 1e5)


def visible(text: bytes) -> str:
    """A token as a label: spaces and line ends as signs, what no font or no encoding has in hexadecimal."""
    try:
        characters = text.decode()
    except UnicodeDecodeError:
        return text.hex()
    glyphs = matplotlib.font_manager.get_font(matplotlib.font_manager.findfont("DejaVu Sans")).get_charmap()
    signs = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
    characters = "".join(
        signs.get(x, x if x.isprintable() and ord(x) in glyphs else f"{ord(x):x}") for x in characters
    )
    return characters if len(characters) <= _LONGEST else characters[: _LONGEST - 1] + "…"


def draw_weights(
    path: pathlib.Path,
    found: Sequence[attention_maps.LayerMaps],
    labels: Sequence[str],
    *,
    about: str,
    causal: bool,
) -> None:
    """A map a head: layers one below the other, or the heads of one layer in rows of four."""
    heads, time = found[0].weights.shape[:2]
    columns = heads if len(found) > 1 else min(heads, _COLUMNS)
    rows = math.ceil(len(found) * heads / columns)
    side = min(_MAP_SIDE, _MAPS_WIDTH / columns)
    named = time * _TOKEN <= max(side, min(2 * _MAP_SIDE, _MAPS_WIDTH / columns))
    side = max(side, time * _TOKEN) if named else side
    figure, axes = figures.make(
        columns, rows=rows, width=columns * side + 2.0, height=rows * (side + 0.25) + 1.3, sharex=True
    )
    norm, colours = _weight_colours(max(np.abs(layer.weights).max() for layer in found), found)
    image = None
    for index, panel in enumerate(axes):
        if index >= len(found) * heads:
            panel.set_visible(False)
            continue
        layer, head = found[index // heads], index % heads
        weights = layer.weights[head]
        if causal:
            weights = np.ma.masked_where(np.triu(np.ones_like(weights, bool), 1), weights)
        image = panel.imshow(weights, cmap=colours, norm=norm, extent=(0.5, time + 0.5, time + 0.5, 0.5))
        panel.set_title(f"layer {layer.layer}, head {head}", fontsize=9, color=figures.INK)
        _frame(panel)
        if named:
            _name_ticks(panel.xaxis, labels)
            _name_ticks(panel.yaxis, labels, upright=True)
    assert image is not None
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 4 / (rows * side)), aspect=25, pad=0.01)
    _style_bar(bar, "weight of a value in an output")
    ticks = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0]
    bar.set_ticks([x for x in [*(-y for y in ticks[:0:-1]), *ticks] if norm.vmin <= x <= norm.vmax])
    figure.supxlabel("token that is read (key)", fontsize=10, color=figures.INK)
    figure.supylabel("token that reads (query)", fontsize=10, color=figures.INK)
    _title(figure, "Attention maps", about)
    figures.save(figure, path)


def draw_half_lives(
    path: pathlib.Path, found: Sequence[attention_maps.LayerMaps], labels: Sequence[str], *, about: str
) -> None:
    """A row a head, of value channels the median."""
    values = []
    for layer in found:
        assert layer.half_life is not None
        values.append(_per_head(layer.half_life, np.median))
    shown = np.clip(values, *_HALF_LIVES)
    low, high = float(shown.min()), float(shown.max())
    norm = matplotlib.colors.LogNorm(low, max(high, 1.01 * low))
    figure, bar = _draw_strips(found, values, labels, norm, "viridis")
    _style_bar(bar, "half-life (tokens)")
    bar.formatter = matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:,.3g}")
    bar.update_ticks()
    median = ", the median of its value channels" if found[0].half_life.ndim == 3 else ""  # type: ignore[union-attr]
    _title(
        figure,
        "Half-lives",
        f"{about}\ntokens until the decay halves what a head remembers{median}, did it always forget as at this token",
    )
    figures.save(figure, path)


def draw_rotations(
    path: pathlib.Path, found: Sequence[attention_maps.LayerMaps], labels: Sequence[str], *, about: str
) -> None:
    """A row a head: the fastest pair's rate, or of rates by pair the mean, as if each were the fastest."""
    theta = found[0].theta
    assert theta is not None
    values = []
    for layer in found:
        assert layer.rate is not None
        values.append(_per_head(layer.rate, np.mean) * theta[0])
    span = max(float(np.abs(np.array(values) - theta[0]).max()), 0.01)
    norm = matplotlib.colors.CenteredNorm(theta[0], span)
    figure, bar = _draw_strips(found, values, labels, norm, "PuOr_r")
    _style_bar(bar, "rotation (radians a token)")
    which = (
        "mean of the rates of the pairs, each in units of the fastest"
        if found[0].rate.ndim == 3
        # type: ignore[union-attr]
        else ("of the fastest pair of dimensions")
    )
    _title(
        figure,
        "Rotation rates",
        f"{about}\n{which}, which rope turns by {theta[0]:.2f}; the slowest turns by {theta[-1] / theta[0]:.2g} of it",
    )
    figures.save(figure, path)


def _per_head(values: Float[np.ndarray, "K T ..."], of_many) -> Float[np.ndarray, "K T"]:
    return values if values.ndim == 2 else of_many(values, axis=-1)


def _draw_strips(found, values, labels: Sequence[str], norm, colours: str):
    """A panel a layer, a row a head and a column a token; the figure and its colour bar."""
    heads, time = values[0].shape
    width = float(np.clip(time * 1.4 * _TOKEN, *_STRIP_WIDTHS))
    panel_height = max(heads * _HEAD, 0.7)
    figure, axes = figures.make(
        1, rows=len(found), width=width + 2.2, height=len(found) * (panel_height + 0.25) + 1.6, sharex=True
    )
    image = None
    for panel, layer, rows in zip(axes, found, values):
        extent = (0.5, time + 0.5, heads - 0.5, -0.5)
        image = panel.imshow(
            rows, cmap=colours, norm=norm, extent=extent, aspect="auto", interpolation="none"
        )
        panel.set_title(f"layer {layer.layer}", fontsize=9, color=figures.INK, loc="left")
        panel.set_yticks(range(heads))
        panel.set_ylabel("head", fontsize=9, color=figures.INK)
        _frame(panel)
    if time * _TOKEN <= width:
        _name_ticks(axes[-1].xaxis, labels)
    axes[-1].set_xlabel("token", fontsize=10, color=figures.INK)
    bar = figure.colorbar(image, ax=axes, aspect=20, pad=0.01, extend=_beyond(values, norm))
    return figure, bar


def _beyond(values, norm) -> str:
    below, above = np.min(values) < norm.vmin * (1 - 1e-6), np.max(values) > norm.vmax * (1 + 1e-6)
    return {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[
        bool(below), bool(above)
    ]


def _weight_colours(largest: float, found) -> tuple[matplotlib.colors.FuncNorm, matplotlib.colors.Colormap]:
    """Colours of weights by their square roots, so that those of long rows can be seen."""
    negative = min(layer.weights.min() for layer in found) < 0
    norm = matplotlib.colors.FuncNorm(
        (lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * x**2),
        vmin=-largest if negative else 0,
        vmax=largest,
    )
    colours = matplotlib.colormaps["RdBu_r" if negative else "magma_r"].copy()
    colours.set_bad(_UNSEEN)
    return norm, colours


def _name_ticks(axis, labels: Sequence[str], *, upright: bool = False) -> None:
    turned = 90 if not upright and max(map(len, labels)) > 2 else 0
    # Text as it is: a dollar is no formula.
    axis.set_ticks(
        range(1, len(labels) + 1),
        labels,
        fontsize=_SMALL,
        rotation=turned,
        parse_math=False,
        color=figures.INK,
    )


def _frame(axes: matplotlib.axes.Axes) -> None:
    axes.spines[:].set_color("#999999")
    axes.tick_params(colors=figures.INK, labelsize=8, length=2)


def _style_bar(bar, label: str) -> None:
    bar.set_label(label, color=figures.INK, fontsize=9)
    bar.ax.tick_params(colors=figures.INK, labelsize=8)
    bar.outline.set_edgecolor("#999999")


def _title(figure: matplotlib.figure.Figure, title: str, about: str) -> None:
    figure.suptitle(f"{title} · {about}", x=0.01, ha="left", fontsize=10.5, color=figures.INK)
