"""Tests of the attention layer: its parameters, its dtypes of computation, and its state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, layers, ops
from sympow_jax.layers.attention import kernels

WIDTH, TIME = 16, 24


def model_config(preset, *, dtype="float32", kv_heads=2, **changes):
    attention = config.preset(preset, **changes)
    return config.ModelConfig(
        vocab_size=32, layers=2, width=WIDTH, heads=4, kv_heads=kv_heads, dtype=dtype, attention=attention
    )


def make(preset, **changes):
    return layers.make_attention(model_config(preset, **changes), rngs=nnx.Rngs(0))


X = 3 * np.random.default_rng(1).normal(size=(1, TIME, WIDTH)).astype(np.float32)


@nnx.jit
def run(layer, x, segment_ids=None):
    return layer(x, segment_ids=segment_ids)


@nnx.jit
def run_on(layer, x, state, segment_ids=None):
    return layer.extend(x, state, segment_ids=segment_ids)


def sizes(layer):
    return {
        "/".join(map(str, path)): value.size for path, value in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }


def test_parameters_are_projections_gates_and_rates():
    projections = {
        "query/kernel": WIDTH * 16,
        "key/kernel": WIDTH * 8,
        "value/kernel": WIDTH * 8,
        "out/kernel": 16 * WIDTH,
    }
    gate, rate = {"decay/kernel": WIDTH * 2}, {"rate/kernel": WIDTH * 2}
    assert sizes(make("sympow")) == projections
    assert sizes(make("sympow_gated_paper")) == projections | gate
    assert sizes(make("conformal_paper")) == projections | gate | rate
    assert sizes(make("conformal")) == projections | gate | rate | {"decay_bias": 2}
    assert sizes(make("softmax_alibi")) == projections
    mix = {"mix/kernel": WIDTH * 8, "mix/bias": 8}
    assert sizes(make("sympow_gated_window")) == projections | gate | mix | {"decay_bias": 2}


def test_trained_decays_begin_at_the_fixed_ones_or_at_the_sigmoid_of_their_bias():
    def log_decay(layer):
        return np.broadcast_to(layer._project(X).log_decay, (1, TIME, 2, 4) if per_channel else (1, TIME, 2))

    for per_channel, prefix, fixed in ((False, "", "alibi"), (True, "channel_", "channel_fixed")):
        constant = make("sympow", decay=f"{prefix}constant")
        expected = log_decay(make("sympow", decay=fixed))
        np.testing.assert_allclose(log_decay(constant), expected, rtol=1e-5, atol=1e-7)
        assert len(np.unique(expected)) == (8 if per_channel else 2)
        if not per_channel:
            gated = make("sympow_gated")
            gated.decay.kernel[...] = jnp.zeros_like(gated.decay.kernel[...])
            np.testing.assert_allclose(log_decay(gated), expected, rtol=1e-5)
            assert make("sympow_gated", decay_bias=1.5).decay_bias[...].tolist() == [1.5, 1.5]
        biased = make("sympow", decay=f"{prefix}learned", decay_bias=1.5)
        biased.decay.kernel[...] = jnp.zeros_like(biased.decay.kernel[...])
        np.testing.assert_allclose(log_decay(biased), -np.log1p(np.exp(-1.5)), rtol=1e-6)
        constant.decay_logits[...] = jnp.full_like(constant.decay_logits[...], 1.5)
        np.testing.assert_allclose(log_decay(constant), -np.log1p(np.exp(-1.5)), rtol=1e-6)
        biased.decay_bias[...] = biased.decay_bias[...].at[0].set(-1.0)
        np.testing.assert_allclose(log_decay(biased).reshape(TIME, -1)[:, 0], -np.log1p(np.e), rtol=1e-6)


def test_learned_rates_begin_at_random_in_the_paper_and_at_those_of_rope_by_default():
    papers, ours = make("conformal_paper"), make("conformal")
    assert papers.rate.kernel[...].std() == pytest.approx(0.02, rel=0.3)
    np.testing.assert_allclose(
        papers.positions.theta, 2 * np.pi * 65_536.0 ** np.array([0, -1 / 2]), rtol=1e-14
    )
    assert not ours.rate.kernel[...].any()
    np.testing.assert_allclose(ours.positions.theta, [1.0, 0.01], rtol=1e-14)


def test_bfloat16_is_for_matrix_products_only():
    layer = make("conformal_paper", dtype="bfloat16", exact_window=4)
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(nnx.state(layer, nnx.Param)))
    x = X.astype(jnp.bfloat16)
    out, state = run_on(layer, x, layer.init_state(1, max_length=10_000))
    assert out.dtype == jnp.bfloat16
    assert layer.decay(x).dtype == layer.rate(x).dtype == jnp.float32
    assert state.memory.kv.dtype == state.memory.norm.dtype == jnp.float32
    assert state.position.whole.dtype == jnp.int32
    exact = run(make("conformal_paper", exact_window=4), x.astype(np.float32))
    error = out.astype(jnp.float32) - exact
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < 2e-2
    cache = make("softmax_alibi", dtype="bfloat16").init_state(1, max_length=10_000).memory
    assert (cache.key.dtype, cache.log_decay.dtype) == (jnp.bfloat16, jnp.float32)


def test_float64_is_right_to_float64():
    x = np.random.default_rng(0).standard_normal((1, TIME, WIDTH))
    with jax.enable_x64(True):
        kernel = kernels.make(
            config.preset("conformal_paper"), num_heads=4, num_kv_heads=2, head_dim=4, dtype="float64"
        )
        layer = layers.Attention(WIDTH, kernel, rngs=0)
        names = ("query", "key", "value", "out", "decay", "rate")
        weights = {name: np.asarray(getattr(layer, name).kernel[...], np.float64) for name in names}
        out = np.asarray(run(layer, jnp.asarray(x)))
        first, state = run_on(layer, jnp.asarray(x[:, :5]), layer.init_state(1))
        rest, _ = run_on(layer, jnp.asarray(x[:, 5:]), state)
        pieces = np.concatenate([first, rest], 1)

    def heads(name):
        return (x[0] @ weights[name]).reshape(TIME, -1, 4)

    beta = 1 + np.tanh(x[0] @ weights["rate"])
    turns = np.exp(1j * np.cumsum(beta, 0)[..., None] * ops.rotary.rope_rates(4))
    query, key = (
        (found[..., 0::2] + 1j * found[..., 1::2]) * np.repeat(turns, found.shape[1] // 2, axis=1)
        for found in map(heads, ("query", "key"))
    )
    decay = np.cumsum(-np.log1p(np.exp(-x[0] @ weights["decay"])), 0)
    mixed = []
    for head in range(4):
        scores = (query[:, head] @ key[:, head // 2].conj().T).real
        discount = np.exp(np.minimum(decay[:, None, head // 2] - decay[None, :, head // 2], 0))
        power = np.tril(scores**2 * discount)
        mixed.append(power / power.sum(1, keepdims=True) @ heads("value")[:, head // 2])
    expected = np.concatenate(mixed, 1) @ weights["out"]
    for found in (out, pieces):
        np.testing.assert_allclose(found[0], expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())


def test_outgrowing_the_kv_cache_is_not_silent():
    layer, new = make("softmax"), np.array([[0] * 2 + [1] * 4], np.int32)
    first = layer.init_state(1, max_length=8)
    out, state = run_on(layer, X[:, :6], first)
    assert np.isfinite(out).all()
    out, state = run_on(layer, X[:, 6:12], state)
    assert np.isfinite(out).all()  # within the call all keys are there
    out, state = run_on(layer, X[:, :6], state, new)
    assert np.isnan(out[:, :2]).all()
    np.testing.assert_allclose(out[:, 2:], run_on(layer, X[:, :6], first, new)[0][:, 2:], atol=1e-6)
    out, state = run_on(layer, X[:, 6:12], state, np.ones((1, 6), np.int32))
    assert np.isfinite(out).all()


def test_the_reference_takes_one_token_from_a_state():
    layer = make("conformal_paper", implementation="reference", exact_window=4)
    state, parts = layer.init_state(1, max_length=1, kv_cache=False), []
    for time in range(TIME):
        out, state = run_on(layer, X[:, time : time + 1], state)
        parts.append(out)
    np.testing.assert_allclose(np.concatenate(parts, 1), run(layer, X), atol=1e-5)


def test_a_state_without_a_length():
    layer = make("linear")
    _, state = run_on(layer, X[:, :12], layer.init_state(1))
    found, _ = run_on(layer, X[:, 12:], state)
    np.testing.assert_allclose(found, run(layer, X)[:, 12:], atol=1e-5)
    with pytest.raises(ValueError, match="pass max_length"):
        make("softmax").init_state(1)


def test_softmax_takes_its_implementation_and_a_kv_cache_takes_xla():
    layer = make("softmax", implementation="cudnn")
    with pytest.raises(NotImplementedError, match="implementation 'cudnn' needs a GPU"):
        layer(X)
    state = layer.init_state(1, max_length=TIME)
    assert nnx.eval_shape(run_on, layer, X, state)[0].shape == X.shape
    with pytest.raises(ValueError, match=r"attention.implementation is 'mosaic_gpu'; it must be one of"):
        make("softmax", implementation="mosaic_gpu")
