"""Tests of powers of two and running sums of the kernels' arguments."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import numerics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("exponent", [-250, -127, -1, 0, 3, 128, 250])
def test_scaled_is_exact(dtype, exponent):
    """Includes powers of two that are not normal numbers."""
    x = np.array([1.5, -0.75, 0.0]) * 2.0 ** -(exponent // 2)
    scaled = numerics.scaled(jnp.asarray(x, dtype), exponent)
    assert scaled.dtype == dtype
    np.testing.assert_array_equal(np.asarray(scaled, np.float64), x * 2.0**exponent)


def test_exponent_is_that_of_the_next_power_of_two():
    x = jnp.asarray([0.0, 0.5, 0.75, -1.0, 3.0, 2.0**-126, 1e38])
    np.testing.assert_array_equal(numerics.exponent(x), [0, 0, 0, 1, 2, -125, 127])


def test_differences_of_running_sums_are_right_behind_large_terms():
    """Typical of gates: small steps after steps of 88, which would be lost in a single float32 sum."""
    x = -np.random.default_rng(0).exponential(1e-3, 640).astype(np.float32)
    x[::50] = -88
    coarse = numerics.coarse(jnp.asarray(x), len(x), 88.0)
    coarse, fine = (jnp.cumsum(part) for part in (coarse, x - coarse))
    exact = np.cumsum(x.astype(np.float64))
    after, before = np.arange(602, 640), 601
    difference = (coarse[after] - coarse[before]) + (fine[after] - fine[before])
    np.testing.assert_allclose(difference, exact[after] - exact[before], rtol=1e-6, atol=5e-7)
