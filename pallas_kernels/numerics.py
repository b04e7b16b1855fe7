"""Powers of two and running sums that lose nothing, in plain JAX: what every kernel's arguments are made with."""

import math

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["exponent", "running_sums", "scaled", "sums_behind"]

# Two factors of at most 2^126 each.
_LARGEST_EXPONENT = 252


def exponent(x: jax.Array) -> jax.Array:
    """int32 e with |x| in [2^(e-1), 2^e); 0 for 0."""
    return jnp.frexp(jnp.abs(x.astype(jnp.float32)))[1]


def scaled(x: jax.Array, exponent: jax.Array | int) -> jax.Array:
    """x 2^exponent in x's dtype, exact but where it leaves the normal numbers; exponents beyond 252 count as 252."""
    exponent = jnp.clip(jnp.asarray(exponent, jnp.int32), -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    half = exponent // 2
    # One factor alone may not be a normal number.
    product = x.astype(jnp.float32) * _power_of_two(half) * _power_of_two(exponent - half)
    return product.astype(x.dtype)


def running_sums(x: jax.Array, largest: float) -> tuple[jax.Array, jax.Array]:
    """Sums of float32 x [..., C], |x| <= largest, up to and including each position, in two parts.

    Every term of the first part is a multiple of a power of two so large that no sum of them is rounded, in any order;
    the second part is small. A difference of two sums, part by part, errs no more than sums of the small terms would.
    """
    bits = math.ceil(math.log2(x.shape[-1] * largest))
    grid = 2.0 ** (bits - np.finfo(np.float32).nmant - 1)
    coarse = jnp.round(x / grid) * grid
    return jnp.cumsum(coarse, -1), jnp.cumsum(x - coarse, -1)


def sums_behind(x: jax.Array) -> jax.Array:
    """Sums along the last axis, of each entry and those behind it."""
    return jnp.flip(jnp.cumsum(jnp.flip(x, -1), -1), -1)


def _power_of_two(exponent):
    """2^exponent as a float32, exactly, for the exponents of normal numbers."""
    return jax.lax.bitcast_convert_type((jnp.clip(exponent, -126, 127) + 127) << 23, jnp.float32)
