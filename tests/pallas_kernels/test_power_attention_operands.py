"""Tests that queries and keys in units of their length, interpreted, are exact."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.power_attention import sequence, units


@pytest.mark.parametrize(("dtype", "size", "octaves"), [("bfloat16", 64, 100), ("float16", 16, 8)])
def test_unit_lengths(dtype, size, octaves):
    random = np.random.default_rng(0)
    shapes = (2, 64, 3, size), (2, 128, 1, size)
    arrays = [random.normal(size=x) * 2.0 ** random.integers(-octaves, octaves, (*x[:3], 1)) for x in shapes]
    arrays[0][0, 5, 1], arrays[1][1, 7, 0, 3:] = 0, 0
    arrays = [jnp.asarray(x, dtype) for x in arrays]
    *found, query_exponent, key_exponent = units.unit_lengths(
        *arrays, 7, interpret=plgpu.InterpretGPUParams(detect_races=True)
    )
    for x, unit, exponent, bits in zip(arrays, found, (query_exponent, key_exponent), (7, 0)):
        exact = np.asarray(x, np.float64)
        length = np.sqrt((exact**2).sum(-1, keepdims=True))
        expected = np.frexp(length)[1]
        np.testing.assert_array_equal(unit, (exact * 2.0 ** (bits - expected)).astype(np.float16))
        expected = np.where(length, expected, sequence.NOTHING)
        np.testing.assert_array_equal(exponent, np.moveaxis(expected[..., 0], 2, 1))
