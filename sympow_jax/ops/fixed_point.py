"""Exact running sums, which do not depend on the order of addition or on where a sequence is split.

A float32 sum loses terms that are small against it. These sums are 64-bit integers in units of 2^-32, stored as an
int32 for the whole part and a uint32 for the fraction, since JAX has no wider integers by default. Sums of float64 can
have a uint64 for the fraction, in units of 2^-64.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Float, Int, UInt
from sympow_jax.ops.promotion import by_default_rules


def bits(x: UInt[Array, "..."]) -> int:
    """Returns the number of bits of each integer."""
    return 8 * x.dtype.itemsize


def running_sum(
    x: Float[Array, "B T K"],
    before: tuple[Int[Array, "B K"], UInt[Array, "B K"]] | None = None,
    *,
    dtype: Any = jnp.uint32,
) -> tuple[Int[Array, "B T K"], UInt[Array, "B T K"]]:
    """Returns the sums of x over time, each x >= 0 rounded to a multiple of 2^-32, or of 2^-64 if `dtype` is uint64.

    `before` is added to the first element.
    """
    floor = jnp.floor(x)
    whole = floor.astype(jnp.int32)
    fraction = jnp.round((x - floor) * 2.0 ** (8 * jnp.dtype(dtype).itemsize)).astype(dtype)
    if before is not None:
        first = before[1] + fraction[:, 0]
        whole = whole.at[:, 0].add(before[0] + (first < before[1]))
        fraction = fraction.at[:, 0].set(first)
    total = jnp.cumsum(fraction, axis=1, dtype=dtype)
    # Unsigned sums wrap around; a sum smaller than its last summand has carried.
    carried = (total < fraction).astype(jnp.int32)
    return jnp.cumsum(whole + carried, axis=1, dtype=jnp.int32), total


def add(a, b) -> tuple[Int[Array, "*shape"], UInt[Array, "*shape"]]:
    """Returns the sum of two numbers, each a whole part and a fraction."""
    (whole_a, fraction_a), (whole_b, fraction_b) = a, b
    fraction = fraction_a + fraction_b
    return whole_a + whole_b + (fraction < fraction_b), fraction


def subtract(a, b) -> tuple[Int[Array, "*shape"], UInt[Array, "*shape"]]:
    """Returns the difference of two numbers, each a whole part and a fraction."""
    (whole_a, fraction_a), (whole_b, fraction_b) = a, b
    return whole_a - whole_b - (fraction_a < fraction_b), fraction_a - fraction_b


def multiply_high(a: UInt[Array, "..."], b) -> UInt[Array, "..."]:
    """Returns the upper half of the bits of the product a b, from products of halves of a and b."""
    half = bits(a) // 2
    low = (1 << half) - 1
    a_high, a_low, b_high, b_low = a >> half, a & low, b >> half, b & low
    middle = a_high * b_low + (a_low * b_low >> half)
    return a_high * b_high + (middle >> half) + (a_low * b_high + (middle & low) >> half)


def multiply(fraction: Sequence[UInt[Array, "..."]], factor: UInt[Array, "..."]) -> list[UInt[Array, "..."]]:
    """Returns a fraction in words, the highest first, times whole numbers, modulo one."""
    product, carry = [], jnp.uint32(0)
    for word in reversed(fraction):
        low = word * factor
        total = low + carry
        carry = multiply_high(factor, word) + (total < low)
        product.append(total)
    return product[::-1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def with_derivative(change: Callable[..., Array], value: Array, x: Array, *constants: Array) -> Array:
    """Returns `value`, made of integers, with the derivative of the function of x that it rounds.

    Args:
        change: maps a change of x, and `value`, x and the constants, to the change of the function.
        value: float array; nothing differentiates it.
        x: the argument of the function.
        constants: other arrays that `change` uses.
    """
    del change, x, constants
    return value


@with_derivative.defjvp
@by_default_rules
def _with_derivative_jvp(change, primals, tangents):
    # Not `primals[0]`, which is constant in x, so that second derivatives are right too.
    return with_derivative(change, *primals), change(tangents[1], *primals)
