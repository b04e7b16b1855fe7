"""Figures of mathematics.md, computed by the ops."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.colors
import matplotlib.figure
import matplotlib.lines
import matplotlib.patches
import numpy as np

from sympow_jax import ops, plotting

BLUE, RED, GREEN, PINK, *_ = plotting.COLORS
SOFTMAX, EXPRESSIVE = (color for color, _ in plotting.styles(["softmax", "expressive"]))


def kernels() -> matplotlib.figure.Figure:
    """Plots the weight of one key relative to another: by angle and, for expressive attention, by score."""
    figure, (left, right) = plotting.make(2, width=9.6, height=3.9, sharey=False)
    degrees = np.linspace(0, 180, 181)
    angle = np.deg2rad(degrees)
    turned = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    aligned = np.broadcast_to([1.0, 0.0], turned.shape)
    keys = np.stack([aligned, turned], axis=1)[:, :, None].astype(np.float32)
    values = np.broadcast_to(np.eye(2, dtype=np.float32)[None, :, None], (len(angle), 2, 1, 2))
    query = keys[:, :1]

    def relative(op, **options):
        """Returns the weight of the second key divided by that of the first."""
        both = op(query, keys, values, **options)[:, 0, 0]
        return both[:, 1] / both[:, 0]

    softmax = relative(ops.softmax_attention, scale=4.0)
    left.plot(degrees, softmax, color=SOFTMAX, label="softmax, scores up to 4")
    for power, color in ((2, BLUE), (4, RED), (6, GREEN)):
        weights = relative(ops.power_attention, power=power, form="attention")
        left.plot(degrees, weights, color=color, label=f"power, p = {power}")
    left.set_xticks(range(0, 181, 45))
    left.legend(frameon=False, fontsize=8.5)
    plotting.style(left, x_label="angle of query and key (degrees)", y_label="weight, relative to angle 0")

    scores = np.linspace(-4, 4, 161, dtype=np.float32)
    # The other key has such a large score that its weight is one.
    pair = jnp.stack([jnp.full_like(scores, 1e6), scores], axis=1)[:, :, None, None]
    one = jnp.ones((len(scores), 1, 1, 1))
    both = ops.expressive_attention(one, pair, jnp.asarray(values[:1]).repeat(len(scores), 0))[:, 0, 0]
    weights = both[:, 1] / both[:, 0]
    right.plot(scores, weights, color=EXPRESSIVE, label="expressive, $z^2 / (1 + z^2)$")
    near = np.abs(scores) <= 1.1
    right.plot(scores[near], scores[near] ** 2, color=BLUE, linestyle="--", label="power, $z^2$")
    right.set_ylim(0, 1.25)
    right.legend(frameon=False, fontsize=8.5, loc="lower right")
    plotting.style(right, x_label="score z = q · k", y_label="weight")
    return figure


def attention_maps() -> matplotlib.figure.Figure:
    """Plots the weights of all pairs for the same queries and keys under five kernels."""
    time, size = 48, 16
    steps = jax.random.normal(jax.random.key(3), (2, time, size))
    walk = jnp.cumsum(steps, axis=1) * 0.25 + 0.6 * steps
    query, key = (x[None, :, None] * 2.0 for x in walk / jnp.linalg.norm(walk, axis=-1, keepdims=True))
    key = 0.75 * query + 0.5 * key
    value = jnp.eye(time)[None, :, None]
    gates = jnp.full((1, time, 1), np.log(0.85), jnp.float32)
    power = functools.partial(ops.power_attention, form="attention")
    maps = {
        "softmax": ops.softmax_attention(query, key, value, scale=1.0),
        "power, p = 2": power(query, key, value, power=2),
        "power, p = 4": power(query, key, value, power=4),
        "p = 2, gate 0.85": power(query, key, value, power=2, log_decay=gates),
        "expressive": ops.expressive_attention(query, key, value),
    }
    figure, panels = plotting.make(len(maps), width=12.0, height=2.9)
    for axes, weights in zip(panels, maps.values()):
        norm = matplotlib.colors.PowerNorm(0.5, vmin=0, vmax=1)
        axes.imshow(np.where(np.tri(time), np.asarray(weights)[0, :, 0], np.nan), cmap="Blues", norm=norm)
    _name_pairs(panels, maps)
    return figure


def _name_pairs(panels, titles) -> None:
    """Sets titles and labels of pair maps, with queries down and keys across."""
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=10, color=plotting.INK)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color("#cccccc")
        axes.set_xlabel("key", color=plotting.INK, fontsize=9)
    panels[0].set_ylabel("query", color=plotting.INK, fontsize=9)


def features() -> matplotlib.figure.Figure:
    """Plots the number of features against the head size."""
    figure, (axes,) = plotting.make(width=7.6, height=4.0)
    sizes = [8, 16, 32, 64, 128]
    for power, color in ((2, BLUE), (4, RED), (6, GREEN)):
        symmetric = [ops.symmetric_power_dim(size, power) for size in sizes]
        axes.plot(sizes, symmetric, color=color, marker="o", markersize=4)
        axes.plot(sizes, [size**power for size in sizes], color=color, linestyle=":", linewidth=1.4)
        axes.annotate(
            f"p = {power}",
            (sizes[-1], symmetric[-1]),
            (6, 0),
            textcoords="offset points",
            color=color,
            va="center",
            weight="bold",
        )
    axes.set_yscale("log")
    plotting.style(axes, x_label="head size D", y_label="features F")
    plotting.set_log2_ticks(axes, sizes)
    lines = [matplotlib.lines.Line2D([], [], color=plotting.GRAY, linestyle=style) for style in ("-", ":")]
    axes.legend(lines, ["symmetric power", "tensor power"], frameon=False, fontsize=9)
    return figure


def forms() -> matplotlib.figure.Figure:
    """Plots, for each form, the pairs that are computed exactly and those that go through the state."""
    time, chunk, exact_window = 48, 16, 8
    query, key = np.arange(time)[:, None], np.arange(time)
    seen = key <= query
    first_exact = {
        "attention": np.zeros((time, 1)),
        f"chunked (C = {chunk}, W = {exact_window})": query // chunk * chunk - exact_window,
        f"step (W = {exact_window})": query + 1 - _window_sizes(time, exact_window)[:, None],
    }
    figure, panels = plotting.make(3, width=9.6, height=4.1)
    colors = matplotlib.colors.ListedColormap(["#ffffff", "#F6C9A8", BLUE])
    for axes, first in zip(panels, first_exact.values()):
        axes.imshow(np.where(seen, 1 + (key >= first), 0), cmap=colors, vmin=0, vmax=2)
    _name_pairs(panels, first_exact)
    patches = [matplotlib.patches.Patch(color=color) for color in (BLUE, "#F6C9A8")]
    figure.legend(
        patches,
        ["pair computed exactly", "through the state"],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    return figure


def _window_sizes(time: int, exact_window: int) -> np.ndarray:
    """Returns the number of last keys that each token sees exactly in the step form, its own included."""
    state = ops.PowerState.zeros(1, 1, 2, 2, power=2, exact_window=exact_window)
    step = jax.jit(ops.power_attention_step)
    token = jnp.ones((1, 1, 2))
    sizes = []
    for _ in range(time):
        sizes.append(int(state.length[0]) + 1)
        _, state = step(token, token, token, state)
    return np.array(sizes)


def window_error() -> matplotlib.figure.Figure:
    """Plots the float32 recurrence's error against the float64 formula, for several exact windows."""
    figure, (axes,) = plotting.make(width=7.6, height=3.9)
    windows = [0, 1, 2, 4, 8, 16, 32, 64]
    for power, color in ((2, BLUE), (4, RED), (6, GREEN)):
        errors = [_recurrence_error(power, exact_window) for exact_window in windows]
        axes.plot(range(len(windows)), errors, color=color, marker="o", markersize=4)
    axes.axhline(2e-6, color="#888888", linestyle=(0, (4, 3)), linewidth=1.1)
    axes.annotate(
        "bound of the tests", (7, 2e-6), (0, 4), textcoords="offset points", ha="right", fontsize=8.5
    )
    axes.set_yscale("log")
    axes.set_xticks(range(len(windows)), [str(exact_window) for exact_window in windows])
    plotting.style(axes, x_label="window W (0: everything through the state)", y_label="RMS error of outputs")
    axes.legend([f"p = {power}" for power in (2, 4, 6)], frameon=False, fontsize=9)
    return figure


def _recurrence_error(power: int, exact_window: int) -> float:
    random = np.random.default_rng(0)
    drawn = {name: random.normal(size=(1, 192, 1, 12)) for name in ("query", "key", "value")}
    drawn["log_decay"] = np.where(random.random((1, 192, 1)) < 0.05, -6.0, -0.05)
    single = {name: x.astype(np.float32) for name, x in drawn.items()}

    def attend(arrays: dict[str, np.ndarray], **options: Any) -> np.ndarray:
        placed: Any = {name: jnp.asarray(x) for name, x in arrays.items()}
        return np.asarray(ops.power_attention(**placed, power=power, **options))

    out = attend(single, form="recurrent", exact_window=exact_window)
    with jax.enable_x64(True):
        double = {name: x.astype(np.float64) for name, x in single.items()}
        exact = attend(double, form="attention", implementation="reference")
    return float(np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)))


def learned_rotation() -> matplotlib.figure.Figure:
    """Plots positions, and products of the last query with equal keys, under fixed and learned rotation rates."""
    time, size = 384, 32
    rate = np.ones((1, time, 1), np.float32)
    rate[:, 128:256], rate[:, 256:] = 0.0, 2.0
    # Only the slower half of the pairs is used: in the others, products look like noise as a function of distance.
    slow = jnp.where(jnp.arange(size) < size // 2, 0, (size // 2) ** -0.5)
    ones = jnp.broadcast_to(slow, (1, time, 1, size))
    figure, (left, right) = plotting.make(2, width=9.6, height=3.7, sharey=False)
    for name, beta, color in (("rope, β = 1", np.ones_like(rate), BLUE), ("learned", rate, RED)):
        angles, _ = ops.rotary.learned_angles(
            jnp.asarray(beta), size, theta=ops.rotary.rope_rates(size, max_document_length=1024)
        )
        turned = ops.rotary.rotate(ones, angles)[0, :, 0]
        left.plot(np.cumsum(beta[0, :, 0]), color=color, label=name)
        right.plot(np.asarray(turned @ turned[-1]), color=color)
    for axes in (left, right):
        axes.axvspan(128, 256, color="#000000", alpha=0.05, linewidth=0)
        for begin, end, speed in ((0, 128, 1), (128, 256, 0), (256, 384, 2)):
            axes.annotate(
                f"β = {speed}",
                ((begin + end) / 2, 1.0),
                (0, 4),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
                color=RED,
            )
        axes.set_xticks(range(0, 385, 128))
    left.legend(frameon=False, fontsize=9)
    plotting.style(left, x_label="token", y_label="position reached")
    plotting.style(right, x_label="token of the key", y_label="q · k, query at the last token")
    return figure


def positions() -> matplotlib.figure.Figure:
    """Plots the mean product of a vector with itself at a distance after LRPE has encoded both."""
    size, distance = 64, 256
    x = jax.random.normal(jax.random.key(0), (1, 1, 256, size))
    x /= jnp.linalg.norm(x, axis=-1, keepdims=True)

    def product(**options):
        if options["core"] != "permutation":
            kind = options.pop("kind", "a")
            options["rates"] = ops.lrpe.rates(options["core"], size, kind=kind, reference_length=distance)
        places = jnp.arange(distance)[None]
        turned = ops.lrpe.encode(
            jnp.broadcast_to(x, (1, distance, *x.shape[2:])), places, basis="identity", **options
        )[0]
        return np.asarray(jnp.einsum("tnd,nd->t", turned, turned[0])) / x.shape[2]

    figure, (left, right) = plotting.make(2, width=9.6, height=3.7)
    for kind, color in (("rope", BLUE), ("a", RED), ("b", GREEN), ("c", PINK)):
        left.plot(product(core="orthogonal", kind=kind), color=color, label=f"rates {kind}", linewidth=1.3)
    for core, color in (("unitary", BLUE), ("orthogonal", RED), ("mixed", GREEN), ("permutation", PINK)):
        right.plot(product(core=core), color=color, label=core, linewidth=1.3)
    for axes, title in ((left, "core orthogonal"), (right, "rates a")):
        axes.legend(frameon=False, fontsize=8.5, loc="upper right", ncols=2)
        axes.set_ylim(-0.1, 1.3)
        plotting.style(
            axes, x_label="distance t − s", y_label="" if axes is right else "x · W x, mean over x"
        )
        axes.set_title(title, fontsize=10, color=plotting.INK)
    return figure


FIGURES = {
    "kernels": kernels,
    "attention_maps": attention_maps,
    "features": features,
    "forms": forms,
    "window_error": window_error,
    "learned_rotation": learned_rotation,
    "positions": positions,
}
