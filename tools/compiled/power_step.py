"""Cases of the step kernels for `h100`, their compilation, and the times predicted from their bytes."""

import functools
import math
import re

import jax
import jax.numpy as jnp

from pallas_kernels.power_step import config as configs
from pallas_kernels.power_step import folding, reading
from tools import h100

# Kernel, power, head size (of keys and values), batch, key heads, query heads for each.
CASES = [
    *(f"read-p{p}-d{d}-b64-k8-g1" for p, d in ((2, 32), (2, 64), (2, 128), (4, 16), (4, 32))),
    "read-p2-d64-b1-k8-g1",
    "read-p2-d64-b64-k2-g4",
    "read-p2-d64-b1-k1-g16",
    *(f"fold-p{p}-d{d}-b64-k8-g1" for p, d in ((2, 32), (2, 64), (2, 128), (4, 16))),
]
RARE = [f"{kernel}-p2-d{d}-b4-k8-g{g}" for kernel in ("read", "fold") for d in (8, 40, 96) for g in (1, 4)]
_WINDOW = 64
# Number of rows of the batch per call of the fold.
_FOLDED = 4
# Fraction of the data sheet's 3.35 TB/s that copies reach.
BANDWIDTH = 0.9 * 3.35e12


def build(case: str):
    """Returns the kernel call of a case and the shapes of its arguments."""
    kernel, power, width, batch, kv_heads, group = _sizes(case)
    features, exact_window = math.comb(width + power - 1, power), _WINDOW
    if kernel == "read":
        config = configs.choose(
            heads=batch * kv_heads,
            group=group,
            features=features,
            head_dim=width,
            value_dim=width,
            exact_window=exact_window,
            power=power,
            dtype=jnp.float32,
        )
        read_shapes = (
            (batch, kv_heads, group, features),
            (batch, kv_heads, features, width),
            (batch, kv_heads, features),
            (batch, kv_heads, group, width),
            (batch, 2 * exact_window, kv_heads, width),
            (batch, 2 * exact_window, kv_heads, width),
            (batch, kv_heads, 2 * exact_window),
        )
        read = functools.partial(reading.read, power=power, config=config)
        return read, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in read_shapes]

    def call(kv, norm, *arrays):
        held = jax.new_ref(kv), jax.new_ref(norm)
        folding.fold(*held, *arrays)
        return tuple(map(jax.freeze, held))

    shapes = (
        ((batch, kv_heads, features, width), jnp.float32),
        ((batch, kv_heads, features), jnp.float32),
        ((_FOLDED,), jnp.int32),
        ((1,), jnp.int32),
        ((_FOLDED, kv_heads, exact_window, features), jnp.float32),
        ((_FOLDED, exact_window, kv_heads, width), jnp.float32),
        ((_FOLDED, kv_heads), jnp.float32),
    )
    return call, [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str]:
    """Returns no main loop, since none multiplies matrices, and the time for the bytes, with their number."""
    moved = _bytes(case)
    return [], f"{1e6 * moved / BANDWIDTH:.1f} us ({moved / 1e6:.1f} MB)"


def _bytes(case):
    """Returns the bytes that the kernel moves: for the fold, the tiles of the updated rows, read and written."""
    kernel, power, width, batch, kv_heads, group = _sizes(case)
    features = math.comb(width + power - 1, power)
    state = features * (width + 1)
    if kernel == "read":
        return 4 * batch * kv_heads * (state + group * features + 2 * _WINDOW * 2 * width)
    return 4 * _FOLDED * kv_heads * (2 * state + _WINDOW * (features + width))


def _sizes(case):
    kernel, *sizes = re.fullmatch(r"(\w+)-p(\d+)-d(\d+)-b(\d+)-k(\d+)-g(\d+)", case).groups()
    return kernel, *map(int, sizes)
