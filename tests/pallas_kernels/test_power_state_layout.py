"""Tests of the feature layout of the state kernels against the canonical one."""

import numpy as np
import pytest

from pallas_kernels.power_state.square import layout as layouts
from sympow_jax.ops import feature_maps

SIZES = (16, 32, 48, 64, 128)


@pytest.mark.parametrize("head_dim", SIZES)
def test_weighted_features_are_the_power(head_dim):
    layout = layouts.Layout(head_dim)
    random = np.random.default_rng(0)
    q, k = random.normal(size=(2, head_dim))
    monomials_q, monomials_k = (x[layout.indices].prod(-1) for x in (q, k))
    np.testing.assert_allclose((layout.weights * monomials_q * monomials_k).sum(), (q @ k) ** 2)


@pytest.mark.parametrize("head_dim", SIZES)
def test_windows_are_where_they_say(head_dim):
    """Column o + c of group j holds x[a + j] * x[a + c].

    The vector is followed by a copy of its first indices.
    """
    layout = layouts.Layout(head_dim)
    x = np.random.default_rng(1).normal(size=head_dim)
    repeated = np.concatenate([x, x[: layout.rows - head_dim]])
    for group in range(layouts.TILE):
        parts = [
            repeated[window.begin + group] * repeated[window.begin : window.begin + window.width]
            for window in layout.windows
        ]
        np.testing.assert_array_equal(np.concatenate(parts), x[layout.indices[group]].prod(-1))


@pytest.mark.parametrize(("head_dim", "width"), [(32, 48), (64, 160), (128, 576)])
def test_widths(head_dim, width):
    assert layouts.Layout(head_dim).width == width


@pytest.mark.parametrize("head_dim", SIZES)
def test_states_convert_both_ways(head_dim):
    layout = layouts.Layout(head_dim)
    keys = np.random.default_rng(2).normal(size=(3, head_dim)).astype("float32")
    values = np.random.default_rng(3).normal(size=(3, 5)).astype("float32")
    features = np.asarray(feature_maps.symmetric_power(keys, 2))
    kv, norm = np.einsum("tf,te->fe", features, values), features.sum(0)
    state = layouts.from_canonical(kv[None], layout, head_dim)
    expected = np.einsum("tjp,te->jep", keys[:, layout.indices].prod(-1), values)
    np.testing.assert_allclose(state[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layouts.to_canonical(state, layout, head_dim)[0], kv, rtol=1e-6)

    matrix = layouts.norm_from_canonical(norm, head_dim)
    np.testing.assert_allclose(matrix, keys.T @ keys, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layouts.norm_to_canonical(matrix), norm, rtol=1e-6)


def test_sizes_that_are_no_multiple_of_a_tile_are_refused():
    with pytest.raises(ValueError, match="multiple of 16"):
        layouts.Layout(40)
