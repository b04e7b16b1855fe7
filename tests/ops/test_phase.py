"""Tests of angles of fixed and learned rates against rational arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax.ops import phase
from tests.ops import exact_angles

RATES = np.array([0, 1, -1, 1 / 3, 2 * np.pi, -3.3, 100, 1e-4, 1e-9, 1e-30, 7e8, -1e30, 3e38])
DTYPES = {"float32": 5e-7, "float64": 2e-15}


@pytest.mark.parametrize("dtype", DTYPES)
def test_fixed_rates_at_any_position(dtype):
    with jax.enable_x64(dtype == "float64"):
        angles = jax.jit(lambda p: phase.fixed(p, RATES, dtype))(exact_angles.POSITIONS)
    assert angles.dtype == dtype
    exact = exact_angles.angles(exact_angles.POSITIONS, RATES)
    assert exact_angles.largest_difference(angles, exact) < DTYPES[dtype]


@pytest.mark.parametrize("unit", ["radians", "turns"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_learned_rates_at_any_position(dtype, unit):
    rates = RATES.astype(dtype)
    with jax.enable_x64(dtype == "float64"):
        learned = jax.jit(lambda p, rates: phase.learned(p, rates, unit=unit, dtype=dtype))
        angles = learned(exact_angles.POSITIONS, rates)
    assert angles.dtype == dtype
    turn = {"turn": 1} if unit == "turns" else {}
    exact = exact_angles.angles(exact_angles.POSITIONS, rates, **turn)
    assert exact_angles.largest_difference(angles, exact) < DTYPES[dtype]


def test_every_exponent():
    rates = np.ldexp(np.float32(1 + 1 / 3), np.arange(-126, 128)).astype(np.float32)
    positions = np.int32([3, 2**31 - 1])
    angles = jax.jit(phase.learned)(positions, rates)
    assert exact_angles.largest_difference(angles, exact_angles.angles(positions, rates)) < 5e-7


def test_a_nonfinite_rate_gives_nan():
    angles = jax.jit(phase.learned)(np.arange(3), jnp.float32([np.inf, np.nan, 1.0]))
    np.testing.assert_array_equal(np.isnan(angles), [[True, True, False]] * 3)
