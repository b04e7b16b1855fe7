"""Tests of the layout of degree-4 features against the canonical one."""

import math

import numpy as np
import pytest

from pallas_kernels.power_state.quartic import layout as layouts
from sympow_jax.ops import feature_maps

SIZES = [(16, 16), (32, 32), (16, 32), (32, 16)]


def monomials(x, layout):
    """Returns the features of x [..., D] in the layout, [..., U, 64 / E, 48]."""
    extended = np.concatenate([x, np.zeros_like(x[..., :1])], -1)
    return extended[..., layout.indices].prod(-1)


@pytest.mark.parametrize("sizes", SIZES)
def test_weighted_features_are_the_power(sizes):
    layout = layouts.Layout(*sizes)
    q, k = np.random.default_rng(0).normal(size=(2, sizes[0]))
    features = (layout.weights * monomials(q, layout) * monomials(k, layout)).sum()
    np.testing.assert_allclose(features, (q @ k) ** 4, rtol=1e-10)


@pytest.mark.parametrize("sizes", SIZES)
def test_each_monomial_counts_once(sizes):
    layout = layouts.Layout(*sizes)
    counted = layout.canonical[layout.weights > 0]
    assert len(np.unique(counted)) == len(counted) == math.comb(sizes[0] + 3, 4)


@pytest.mark.parametrize("sizes", SIZES)
def test_features_are_a_scalar_times_a_block(sizes):
    """Computes features like the kernels: rows of the sorted scalars, columns of y with zeros in front."""
    layout = layouts.Layout(*sizes)
    x = np.random.default_rng(1).normal(size=sizes[0])
    low, high = layouts.pairs(sizes[0])
    y = np.concatenate([np.zeros(layout.rows - layout.products), x[low] * x[high]])
    scalars = np.zeros(layout.scalar_rows)
    scalars[: layout.products] = x[layout.scalars].prod(-1)
    expected = monomials(x, layout).reshape(len(layout.units), -1, layouts.COLUMNS)
    for (block, first), features in zip(layout.units, expected, strict=True):
        column = y[block * layouts.COLUMNS : (block + 1) * layouts.COLUMNS]
        scalar = scalars[first : first + len(features)]
        np.testing.assert_allclose(features, scalar[:, None] * column, rtol=1e-12)


@pytest.mark.parametrize(("sizes", "features"), [((16, 16), 8_256), ((32, 32), 66_816)])
def test_features_in_needed_stacks(sizes, features):
    layout = layouts.Layout(*sizes)
    assert layout.needed.sum() * layout.per_stack * layouts.COLUMNS == features


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32)])
def test_states_convert_both_ways(sizes):
    layout = layouts.Layout(*sizes)
    random = np.random.default_rng(2)
    keys, values = (random.normal(size=(3, size)).astype("float32") for size in sizes)
    features = np.asarray(feature_maps.symmetric_power(keys, 4))
    kv, norm = np.einsum("tf,te->fe", features, values), features.sum(0)
    state = layouts.from_canonical(kv[None], layout)
    expected = np.einsum("tusc,te->usec", monomials(keys, layout) * (layout.weights > 0), values)
    np.testing.assert_allclose(state[0], expected.reshape(state.shape[1:]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(layouts.to_canonical(state, layout)[0], kv, rtol=1e-5, atol=1e-6)

    low, high = layouts.pairs(sizes[0])
    y = np.pad(keys[:, low] * keys[:, high], [(0, 0), (layout.rows - layout.products, 0)])
    matrix = layouts.norm_from_canonical(norm[None], layout)
    np.testing.assert_allclose(matrix[0], y.T @ y, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(layouts.norm_to_canonical(matrix, layout)[0], norm, rtol=1e-5, atol=1e-6)
