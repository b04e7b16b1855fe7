"""Tests of the feature layouts of the state kernels, of both powers, against the canonical one."""

import math

import numpy as np
import pytest

from pallas_kernels.power_state.quartic import layouts as quartic
from pallas_kernels.power_state.square import layouts as square
from sympow_jax.ops import feature_maps

SQUARE = [square.Layout(head_dim) for head_dim in (16, 32, 48, 64, 128)]
QUARTIC = [quartic.Layout(*sizes) for sizes in ((16, 16), (32, 32), (16, 32), (32, 16))]


def monomials(x, layout):
    """Returns the features of x [..., D] in the layout; an index beyond the last is of a zero."""
    extended = np.concatenate([x, np.zeros_like(x[..., :1])], -1)
    return extended[..., layout.indices].prod(-1)


@pytest.mark.parametrize("layout", SQUARE + QUARTIC, ids=lambda layout: str(layout.head_dim))
def test_weighted_features_are_the_power(layout):
    q, k = np.random.default_rng(0).normal(size=(2, layout.head_dim))
    features = (layout.weights * monomials(q, layout) * monomials(k, layout)).sum()
    np.testing.assert_allclose(features, (q @ k) ** (2 if layout in SQUARE else 4), rtol=1e-10)


def test_windows_are_where_they_say():
    """Column o + c of group j holds x[a + j] * x[a + c]. The vector is followed by a copy of its first indices."""
    for layout in SQUARE:
        x = np.random.default_rng(1).normal(size=layout.head_dim)
        repeated = np.concatenate([x, x[: layout.rows - layout.head_dim]])
        for group in range(square.TILE):
            parts = [
                repeated[window.begin + group] * repeated[window.begin : window.begin + window.width]
                for window in layout.windows
            ]
            np.testing.assert_array_equal(np.concatenate(parts), x[layout.indices[group]].prod(-1))


def test_sizes():
    assert [square.Layout(head_dim).width for head_dim in (32, 64, 128)] == [48, 160, 576]
    with pytest.raises(ValueError, match="multiple of 16"):
        square.Layout(40)
    for layout in QUARTIC:
        counted = layout.canonical[layout.weights > 0]
        assert len(np.unique(counted)) == len(counted) == math.comb(layout.head_dim + 3, 4)
    needed = [layout.needed.sum() * layout.per_stack * quartic.COLUMNS for layout in QUARTIC[:2]]
    assert needed == [8_256, 66_816]


def test_features_are_a_scalar_times_a_block():
    """Computes features like the kernels: rows of the sorted scalars, columns of y with zeros in front."""
    for layout in QUARTIC:
        x = np.random.default_rng(1).normal(size=layout.head_dim)
        low, high = quartic.pairs(layout.head_dim)
        y = np.concatenate([np.zeros(layout.rows - layout.products), x[low] * x[high]])
        scalars = np.zeros(layout.scalar_rows)
        scalars[: layout.products] = x[layout.scalars].prod(-1)
        expected = monomials(x, layout).reshape(len(layout.units), -1, quartic.COLUMNS)
        for (block, first), features in zip(layout.units, expected, strict=True):
            column = y[block * quartic.COLUMNS : (block + 1) * quartic.COLUMNS]
            scalar = scalars[first : first + len(features)]
            np.testing.assert_allclose(features, scalar[:, None] * column, rtol=1e-12)


def drawn_state(head_dim, value_dim, power):
    """Returns keys, values, and their state and normalizer in canonical order."""
    random = np.random.default_rng(2)
    keys, values = (random.normal(size=(3, size)).astype("float32") for size in (head_dim, value_dim))
    features = np.asarray(feature_maps.symmetric_power(keys, power))
    return keys, values, np.einsum("tf,te->fe", features, values), features.sum(0)


def test_states_of_squares_convert_both_ways():
    for layout in SQUARE[1:4:2]:
        keys, values, kv, norm = drawn_state(layout.head_dim, 5, 2)
        state = square.from_canonical(kv[None], layout, layout.head_dim)
        expected = np.einsum("tjp,te->jep", monomials(keys, layout), values)
        np.testing.assert_allclose(state[0], expected, rtol=1e-4, atol=1e-5)
        found = square.to_canonical(state, layout, layout.head_dim)
        np.testing.assert_allclose(found[0], kv, rtol=1e-6)
        matrix = square.norm_from_canonical(norm, layout.head_dim)
        np.testing.assert_allclose(matrix, keys.T @ keys, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(square.norm_to_canonical(matrix), norm, rtol=1e-6)


def test_states_of_fourth_powers_convert_both_ways():
    for layout in (QUARTIC[0], QUARTIC[2]):
        keys, values, kv, norm = drawn_state(layout.head_dim, layout.value_dim, 4)
        state = quartic.from_canonical(kv[None], layout)
        expected = np.einsum("tusc,te->usec", monomials(keys, layout) * (layout.weights > 0), values)
        np.testing.assert_allclose(state[0], expected.reshape(state.shape[1:]), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(quartic.to_canonical(state, layout)[0], kv, rtol=1e-5, atol=1e-6)
        low, high = quartic.pairs(layout.head_dim)
        y = np.pad(keys[:, low] * keys[:, high], [(0, 0), (layout.rows - layout.products, 0)])
        matrix = quartic.norm_from_canonical(norm[None], layout)
        np.testing.assert_allclose(matrix[0], y.T @ y, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(quartic.norm_to_canonical(matrix, layout)[0], norm, rtol=1e-5, atol=1e-6)
