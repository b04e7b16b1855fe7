"""The kernels of the step compiled for an H100."""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import power_step
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


def build(case: str):
    """Returns the kernel call of a case and the shapes of its arguments."""
    power, width, batch, heads, group = h100.parsed(case).values()
    features = math.comb(width + power - 1, power)
    floats = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    state = floats((batch, heads, features, width)), floats((batch, heads, features))

    def read(*arrays):
        return power_step.read(power_step.Operands(*arrays), power=power)

    def fold(kv, norm, *tokens):
        return power_step.fold(kv, norm, power_step.Window(*tokens))

    if case.startswith("read"):
        vector, cache = floats((batch, heads, width)), floats((batch, 2 * _WINDOW, heads, width))
        slot = jax.ShapeDtypeStruct((batch,), jnp.int32)
        window = cache, cache, floats((batch, 2 * _WINDOW, heads))
        of_queries = [floats((batch, heads, group, features))] * (power != 2)
        token = vector, vector, floats((batch, heads)), slot
        arrays = floats((batch, heads, group, width)), *state, *token, *window, *of_queries
        return read, arrays

    rows = (jax.ShapeDtypeStruct((count,), jnp.int32) for count in (_FOLDED, 1))
    keys = _FOLDED, heads, _WINDOW, width if power == 2 else features
    tokens = keys, (_FOLDED, _WINDOW, heads, width), (_FOLDED, heads)
    return fold, (*state, *rows, *map(floats, tokens))
