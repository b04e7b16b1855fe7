"""Arguments and results of an op, [B, T, N, D], read and written in blocks of 64 tokens of a head.

Rows of such a block are not contiguous, so TMA copies them with a tensor map. It reads zeros in place of tokens that do
not exist, and drops what is written to them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import tensor_core

# Tokens in a swizzled tile; arrays that TMA copies have whole tiles.
_TILE = 8


def kind(batch_time: tuple[int, int], heads: int, size: int, dtype) -> jax.ShapeDtypeStruct:
    """Returns the type of a kernel's result of B N = `heads` heads, in whole tiles and at least a block long."""
    batch, time = batch_time
    length = max(-(-time // _TILE) * _TILE, tensor_core.ROWS)
    return jax.ShapeDtypeStruct((batch, length, heads // batch, size), dtype)


def whole(argument, least=0):
    """Returns an argument of at least `least` tokens, padded with zeros to whole blocks.

    With time last, a block is a tile.
    """
    time = argument.shape[1]
    length = -(-max(time, least) // tensor_core.ROWS) * tensor_core.ROWS
    return jnp.pad(argument, [(0, 0), (0, length - time), (0, 0), (0, 0)])


def block(array, head, begin):
    """Returns the 64 tokens from `begin` on of head b N + n of an argument or a result, [64, D].

    A negative `begin` must be at most -64: the block is then one of tokens after the last, which do not exist either.
    """
    heads = jnp.int32(array.shape[2])
    begin = jnp.where(begin < 0, array.shape[1], begin)
    return array.at[lax.div(head, heads), pl.ds(begin, tensor_core.ROWS), lax.rem(head, heads)]
