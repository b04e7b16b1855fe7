"""Results in the layout of an op's arguments, [B, T, N, D], written in blocks of 64 tokens of a head.

Rows of such a block are not contiguous, so TMA copies them with a tensor map, which drops tokens that do not exist.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import tensor_core

__all__ = ["block", "cut", "kind"]

# Tokens in a swizzled tile; arrays that TMA writes have whole tiles.
_TILE = 8


def kind(batch_time: tuple[int, int], heads: int, size: int, dtype) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's result of B N = `heads` heads, in whole tiles and at least a block long."""
    batch, time = batch_time
    length = max(-(-time // _TILE) * _TILE, tensor_core.ROWS)
    return jax.ShapeDtypeStruct((batch, length, heads // batch, size), dtype)


def cut(result, batch_time: tuple[int, int]):
    """Returns a result with the length that was asked for."""
    return result[:, : batch_time[1]]


def block(result, head, begin):
    """Returns the 64 tokens from `begin` on of head b N + n of a result, [64, D]."""
    heads = jnp.int32(result.shape[2])
    return result.at[lax.div(head, heads), pl.ds(begin, tensor_core.ROWS), lax.rem(head, heads)]
