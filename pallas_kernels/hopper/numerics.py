"""Exact scaling by powers of two and accurate running sums in plain JAX, used to prepare the kernels' arguments."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "exponent",
    "factors",
    "length_exponent",
    "over_earlier",
    "running_sums",
    "scaled",
    "suffix_sums",
]

# The product of two factors of at most 2^126 each.
_LARGEST_EXPONENT = 252
# Sums of squares within 2^-80 and 2^80 are exact enough as they are; others after a shift.
_SQUARE_BITS = 80
_SQUARE_SHIFT = 80


def exponent(x: jax.Array) -> jax.Array:
    """Returns int32 e with |x| in [2^(e-1), 2^e); 0 for 0."""
    return jnp.frexp(jnp.abs(x.astype(jnp.float32)))[1]


def length_exponent(x: jax.Array) -> jax.Array:
    """Returns int32 e with the length of float32 x [..., D] in [2^(e-1), 2^e), to rounding; 0 for 0.

    Squares are summed at three scales at once, of which one neither overflows nor underflows: finding the largest entry
    first would read x twice.
    """

    def squares(shift):
        scaled = x * 2.0**shift
        return (scaled * scaled).sum(-1)

    plain = squares(0)
    fits = (plain > 2.0**-_SQUARE_BITS) & (plain < 2.0**_SQUARE_BITS)
    large = plain >= 2.0**_SQUARE_BITS
    total = jnp.where(fits, plain, jnp.where(large, squares(-_SQUARE_SHIFT), squares(_SQUARE_SHIFT)))
    shift = jnp.where(fits | (total == 0), 0, jnp.where(large, _SQUARE_SHIFT, -_SQUARE_SHIFT))
    return exponent(jnp.sqrt(total)) + shift


def scaled(x: jax.Array, exponent: jax.Array | int) -> jax.Array:
    """Returns x 2^exponent in x's dtype, exact unless the result is not a normal number.

    Exponents beyond 252 count as 252.
    """
    first, second = factors(exponent)
    return (x.astype(jnp.float32) * first * second).astype(x.dtype)


def factors(exponent: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Returns two float32 with the product 2^exponent, which itself might not be a normal number.

    Exponents beyond 252 count as 252.
    """
    exponent = jnp.clip(jnp.asarray(exponent, jnp.int32), -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    half = exponent // 2
    return _power_of_two(half), _power_of_two(exponent - half)


def running_sums(x: jax.Array, largest: float) -> tuple[jax.Array, jax.Array]:
    """Returns sums of float32 x [..., C], |x| <= largest, up to and including each position, in two parts.

    Every term of the first part is a multiple of a power of two so large that no sum of them is rounded, in any order.
    The second part is small. A difference of two sums, taken part by part, errs no more than sums of the small terms
    would.
    """
    bits = math.ceil(math.log2(x.shape[-1] * largest))
    grid = 2.0 ** (bits - np.finfo(np.float32).nmant - 1)
    coarse = jnp.round(x / grid) * grid
    return over_earlier(coarse, jnp.sum, 0), over_earlier(x - coarse, jnp.sum, 0)


def over_earlier(
    x: jax.Array, reduce: Callable[..., jax.Array], fill: float, *, reverse: bool = False
) -> jax.Array:
    """Reduces x [..., C] over positions up to and including each one or, reversed, from each one on; `fill` is neutral.

    The C^2 terms take one launch on a GPU. A scan has fewer, and takes several launches, for a few positions longer.
    """
    position = jnp.arange(x.shape[-1])
    seen = position[:, None] <= position if reverse else position[:, None] >= position
    return reduce(jnp.where(seen, x[..., None, :], fill), axis=-1)


def suffix_sums(x: jax.Array) -> jax.Array:
    """Returns, for each entry of the last axis, the sum over itself and all later entries."""
    return jnp.flip(jnp.cumsum(jnp.flip(x, -1), -1), -1)


def _power_of_two(exponent):
    """Returns 2^exponent as a float32, exactly, for the exponents of normal numbers."""
    return jax.lax.bitcast_convert_type((jnp.clip(exponent, -126, 127) + 127) << 23, jnp.float32)
