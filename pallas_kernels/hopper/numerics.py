"""Exact scaling by powers of two and accurate running sums, around kernels and inside them."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

# Log decays below this count as a decay of zero, since exp would not be a normal float32.
FLOOR = int(np.log(np.finfo(np.float32).tiny))
# What `normal_exponent` returns for infinity and NaN.
INFINITE = 129
# The product of two factors of at most 2^126 each.
_LARGEST_EXPONENT = 252


def exponent(x: jax.Array) -> jax.Array:
    """Returns int32 e with |x| in [2^(e-1), 2^e); 0 for 0."""
    return jnp.frexp(jnp.abs(x.astype(jnp.float32)))[1]


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
    exponent = jnp.minimum(
        jnp.maximum(jnp.asarray(exponent, jnp.int32), -_LARGEST_EXPONENT), _LARGEST_EXPONENT
    )
    half = exponent >> 1
    return power_of_two(half), power_of_two(exponent - half)


def decay(log_decay: jax.Array) -> jax.Array:
    """Returns exp of a sum of log decays, zero below FLOOR."""
    return jnp.where(log_decay < FLOOR, 0, jnp.exp(jnp.maximum(log_decay, FLOOR)))


def running_sums(x: jax.Array, largest: float) -> tuple[jax.Array, jax.Array]:
    """Returns sums of float32 x [..., C], |x| <= largest, up to and including each position, in two parts.

    Every term of the first part is a multiple of a power of two so large that no sum of them is rounded, in any order.
    The second part is small. A difference of two sums, taken part by part, errs no more than sums of the small terms
    would.
    """
    grid = _grid(x.shape[-1], largest)
    coarse = jnp.round(x / grid) * grid
    # One cumulative sum of both takes half the launches of two.
    sums = jnp.cumsum(jnp.stack([coarse, x - coarse]), -1)
    return sums[0], sums[1]


def coarse(x: jax.Array, count: int, largest: float) -> jax.Array:
    """Returns the terms of the first part of `running_sums` of `count` terms, rounded toward zero, in a kernel."""
    grid = _grid(count, largest)
    return (x * (1 / grid)).astype(jnp.int32).astype(jnp.float32) * grid


def over_earlier(
    x: jax.Array, reduce: Callable[..., jax.Array], fill: float, *, reverse: bool = False
) -> jax.Array:
    """Reduces x [..., C] over positions up to and including each one or, reversed, from each one on; `fill` is neutral.

    The C^2 terms take one launch on a GPU, where a scan takes several. For few positions or heads only: with 832
    positions of 688 chunks, the launch took 0.3 ms.
    """
    position = jnp.arange(x.shape[-1])
    seen = position[:, None] <= position if reverse else position[:, None] >= position
    return reduce(jnp.where(seen, x[..., None, :], fill), axis=-1)


def suffix_sums(x: jax.Array) -> jax.Array:
    """Returns, for each entry of the last axis, the sum over itself and all later entries."""
    return jnp.flip(jnp.cumsum(jnp.flip(x, -1), -1), -1)


def normal_exponent(x: jax.Array) -> jax.Array:
    """Returns int32 e with positive, normal float32 x in [2^(e-1), 2^e), or INFINITE for infinity and NaN."""
    return (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23) - 126


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent as a float32, exactly; exponents beyond those of normal numbers count as the nearest."""
    exponent = jnp.minimum(jnp.maximum(exponent, -126), 127)
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _grid(count, largest):
    """Returns the power of two of which the terms of the first part of `running_sums` are multiples."""
    return 2.0 ** (math.ceil(math.log2(count * largest)) - np.finfo(np.float32).nmant - 1)
