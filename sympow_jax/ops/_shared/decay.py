"""Decays that neither overflow nor lose small steps behind large ones.

A document boundary is a decay to nothing: from here on, segments and gates are the same thing.
"""

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float

__all__ = ["bounded", "exp", "prefix_sums", "split", "suffix_sums"]


def _floor(dtype) -> int:
    """Below this, exp is no longer a normal number and counts as zero: -87 in float32, -708 in float64."""
    return int(np.log(np.finfo(dtype).tiny))


def bounded(log_decay: Float[Array, "*rest"], start) -> Float[Array, "*rest"]:
    """log_decay, cut off where it already forgets everything, and forgetting everything where `start` holds.

    Sums of bounded decays stay finite, which is what `split` needs.
    """
    forget = _floor(log_decay.dtype) - 1
    return jnp.where(start, forget, jnp.maximum(log_decay, forget))


def exp(log_decay: Float[Array, "*rest"]) -> Float[Array, "*rest"]:
    """exp of a sum of decays, exactly zero where it would be subnormal."""
    floor = _floor(log_decay.dtype)
    return jnp.where(log_decay < floor, 0, jnp.exp(jnp.maximum(log_decay, floor)))


def prefix_sums(log_decay: Float[Array, "*rest X"]) -> Float[Array, "*rest X"]:
    """Sums up to and including each position, along the last axis."""
    length = log_decay.shape[-1]
    return _matmul(log_decay, np.triu(np.ones((length, length))))


def suffix_sums(log_decay: Float[Array, "*rest X"]) -> Float[Array, "*rest X"]:
    """Sums over the positions behind each position, itself left out, along the last axis."""
    length = log_decay.shape[-1]
    return _matmul(log_decay, np.tril(np.ones((length, length)), -1))


def split(log_decay: Float[Array, "*rest X"]) -> tuple[Float[Array, "*rest X"], Float[Array, "*rest X"]]:
    """Prefix sums as a coarse part that is exact and a fine part that is small.

    The coarse part of each decay is a multiple of a power of two so large that no sum of them is rounded, in any
    order. A difference of two prefix sums, coarse and fine parts apart, is then right to rounding of the
    difference itself, even if a decay of -1e4 lies before both. Decays must be `bounded`.
    """
    dtype = log_decay.dtype
    largest = log_decay.shape[-1] * (1 - _floor(dtype))
    grid = 2.0 ** (int(np.ceil(np.log2(largest))) - np.finfo(dtype).nmant - 1)
    coarse = jnp.round(log_decay / grid) * grid
    return prefix_sums(coarse), prefix_sums(log_decay - coarse)


def _matmul(x, triangle):
    return jnp.matmul(x, jnp.asarray(triangle, x.dtype), precision=jax.lax.Precision.HIGHEST)
