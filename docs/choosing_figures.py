"""Figures of choosing.md: what the ops compute to choose a form, and what was measured on a GPU."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.axes
import matplotlib.figure
import matplotlib.lines
import matplotlib.ticker
import numpy as np

from sympow_jax import config, models, ops, plotting
from sympow_jax.ops import cost

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
LENGTHS = [2**n for n in range(8, 21)]
BLUE, RED, GREEN, PINK, YELLOW, *_ = plotting.COLORS
(SOFTMAX,) = (color for color, _ in plotting.styles(["softmax"]))


def flops() -> matplotlib.figure.Figure:
    """Plots FLOPs per token and head of the forward pass against the context."""
    figure, panels = plotting.make(2, width=9.6, height=4.2)
    named = []
    for axes, power, sizes in zip(panels, (2, 4), ((32, 64, 128), (16, 32, 64))):
        ends = []
        for size, color in zip(sizes, (BLUE, RED, GREEN)):
            shape: dict[str, Any] = {
                "head_dim": size,
                "value_dim": size,
                "power": power,
                "chunk": 128,
                "exact_window": 64,
            }
            pairs = [cost.flops_per_token("attention", time=time, **shape) for time in LENGTHS]
            features = cost.flops_per_token("chunked", time=1, **shape)
            axes.plot(LENGTHS, pairs, color=color, linestyle=":", linewidth=1.4)
            axes.plot(LENGTHS, [features] * len(LENGTHS), color=color)
            crossing = features / (2 * size)
            if crossing < LENGTHS[-1]:
                axes.plot([crossing], [features], "o", color=color, markersize=6, markeredgecolor="white")
            ends.append((f"D = {size}", color, features))
        _style_costs(axes, "FLOPs per token and head" if power == 2 else "", f"p = {power}")
        named.append((axes, ends))
    for axes, ends in named:
        _name_ends(axes, ends)
    lines = [matplotlib.lines.Line2D([], [], color=plotting.GRAY, linestyle=style) for style in (":", "-")]
    panels[0].legend(lines, ["attention form", "chunked form"], frameon=False, fontsize=9, loc="upper left")
    return figure


def measured_times() -> matplotlib.figure.Figure:
    """Plots device time against the context, for the kernels of both forms and flash attention."""
    rows = json.loads((RESULTS / "h100" / "kernels.json").read_text())["rows"]
    shape = {"batch": 1, "heads": 8, "head_dim": 64, "power": 2, "chunk": None}
    figure, panels = plotting.make(2, width=9.6, height=4.2)
    for axes, mode, title in zip(panels, ("forward", "training"), ("forward", "forward and backward")):
        for contender, label, color in (
            ("attention/mosaic_gpu", "attention form", BLUE),
            ("chunked/mosaic_gpu", "chunked form", RED),
            ("softmax/cudnn", "softmax (cuDNN)", SOFTMAX),
        ):
            wanted = shape | {"contender": contender, "mode": mode}
            points = sorted(
                (row["time"], 1e3 * row["kernel_seconds"]) for row in rows if row.items() >= wanted.items()
            )
            axes.plot(*zip(*points), color=color, marker="o", markersize=4, linewidth=1.6, label=label)
        _style_costs(axes, "ms on an H100, 8 heads of 64, p = 2" if mode == "forward" else "", title)
    panels[0].legend(frameon=False, fontsize=9, loc="upper left")
    return figure


def _style_costs(axes: matplotlib.axes.Axes, y_label: str, title: str) -> None:
    axes.set_yscale("log")
    plotting.style(axes, x_label="context T (tokens)", y_label=y_label)
    axes.set_title(title, fontsize=10, color=plotting.INK)
    axes.set_xscale("log", base=2)
    ticks = LENGTHS[::3]
    axes.set_xticks(
        ticks, [str(time) if time < 1024 else f"{time // 1024}k" if time < 2**20 else "1M" for time in ticks]
    )
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def _name_ends(axes: matplotlib.axes.Axes, ends: Sequence[tuple[str, str, float]]) -> None:
    low, high = np.log(axes.get_ylim())  # the limits of all panels, because all are drawn by now
    lowest = -1.0
    for label, color, end in sorted(ends, key=lambda named: named[2]):
        # Labels are moved apart where they would overlap.
        height = lowest = max((np.log(end) - low) / (high - low), lowest + 0.06)
        axes.annotate(
            label,
            (1.0, height),
            (3, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=color,
            weight="bold",
        )


def state_sizes() -> matplotlib.figure.Figure:
    """Plots the memory that decoding takes against the document's length, for the 124M model and several head sizes."""
    figure, (axes,) = plotting.make(width=8.4, height=4.6)
    shape: Any = config.MODEL_SIZES["gpt2_124m"]
    kept = [shape["layers"] * 2 * shape["width"] * 2 * time for time in LENGTHS]
    axes.plot(LENGTHS, kept, color=SOFTMAX)
    ends = [("keys and values,\nbfloat16", SOFTMAX, kept[-1])]
    for power, size, color in ((2, 32, BLUE), (2, 64, RED), (2, 128, GREEN), (4, 16, PINK), (4, 32, YELLOW)):
        attention = config.preset("sympow", power=power)
        model = config.ModelConfig(**{**shape, "heads": shape["width"] // size, "attention": attention})
        state = models.state_bytes(model, bytes_per_element=4)
        axes.plot(LENGTHS, [state] * len(LENGTHS), color=color)
        ends.append((f"p = {power}, D = {size}", color, state))
    _style_costs(axes, "bytes a document", "")
    axes.set_yticks([2**n for n in (20, 25, 30, 35)], ["1 MiB", "32 MiB", "1 GiB", "32 GiB"])
    axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    _name_ends(axes, ends)
    return figure


def chunks() -> matplotlib.figure.Figure:
    """Plots, against the chunk length, the cost of exact pairs and the states kept for the backward pass."""
    figure, (left, right) = plotting.make(2, width=9.6, height=3.8, sharey=False)
    lengths = [64, 128, 256, 512, 1024, 2048, 4096]
    for power, size, color in ((2, 32, BLUE), (2, 64, RED), (2, 128, GREEN), (4, 16, PINK), (4, 32, YELLOW)):
        shape: dict[str, Any] = {"head_dim": size, "value_dim": size, "power": power, "exact_window": 64}
        flops = [cost.flops_per_token("chunked", time=1, chunk=chunk, **shape) for chunk in lengths]
        left.plot(lengths, np.array(flops) / flops[0], color=color, label=f"p = {power}, D = {size}")
        kept = [2 * ops.symmetric_power_dim(size, power) * size / chunk for chunk in lengths]
        right.plot(lengths, kept, color=color)
    kv_cache = 2 * 2 * 64
    right.axhline(
        kv_cache, color="#888888", linestyle=(0, (4, 3)), linewidth=1.1, label="keys and values, D = 64"
    )
    right.legend(frameon=False, fontsize=8.5)
    left.legend(frameon=False, fontsize=8.5)
    right.set_yscale("log")
    plotting.style(left, x_label="chunk C (tokens)", y_label="FLOPs, relative to C = 64")
    plotting.style(right, x_label="chunk C (tokens)", y_label="bytes of states a token and head")
    for axes in (left, right):
        plotting.set_log2_ticks(axes, lengths)
        axes.tick_params(axis="x", labelsize=8)
    return figure


FIGURES = {
    "flops": flops,
    "measured_times": measured_times,
    "state_sizes": state_sizes,
    "chunks": chunks,
}
