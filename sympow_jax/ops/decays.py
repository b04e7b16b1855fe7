"""Decays that neither overflow nor lose small steps after large ones.

A document boundary is a decay to zero: from here on, segments and gates are handled alike.

The decay b_ij from a key to a query is a product of decays of blocks, whose names are the same in every form and
kernel (docs/mathematics.md draws them):

    from_start  of the state before the block, as a query reads it
    to_end      of a key, as it enters the state after the block
    across      of the state, from one block to the next
    within      from a key to a query in the same block
"""

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float


def _floor(dtype) -> int:
    """Returns the log decay below which exp is not a normal number and counts as zero.

    It is -87 in float32 and -708 in float64.
    """
    return int(np.log(np.finfo(dtype).tiny))


def bounded(log_decay: Float[Array, "*rest"], start) -> Float[Array, "*rest"]:
    """Clips log_decay below, to a value whose decay is zero, and sets it to that value where `start` is True.

    Sums of bounded decays stay finite, which `split` requires.
    """
    forget = _floor(log_decay.dtype) - 1
    return jnp.where(start, forget, jnp.maximum(log_decay, forget))


def exp(log_decay: Float[Array, "*rest"]) -> Float[Array, "*rest"]:
    """Returns exp of a sum of log decays, exactly zero where it would be subnormal."""
    floor = _floor(log_decay.dtype)
    return jnp.where(log_decay < floor, 0, jnp.exp(jnp.maximum(log_decay, floor)))


def prefix_sums(log_decay: Float[Array, "*rest X"]) -> Float[Array, "*rest X"]:
    """Returns sums up to and including each position, along the last axis."""
    return jnp.matmul(log_decay, _tri(log_decay).T, precision=jax.lax.Precision.HIGHEST)


def sums_after(log_decay: Float[Array, "*rest X"]) -> Float[Array, "*rest X"]:
    """Returns sums over the positions after each position, excluding itself, along the last axis."""
    return jnp.matmul(log_decay, _tri(log_decay, -1), precision=jax.lax.Precision.HIGHEST)


def sums_from(log_decay: Float[Array, "*rest X"]) -> Float[Array, "*rest X"]:
    """Returns sums over each position and the positions after it, along the last axis."""
    return sums_after(log_decay) + log_decay


def split(log_decay: Float[Array, "*rest X"]) -> tuple[Float[Array, "*rest X"], Float[Array, "*rest X"]]:
    """Returns prefix sums as a coarse part that is exact and a fine part that is small.

    The coarse part of each decay is a multiple of a power of two so large that no sum of them is rounded, in any order.
    A difference of two prefix sums, with coarse and fine parts subtracted separately, is then right to rounding of the
    difference itself, even if a decay of -1e4 precedes both. Decays must be `bounded`.
    """
    dtype = log_decay.dtype
    largest = log_decay.shape[-1] * (1 - _floor(dtype))
    grid = 2.0 ** (int(np.ceil(np.log2(largest))) - np.finfo(dtype).nmant - 1)
    coarse = jnp.round(log_decay / grid) * grid
    return prefix_sums(coarse), prefix_sums(log_decay - coarse)


def within(later, earlier, visible) -> Float[Array, "*rest"]:
    """Returns the decay from each earlier position to each later one, zero where `visible` is False.

    Both have the two parts of prefix sums by `split`, with axes that broadcast. The difference is masked before `exp`,
    which would overflow for pairs in the other order and make second derivatives NaN.
    """
    (coarse, fine), (earlier_coarse, earlier_fine) = later, earlier
    difference = (coarse - earlier_coarse) + (fine - earlier_fine)
    return exp(jnp.where(visible, difference, -jnp.inf))


def _tri(log_decay, diagonal=0):
    """Returns ones on and below a diagonal.

    The program computes them, since a constant would be stored in it.
    """
    return jnp.tri(log_decay.shape[-1], k=diagonal, dtype=log_decay.dtype)
