"""Tests of layers with a sliding window: streams of any pieces, the bounded cache, and its capacity."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax import config, layers
from sympow_jax.layers.attention import kernels
from tests.ops.cases import error

WIDTH, TIME, WINDOW = 16, 40, 7
ONE = np.zeros((2, TIME), np.int32)
SEGMENT_IDS = np.array([[0] * 13 + [-1] * 3 + [0] * 6 + [1] * 18, [2] * 17 + [-1] * 22 + [2]], np.int32)


def make(**changes):
    options = {"window": WINDOW} | changes
    attention = config.preset("sliding_window", decay="learned", **options)
    kernel = kernels.make(attention, num_heads=4, num_kv_heads=2, head_dim=8)
    layer = layers.Attention(WIDTH, kernel, rngs=0)
    for name in ("query", "key"):
        getattr(layer, name).kernel[...] *= 3  # so that weights differ
    return layer


def inputs():
    return np.random.default_rng(0).normal(size=(2, TIME, WIDTH)).astype("float32")


@nnx.jit
def resume(layer, x, segment_ids, state):
    return layer.extend(x, state, segment_ids=segment_ids)


@nnx.jit
def whole(layer, x, segment_ids):
    return layer(x, segment_ids=segment_ids)


def streamed(layer, x, segment_ids, state, size):
    parts = []
    for start in range(0, x.shape[1], size):
        piece = np.s_[:, start : start + size]
        out, state = resume(layer, x[piece], segment_ids[piece], state)
        parts.append(out)
    return np.concatenate(parts, axis=1), state


def test_pieces_of_any_size_equal_one_pass():
    layer, x = make(), inputs()
    expected = whole(layer, x, SEGMENT_IDS)
    state = layer.init_state(2, max_length=1000)
    for size in (1, 10):
        assert state.memory.key.shape == (2, 2, WINDOW - 1, 8)
        out, after = streamed(layer, x, SEGMENT_IDS, state, size)
        assert after.memory.key.shape == (2, 2, WINDOW - 1, 8)
        assert error(out, expected) < 2e-6


def test_a_window_of_the_own_token():
    layer, x = make(window=1), inputs()
    state = layer.init_state(2, max_length=TIME)
    assert state.memory.capacity == 1
    assert make(window=TIME).init_state(2, max_length=TIME).memory.capacity == TIME - 1
    out, _ = streamed(layer, x, SEGMENT_IDS, state, 10)
    assert error(out, whole(layer, x, SEGMENT_IDS)) < 2e-6


def test_a_state_without_a_length():
    layer, x = make(), inputs()
    _, state = resume(layer, x[:, :10], ONE[:, :10], layer.init_state(2))
    assert state.memory.capacity == WINDOW - 1
    rest, _ = resume(layer, x[:, 10:20], ONE[:, 10:20], state)
    assert error(rest, whole(layer, x, ONE)[:, 10:20]) < 2e-6


def test_a_cache_that_is_shorter_than_the_window():
    """Outputs beyond its length are NaN, as without a window, and a document starts afresh."""
    layer, x = make(), inputs()
    expected = np.asarray(whole(layer, x, ONE))
    out, state = streamed(layer, x[:, :9], ONE, layer.init_state(2, max_length=4), 1)
    assert state.memory.capacity == 4
    assert error(out[:, :5], expected[:, :5]) < 2e-6
    assert np.isnan(out[:, 5:]).all()
    out, _ = streamed(layer, x[:, :4], ONE + 5, state, 1)
    assert error(out, expected[:, :4]) < 2e-6


def test_a_short_cache_is_folded_into_one_for_the_whole_window():
    layer, x, ids = make(), inputs(), ONE.copy()
    ids[1, 4:6] = -1
    expected = np.asarray(whole(layer, x, ONE))
    _, state = streamed(layer, x[:, :4], ids, layer.init_state(2, max_length=5), 1)
    folded = layer.fold(state)
    assert jax.tree.map(jnp.shape, folded) == jax.tree.map(jnp.shape, layer.init_state(2, max_length=100))
    actual, _ = streamed(layer, x[:, 4:24], ONE, folded, 10)
    assert error(actual, expected[:, 4:24]) < 2e-6
    assert jax.tree.all(jax.tree.map(np.array_equal, layer.fold(folded), folded))
    # Row 0 exceeds the short cache and row 1, which is padded, does not.
    _, state = streamed(layer, x[:, 4:6], ids[:, 4:], state, 1)
    actual, _ = streamed(layer, x[:, 6:10], ONE, layer.fold(state), 1)
    assert np.isnan(actual[0]).all()
    assert np.isfinite(actual[1]).all()
