"""Tests of running sums: exact ones against Python's integers, and those of decays against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax.ops import decays, fixed_point
from tests.ops import cases

SCALE = 2**32

running_sum = jax.jit(fixed_point.running_sum)


def as_integers(number):
    whole, fraction = (np.asarray(part).astype(object) for part in number)
    return whole * SCALE + fraction


def test_sums_are_exact_and_continue():
    rng = np.random.default_rng(0)
    x = (rng.random((2, 500, 3)) * 10.0 ** rng.integers(-9, 4, (2, 500, 3))).astype(np.float32)
    exact = np.cumsum(np.round(x.astype(np.float64) * SCALE).astype(object), axis=1)
    sums = running_sum(x)
    np.testing.assert_array_equal(as_integers(sums), exact)
    first = running_sum(x[:, :123])
    second = running_sum(x[:, 123:], tuple(part[:, -1] for part in first))
    np.testing.assert_array_equal(as_integers(second), exact[:, 123:])


def test_differences_borrow():
    a = np.array([5, 5], np.int32), np.array([1, 7], np.uint32)
    b = np.array([2, 2], np.int32), np.array([3, 3], np.uint32)
    np.testing.assert_array_equal(as_integers(fixed_point.subtract(a, b)), as_integers(a) - as_integers(b))


@pytest.mark.parametrize("bits", [32, 64])
def test_multiply_high(bits):
    rng = np.random.default_rng(0)
    largest = 2**bits - 1
    a, b = rng.integers(0, largest, (2, 1000), dtype=np.uint64, endpoint=True).astype(f"uint{bits}")
    a[:2], b[:2] = largest, (largest, 0)
    exact = np.array([int(m) * int(n) >> bits for m, n in zip(a, b, strict=True)], f"uint{bits}")
    with jax.enable_x64(bits == 64):
        np.testing.assert_array_equal(jax.jit(fixed_point.multiply_high)(a, b), exact)


def test_sums_of_float64_are_exact_to_64_bits():
    x = 2 * np.random.default_rng(0).random((1, 500, 3))
    with jax.enable_x64(True):
        whole, fraction = (
            np.asarray(part)
            for part in jax.jit(functools.partial(fixed_point.running_sum, dtype=np.uint64))(x)
        )
    # A float64 of at least 2^-11 is a multiple of 2^-64.
    exact = np.cumsum([[[int(number * 2.0**64) for number in row] for row in x[0]]], axis=1)
    np.testing.assert_array_equal(whole.astype(object) * 2**64 + fraction.astype(object), exact)


def test_a_running_sum_loses_precision_that_the_split_sum_keeps():
    """A float32 sum past -1e4 rounds later steps to 1e-3. The difference of split sums is right to rounding."""
    random = np.random.default_rng(0)
    steps = random.choice([-1e-4, -0.3, -1e4], size=192, p=[0.7, 0.25, 0.05]).astype(np.float32)
    exact = np.array(
        [[steps[j + 1 : i + 1].astype(np.float64).sum() for j in range(192)] for i in range(192)]
    )
    visible = np.tri(192, dtype=bool) & (exact > -87)

    running = np.cumsum(steps)
    naive = np.exp(np.where(visible, running[:, None] - running, 0))
    bounded = decays.bounded(jnp.asarray(steps), False)
    coarse, fine = decays.split(bounded)
    split = decays.exp((coarse[:, None] - coarse) + (fine[:, None] - fine))
    expected = np.exp(np.where(visible, exact, 0))
    assert cases.error(naive[visible], expected[visible]) >= 1e-4
    assert cases.error(np.asarray(split)[visible], expected[visible]) <= 2e-7
