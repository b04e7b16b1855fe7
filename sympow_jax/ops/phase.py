"""Angles position * rate modulo one turn, right to rounding at every position.

A float32 product of a position and a rate is off by 0.06 radians after 2^20 tokens. Here a rate is a fraction of a turn
in words, 64 bits for float32 angles and more for float64, and the product is one of integers, which wrap around after a
turn, as angles do. The remainder, in [-1/2, 1/2] turns, becomes a float and is then converted to radians. At
positions up to 2^31 the error is at most 3e-7 radians in float32 and 1e-15 in float64.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float, Int, UInt, UInt32
from sympow_jax.ops import arguments, fixed_point, layout
from sympow_jax.ops.promotion import by_default_rules

# 2^256 / (2 pi): radians in turns.
_TURNS_PER_RADIAN = 0x28BE60DB9391054A7F09D5F47D4D377036D8A5664F10E4107F9458EAF7AEF158
# The turns of a unit in words of 32 bits, from the bit worth 2^159 to that worth 2^-256.
_UNITS = {
    unit: np.array([turns >> shift & 0xFFFFFFFF for shift in range(384, -1, -32)], np.uint32)
    for unit, turns in (("radians", _TURNS_PER_RADIAN), ("turns", 1 << 256))
}


def fixed(
    positions: Int[Array, "*batch"], rates: Float[np.ndarray, "*rates"], dtype=jnp.float32
) -> Float[Array, "..."]:
    """Returns positions * rates in radians [*batch, *rates], reduced to [-pi, pi], for constant rates.

    Rates are in radians per position. Positions are >= 0. A rate counts as the exact value of its float64.
    """
    return _fixed(arguments.Constant.of(np.asarray(rates)), np.dtype(dtype), positions)


@functools.partial(jax.jit, static_argnums=(0, 1))
@by_default_rules
def _fixed(rates, dtype, positions):
    return _angles(positions, _words(rates.array(), 3 if dtype == np.float64 else 2), dtype)


def fractional(
    whole: Int[Array, "*batch #R"], fraction: UInt[Array, "*batch #R"], rates: Float[np.ndarray, " R"]
) -> Float[Array, "*batch R"]:
    """Returns (whole + fraction / 2^bits) * rates in radians, reduced to [-pi, pi], for rates up to one turn.

    The angles have as many bits as the fraction. A position shared by all rates has a last axis of size 1.
    """
    bits = fixed_point.bits(fraction)
    high, low = _words(rates, 2, bits=bits)
    whole = whole.astype(fraction.dtype)
    # In units of 2^-bits turns; unsigned integers wrap around modulo one turn.
    turn = whole * high + fixed_point.multiply_high(whole, low) + fixed_point.multiply_high(fraction, high)
    signed = jax.lax.bitcast_convert_type(turn, jnp.dtype(f"int{bits}"))
    dtype = jnp.dtype(f"float{bits}")
    return signed.astype(dtype) * np.asarray(2 * np.pi / 2**bits, dtype)


def learned(
    positions: Int[Array, "*batch"],
    rates: Float[Array, "*rates"],
    *,
    unit: str = "radians",
    dtype=jnp.float32,
) -> Float[Array, "..."]:
    """Returns positions * rates in radians [*batch, *rates], reduced to [-pi, pi], for traced rates.

    Positions are >= 0, rates of any size and sign. `unit` is the unit of the rates: `radians` or `turns` per position.
    A rate counts as the exact value of its float32, or of its float64 if `dtype` is float64. The derivative with
    respect to the rate is the position (2 pi times the position for turns). A rate that is not finite gives nan angles.
    """
    return _learned(unit, np.dtype(dtype), jnp.asarray(positions), jnp.asarray(rates))


def _words(
    rates: Float[np.ndarray, "*rates"], count: int, *, bits: int = 32
) -> list[UInt[np.ndarray, "*rates"]]:
    """Converts rates in radians to fractions of a turn, modulo one, in `count` words, the highest first.

    A word has 32 or 64 bits.
    """
    ratios = [float(rate).as_integer_ratio() for rate in np.ravel(rates)]
    turns = [
        (numerator * _TURNS_PER_RADIAN << bits * count) // (denominator << 256)
        for numerator, denominator in ratios
    ]
    shifts = range(bits * (count - 1), -1, -bits)
    parts = ([turn >> shift & (1 << bits) - 1 for turn in turns] for shift in shifts)
    return [np.array(part, f"uint{bits}").reshape(np.shape(rates)) for part in parts]


@functools.partial(jax.jit, static_argnums=(0, 1))
@by_default_rules
def _learned(unit, dtype, positions, rates):
    exact = jax.lax.stop_gradient(rates)
    pieces = [exact.astype(jnp.float32)]
    if dtype == np.float64:
        # The sum of three float32 holds the 53 bits of a float64.
        for _ in range(2):
            rest = exact.astype(jnp.float64) - sum(piece.astype(jnp.float64) for piece in pieces)
            pieces.append(rest.astype(jnp.float32))
    count = 3 if dtype == np.float64 else 2
    fractions = (_fraction(piece, unit, count) for piece in pieces)
    angles = sum(_angles(positions, fraction, dtype) for fraction in fractions)

    def change(drates, angles, rates, positions):
        slope = layout.with_rank(positions, angles.ndim).astype(dtype)
        return slope * (2 * np.pi if unit == "turns" else 1) * drates.astype(dtype)

    angles = jnp.where(jnp.isfinite(exact), angles, jnp.nan)
    return fixed_point.with_derivative(change, angles, rates, positions)


def _fraction(rates: Float[Array, "*rates"], unit: str, count: int) -> list[UInt32[Array, "*rates"]]:
    """Converts float32 rates to fractions of a turn, modulo one, in `count` words, the highest first.

    A float32 is m 2^e with a 24-bit m. Its turns are m times the bits of one unit in turns, starting at the bit that
    2^e moves to the first place after the binary point (Payne and Hanek's reduction).
    """
    bits = jax.lax.bitcast_convert_type(rates, jnp.uint32)
    # The lowest exponent, that of zero and of subnormal numbers, gives zero in all 96 bits.
    mantissa = bits & 0x7FFFFF | 0x800000
    first = (bits >> 23 & 0xFF) + 10  # e = exponent - 150, and the table starts at 2^160
    table = jnp.asarray(_UNITS[unit])
    index, shift = (first >> 5).astype(jnp.int32), first & 31
    parts = [table[index + i] for i in range(count + 2)]
    window = [high << shift | low >> 1 >> (31 - shift) for high, low in itertools.pairwise(parts)]
    sign = jnp.uint32(0) - (bits >> 31)
    return [word ^ sign for word in fixed_point.multiply(window, mantissa)[:count]]


def _angles(positions, fraction, dtype):
    """Returns 2 pi * frac(positions * fraction) in [-pi, pi]; `fraction` is words, the highest first."""
    positions = layout.with_rank(positions, positions.ndim + fraction[0].ndim).astype(jnp.uint32)
    high, low, *_ = fixed_point.multiply(fraction, positions)
    turns = jax.lax.bitcast_convert_type(high, jnp.int32).astype(dtype)
    if dtype == np.float64:
        turns += low.astype(dtype) * 2.0**-32
    return turns * np.asarray(2 * np.pi / 2**32, dtype)
