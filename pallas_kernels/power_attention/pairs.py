"""Elementwise operations on blocks in registers: tiles of queries, keys or values, and pairs of 64 by 64."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import numerics, tensor_core
from pallas_kernels.power_attention import sequence

BLOCK = tensor_core.ROWS
LAYOUT = plgpu.Layout.WGMMA


def by_row(x):
    """Broadcasts a vector of rows along the columns."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, (BLOCK, BLOCK), [0]), LAYOUT)


def by_column(x):
    """Broadcasts a vector of columns along the rows."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(x, (BLOCK, BLOCK), [1]), LAYOUT)


def in_units(x, *factors):
    """Returns a block of sums [64, D] or [64] times all factors [64] of its rows."""
    for factor in factors:
        x = x * jax.lax.broadcast_in_dim(factor, x.shape, [0])
    return x


def length_factor(exponent, shorter):
    """Returns 2^shorter, at least the smallest normal number, or 0 for a key of zeros; `exponent` is of its length."""
    shorter = jnp.maximum(shorter, jnp.finfo(jnp.float32).minexp)
    return jnp.where(exponent > sequence.NOTHING, numerics.power_of_two(shorter), 0.0)


def scaled(x, exponent):
    """Returns a block [64, D] times 2^exponent of each row."""
    # In two steps, since 2^exponent itself might not be a normal number.
    return in_units(x, *numerics.factors(exponent))


def slopes(scores, power):
    """Returns scores^(power - 1), for an even power."""
    result, square, left = scores, scores * scores, power // 2 - 1
    while left:
        result = result * square if left % 2 else result
        square, left = square * square, left // 2
    return result


def diagonal_factor(rows, columns, position, length, *, sign):
    """Returns the decay of each pair within a block times its key's factor; zero for later keys and below FLOOR.

    rows, columns: the two parts of the sum of log decays at each. position: position of each column in the block. sign:
    1 if rows are queries, -1 if they are keys.
    """
    # The barriers force one part after the other, to save registers.
    decay = jax.lax.optimization_barrier(by_row(rows[0]) - by_column(columns[0]))
    decay = jax.lax.optimization_barrier(sign * (decay + (by_row(rows[1]) - by_column(columns[1]))))
    row = plgpu.broadcasted_iota(jnp.int32, decay.shape, 0, layout=LAYOUT).astype(jnp.float32)
    seen = (sign * (row - by_column(position)) >= 0) & (decay >= numerics.FLOOR)
    return jnp.where(seen, length * jnp.exp(decay), 0.0)
