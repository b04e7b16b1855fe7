"""Tests of layers with a sliding window, alone and beside a state: streams, the bounded cache, and its capacity."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, layers, ops
from sympow_jax.layers.attention import kernels
from tests.ops.cases import error

WIDTH, TIME, WINDOW = 16, 40, 7
ONE = np.zeros((2, TIME), np.int32)
SEGMENT_IDS = np.array([[0] * 13 + [-1] * 3 + [0] * 6 + [1] * 18, [2] * 17 + [-1] * 22 + [2]], np.int32)


def make(preset="sliding_window", **changes):
    options = {"window": WINDOW, "decay": "learned"} | changes
    attention = config.preset(preset, **options)
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
    for size in (1, 10):
        out, _ = streamed(layer, x, SEGMENT_IDS, state, size)
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


def test_a_window_beside_a_state_is_added_by_gates():
    both, x = make("sympow_gated_window"), inputs()
    power, softmax = make("sympow_gated"), make(decay="none")
    flat = dict(nnx.to_flat_state(nnx.state(both, nnx.Param)))
    for alone in (power, softmax):
        nnx.update(
            alone, nnx.from_flat_state({path: flat[path] for path, _ in nnx.to_flat_state(nnx.state(alone))})
        )
    layers_of = (both, power, softmax)
    for layer in layers_of:
        layer.out.kernel = nnx.Param(jnp.eye(32))
    actual, far, near = (whole(layer, x, SEGMENT_IDS).reshape(2, TIME, 4, 8) for layer in layers_of)
    gates = 1 / (1 + np.exp(-(x @ both.mix.kernel[...] + both.mix.bias[...]))).reshape(2, TIME, 4, 2, 1)
    assert error(actual, gates[..., 0, :] * far + gates[..., 1, :] * near) < 2e-6
    np.testing.assert_allclose(gates.mean((0, 1, 2, 4)), [0.119, 0.881], atol=1e-2)


@pytest.mark.parametrize("max_length", [10, None])
def test_pieces_with_a_window_beside_a_state_equal_one_pass(max_length):
    """The memory is a KV cache, which is folded, or a recurrent state from the beginning."""
    layer, x = make("sympow_gated_window", exact_window=2), inputs()
    expected = whole(layer, x, SEGMENT_IDS)
    state = layer.init_state(2, max_length=max_length)
    assert isinstance(state.memory, ops.KVCache) == (max_length is not None)
    parts = []
    for start, stop, size in ((0, 10, 1), (10, 31, 9), (31, TIME, 1)):
        piece = np.s_[:, start:stop]
        out, state = streamed(layer, x[piece], SEGMENT_IDS[piece], state, size)
        assert state.window.capacity == WINDOW - 1
        state = layer.fold(state)
        parts.append(out)
    assert error(np.concatenate(parts, axis=1), expected) < 2e-6


def test_a_window_is_beside_power_attention_only():
    with pytest.raises(
        ValueError, match="softmax_window is True, which the kernel 'power' has and 'linear' has not"
    ):
        config.preset("linear", softmax_window=True)
    layer = make("sympow_gated_window")
    state = layer.init_state(2)
    with pytest.raises(ValueError, match=r"not one of this layer: .window.key is absent"):
        layer.extend(inputs(), dataclasses.replace(state, window=None))
