"""Tests of exact running sums against Python's integers."""

import jax
import numpy as np

from sympow_jax.ops import fixed_point

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


def test_multiply_high():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, SCALE, (2, 1000), dtype=np.uint64).astype(np.uint32)
    a[:2], b[:2] = SCALE - 1, (SCALE - 1, 0)
    exact = [int(m) * int(n) >> 32 for m, n in zip(a, b, strict=True)]
    np.testing.assert_array_equal(fixed_point.multiply_high(a, b), exact)
