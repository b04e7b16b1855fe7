"""Figures of attention maps, half-lives and rotation rates over the tokens of a text."""

import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any, cast

import matplotlib.axes
import matplotlib.colors
import matplotlib.figure
import matplotlib.ticker
import numpy as np
from jaxtyping import Float

from sympow_jax import plotting
from sympow_jax.inspection import attention_maps

# Inches: width of one map (more if token names need it), width of all maps side by side, space per token name (tight
# and comfortable), width and row height of strips with one row per head.
_MAP = 2.6
_MAPS = 16.0
_NAME, _WIDE_NAME = 0.115, 0.18
_STRIPS = (6.5, 14.0)
_STRIP_ROW = 0.24
_COLUMNS = 4  # maps per row for a single layer
_LONGEST = 12  # characters per token name
_CHARACTERS = 12.5  # characters of a title per inch
_UNSEEN = "#e4e4e4"
_EDGE = "#999999"
_WEIGHT_TICKS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)
# Range of the color scale; half-lives outside it have the color of its ends.
_HALF_LIVES = (0.1, 1e5)


def visible(text: bytes) -> str:
    """Returns a printable label of a token: symbols for whitespace, hexadecimal digits for unprintable bytes."""
    try:
        characters = text.decode()
    except UnicodeDecodeError:
        return text.hex()
    signs = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"}
    shown = "".join(signs.get(x, x if plotting.has_glyph(x) else f"{ord(x):x}") for x in characters)
    return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"


def draw_weights(
    path: pathlib.Path,
    layers: Sequence[attention_maps.LayerMaps],
    labels: Sequence[str],
    *,
    subtitle: str,
    causal: bool,
) -> None:
    """Draws one map per head: one row of maps per layer, or rows of four for a single layer."""
    heads, time = layers[0].weights.shape[:2]
    maps = [(layer, head) for layer in layers for head in range(heads)]
    columns = heads if len(layers) > 1 else min(heads, _COLUMNS)
    rows = -(-len(maps) // columns)
    side = min(_MAP, _MAPS / columns)
    named = time * _NAME <= min(2 * _MAP, _MAPS / columns)
    side = max(side, time * _NAME) if named else side
    figure, axes = plotting.make(
        columns, rows=rows, width=columns * side + 2, height=rows * (side + 0.25) + 1, sharex=True
    )
    # Square roots of weights, so that small weights in long rows are visible.
    low = min(float(layer.weights.min()) for layer in layers)
    largest = max(float(np.abs(layer.weights).max()) for layer in layers)
    lowest = -largest if low < 0 else 0.0
    norm = matplotlib.colors.FuncNorm(
        (lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * x**2), vmin=lowest, vmax=largest
    )
    colors = matplotlib.colormaps["RdBu_r" if low < 0 else "magma_r"].with_extremes(bad=_UNSEEN)
    for panel, (layer, head) in zip(axes, maps):
        weights = layer.weights[head]
        if causal:
            weights = np.ma.masked_where(np.triu(np.ones_like(weights, bool), 1), weights)
        image = panel.imshow(weights, cmap=colors, norm=norm, extent=(0.5, time + 0.5, time + 0.5, 0.5))
        panel.set_title(f"layer {layer.layer}, head {head}", fontsize=9, color=plotting.INK)
        _style(panel)
        if named:
            _name_tokens(panel.xaxis, labels, side)
            _name_tokens(panel.yaxis, labels, side, turn=False)
    for panel in axes[len(maps) :]:
        panel.set_visible(False)
    bar = figure.colorbar(image, ax=axes, shrink=min(1.0, 4 / (rows * side)), aspect=25, pad=0.01)
    _style_bar(bar, "weight of a value in an output")
    ticks = [*(-x for x in reversed(_WEIGHT_TICKS)), 0, *_WEIGHT_TICKS]
    bar.set_ticks([x for x in ticks if lowest <= x <= largest])
    figure.supxlabel("token that is read (key)", fontsize=10, color=plotting.INK)
    figure.supylabel("token that reads (query)", fontsize=10, color=plotting.INK)
    _title(figure, f"Attention maps · {subtitle}")
    plotting.save(figure, path)


def draw_half_lives(
    path: pathlib.Path, layers: Sequence[attention_maps.LayerMaps], labels: Sequence[str], *, subtitle: str
) -> None:
    """Draws half-lives of layers with decays, one row per head.

    Per-channel decays are shown as the median over channels.
    """
    values = [layer.half_life for layer in layers if layer.half_life is not None]
    by_channel = any(x.ndim == 3 for x in values)
    strips = [np.median(x, axis=-1) if x.ndim == 3 else x for x in values]
    low, high = (float(x) for x in np.clip([np.min(strips), np.max(strips)], *_HALF_LIVES))
    norm = matplotlib.colors.LogNorm(low, max(high, 1.01 * low))
    figure, bar = _draw_strips(layers, strips, labels, norm, "viridis")
    bar.formatter = matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:,g}")
    bar.update_ticks()
    _style_bar(bar, "half-life (tokens)")
    whose = "the median value channel of a head" if by_channel else "a head"
    _title(
        figure,
        f"Half-lives · {subtitle}",
        f"tokens until the decay halves what {whose} remembers, if each decayed as this one does",
    )
    plotting.save(figure, path)


def draw_rotations(
    path: pathlib.Path, layers: Sequence[attention_maps.LayerMaps], labels: Sequence[str], *, subtitle: str
) -> None:
    """Draws the rotation of the fastest pair of layers with learned rates, one row per head.

    If each pair has its own rate, draws their mean, as if each were the rate of the fastest pair.
    """
    found = [(x.rate, x.theta) for x in layers if x.rate is not None and x.theta is not None]
    by_pair = any(rate.ndim == 3 for rate, _ in found)
    strips = [theta[0] * (rate.mean(axis=-1) if rate.ndim == 3 else rate) for rate, theta in found]
    theta = found[0][1]
    span = max(float(np.abs(np.array(strips) - theta[0]).max()), 0.01)
    norm = matplotlib.colors.CenteredNorm(theta[0], span)
    figure, bar = _draw_strips(layers, strips, labels, norm, "PuOr_r")
    _style_bar(bar, "rotation (radians per token)")
    whose = "mean of all pairs of dimensions, each as if it were" if by_pair else "of"
    _title(
        figure,
        f"Rotation rates · {subtitle}",
        f"{whose} the fastest pair, which rotates by {theta[0]:.2f} at rate 1 in the first of these layers; the "
        f"slowest rotates {theta[-1] / theta[0]:.2g} times as far",
    )
    plotting.save(figure, path)


def _draw_strips(
    layers: Sequence[attention_maps.LayerMaps],
    strips: Sequence[Float[np.ndarray, "K T"]],
    labels: Sequence[str],
    norm: matplotlib.colors.Normalize,
    colors: str,
) -> tuple[matplotlib.figure.Figure, Any]:
    """Draws a panel per layer, with rows of heads and columns of tokens; returns figure and color bar."""
    heads, time = strips[0].shape
    width = float(np.clip(time * _WIDE_NAME, *_STRIPS))
    height = len(layers) * (max(heads * _STRIP_ROW, 0.7) + 0.25) + 1.6
    figure, axes = plotting.make(rows=len(layers), width=width + 2, height=height, sharex=True)
    extent = (0.5, time + 0.5, heads - 0.5, -0.5)
    for panel, layer, strip in zip(axes, layers, strips):
        image = panel.imshow(
            strip, cmap=colors, norm=norm, extent=extent, aspect="auto", interpolation="none"
        )
        panel.set_title(f"layer {layer.layer}", fontsize=9, color=plotting.INK, loc="left")
        panel.set_yticks(range(heads))
        panel.set_ylabel("head", fontsize=9, color=plotting.INK)
        _style(panel)
    if time * _NAME <= width:
        _name_tokens(axes[-1].xaxis, labels, width)
    axes[-1].set_xlabel("token", fontsize=10, color=plotting.INK)
    # The ends of the color scale that values exceed.
    low, high = cast(float, norm.vmin), cast(float, norm.vmax)
    below, above = np.min(strips) < low - 1e-6, np.max(strips) > high + 1e-6
    extend = ("both" if above else "min") if below else ("max" if above else "neither")
    return figure, figure.colorbar(image, ax=axes, aspect=20, pad=0.01, extend=extend)


def _name_tokens(axis: Any, labels: Sequence[str], length: float, *, turn: bool = True) -> None:
    """Labels every token along an axis that is `length` inches long."""
    axis.set_ticks(
        range(1, len(labels) + 1),
        labels,
        fontsize=8.5 if len(labels) * _WIDE_NAME <= length else 7,
        rotation=90 if turn and max(map(len, labels)) > 2 else 0,
        parse_math=False,  # two dollar signs must not become a formula
        color=plotting.INK,
    )
    axis.set_tick_params(length=0)


def _style(axes: matplotlib.axes.Axes) -> None:
    axes.spines[:].set_color(_EDGE)
    axes.tick_params(colors=plotting.INK, labelsize=8, length=2)


def _style_bar(bar: Any, label: str) -> None:
    bar.set_label(label, color=plotting.INK, fontsize=9)
    bar.ax.tick_params(colors=plotting.INK, labelsize=8)
    bar.outline.set_edgecolor(_EDGE)


def _title(figure: matplotlib.figure.Figure, *lines: str) -> None:
    characters = int(_CHARACTERS * figure.get_figwidth())
    wrapped = [part for line in lines for part in textwrap.wrap(line, characters)]
    figure.suptitle(
        "\n".join(wrapped), x=0.01, ha="left", fontsize=10.5, color=plotting.INK, gid=plotting.TITLE
    )
