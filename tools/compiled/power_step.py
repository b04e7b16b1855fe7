"""The kernels of the step compiled for an H100, and the times predicted from their bytes."""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.power_step import configs, folding, reading
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
    power, width, batch, heads, group = h100.parsed(case).values()
    features = math.comb(width + power - 1, power)
    floats = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    state = floats((batch, heads, features, width)), floats((batch, heads, features))
    if case.startswith("read"):
        sizes = {"heads": batch * heads, "group": group, "features": features, "head_dim": width}
        config = configs.choose(
            **sizes, value_dim=width, exact_window=_WINDOW, power=power, dtype=jnp.float32
        )
        window = floats((batch, 2 * _WINDOW, heads, width))
        arrays = floats((batch, heads, group, features)), *state, floats((batch, heads, group, width))
        decay = floats((batch, heads, 2 * _WINDOW))

        def read(*arrays):
            return reading.read(reading.Operands(*arrays), power=power, config=config)

        return read, (*arrays, window, window, decay)

    def fold(kv, norm, *tokens):
        state = jax.new_ref(kv), jax.new_ref(norm)
        folding.fold(*state, folding.Window(*tokens))
        return tuple(map(jax.freeze, state))

    rows = (jax.ShapeDtypeStruct((count,), jnp.int32) for count in (_FOLDED, 1))
    tokens = (_FOLDED, heads, _WINDOW, features), (_FOLDED, _WINDOW, heads, width), (_FOLDED, heads)
    return fold, (*state, *rows, *map(floats, tokens))


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str]:
    """Returns no main loop, since none multiplies matrices, and the time for the bytes, with their number.

    The fold reads and writes the tiles of the updated rows.
    """
    power, width, batch, heads, group = h100.parsed(case).values()
    features = math.comb(width + power - 1, power)
    state = features * (width + 1)
    moved = 4 * batch * heads * (state + group * features + 2 * _WINDOW * 2 * width)
    if case.startswith("fold"):
        moved = 4 * _FOLDED * heads * (2 * state + _WINDOW * (features + width))
    return [], f"{1e6 * moved / BANDWIDTH:.1f} us ({moved / 1e6:.1f} MB)"
