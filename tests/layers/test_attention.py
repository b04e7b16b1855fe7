"""Tests of the attention layer: its parameters, its dtypes of computation, and its state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, layers, ops
from sympow_jax.layers.attention import kernels
from sympow_jax.ops import kv_cache

WIDTH, TIME = 16, 24


def model_config(preset, *, dtype="float32", kv_heads=2, **changes):
    attention = config.preset(preset, **changes)
    return config.ModelConfig(
        vocab_size=32, layers=2, width=WIDTH, heads=4, kv_heads=kv_heads, dtype=dtype, attention=attention
    )


def make(preset, **changes):
    return layers.make_attention(model_config(preset, **changes), rngs=nnx.Rngs(0))


def inputs(batch=1, time=TIME, dtype=jnp.float32):
    return 3 * jax.random.normal(jax.random.key(1), (batch, time, WIDTH), dtype)


@nnx.jit
def run(layer, x, segment_ids=None, initial_state=None):
    return layer(x, segment_ids=segment_ids, initial_state=initial_state)


@nnx.jit
def run_on(layer, x, state, segment_ids=None):
    return layer(x, segment_ids=segment_ids, initial_state=state, return_state=True)


def sizes(layer):
    return {
        "/".join(map(str, path)): value.size for path, value in nnx.to_flat_state(nnx.state(layer, nnx.Param))
    }


def test_parameters_are_projections_gates_and_rates_without_bias():
    projections = {
        "query/kernel": WIDTH * 16,
        "key/kernel": WIDTH * 8,
        "value/kernel": WIDTH * 8,
        "out/kernel": 16 * WIDTH,
    }
    gate, rate = {"decay/kernel": WIDTH * 2}, {"rate/kernel": WIDTH * 2}
    assert sizes(make("sympow")) == projections
    assert sizes(make("sympow_gated")) == projections | gate
    assert sizes(make("conformal")) == projections | gate | rate
    assert sizes(make("softmax_alibi")) == projections


def test_rates_of_one_are_rope_to_the_bit():
    rope, learned = make("sympow"), make("sympow_learned_rope")
    learned.rate.kernel[...] = jnp.zeros_like(learned.rate.kernel[...])
    for name in ("query", "key", "value", "out"):
        getattr(learned, name).kernel[...] = getattr(rope, name).kernel[...]
    x = inputs()
    np.testing.assert_array_equal(run(learned, x), run(rope, x))
    assert np.abs(run(make("sympow_learned_rope"), x) - run(learned, x)).max() > 1e-3


def test_groups_are_heads_that_share_a_key():
    grouped, full = make("conformal"), make("conformal", kv_heads=4)
    for name in ("query", "out"):
        getattr(full, name).kernel[...] = getattr(grouped, name).kernel[...]
    for name, size in (("key", 4), ("value", 4), ("decay", 1), ("rate", 1)):
        kernel = getattr(grouped, name).kernel[...].reshape(WIDTH, 2, size)
        getattr(full, name).kernel[...] = jnp.repeat(kernel, 2, axis=1).reshape(WIDTH, -1)
    np.testing.assert_allclose(run(grouped, inputs()), run(full, inputs()), atol=1e-6)


@pytest.mark.parametrize(("fixed", "trained"), [("alibi", "constant"), ("channel_fixed", "channel_constant")])
def test_trained_constant_decays_begin_at_the_fixed_ones(fixed, trained):
    expected, out = (run(make("sympow", decay=decay), inputs()) for decay in (fixed, trained))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("learned", "constant"), [("learned", "constant"), ("channel_learned", "channel_constant")]
)
def test_decays_begin_at_the_sigmoid_of_their_bias(learned, constant):
    biased, expected = make("sympow", decay=learned, decay_bias=1.5), make("sympow", decay=constant)
    for name in ("query", "key", "value", "out"):
        getattr(expected, name).kernel[...] = getattr(biased, name).kernel[...]
    expected.decay_logits[...] = jnp.full_like(expected.decay_logits[...], 1.5)
    biased.decay.kernel[...] = jnp.zeros_like(biased.decay.kernel[...])
    np.testing.assert_allclose(run(biased, inputs()), run(expected, inputs()), rtol=1e-5, atol=1e-6)
    biased.decay_bias[...] = biased.decay_bias[...].at[0].set(-1.0)
    assert np.abs(run(biased, inputs()) - run(expected, inputs())).max() > 1e-3


@pytest.mark.parametrize("preset", ["conformal", "softmax_alibi"])
def test_bfloat16_is_for_matrix_products_only(preset):
    layer = make(preset, dtype="bfloat16", exact_window=4)
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(nnx.state(layer, nnx.Param)))
    x = inputs(dtype=jnp.bfloat16)
    state = layer.init_state(1, max_length=10_000)
    out, state = run_on(layer, x, state)
    assert out.dtype == jnp.bfloat16
    if preset == "conformal":
        assert layer.decay(x).dtype == layer.rate(x).dtype == jnp.float32
        assert state.memory.kv.dtype == state.memory.norm.dtype == jnp.float32
        assert state.position.whole.dtype == jnp.int32
    else:
        assert state.memory.key.dtype == jnp.bfloat16
        assert state.memory.log_decay.dtype == jnp.float32
    exact = run(make(preset, exact_window=4), x.astype(jnp.float32))
    error = out.astype(jnp.float32) - exact
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < 2e-2


@pytest.mark.parametrize("preset", ["conformal", "sympow_gated"])
def test_float64_is_right_to_float64(preset):
    x = np.random.default_rng(0).standard_normal((1, TIME, WIDTH))
    with jax.enable_x64(True):
        kernel = kernels.make(config.preset(preset), num_heads=4, num_kv_heads=2, head_dim=4, dtype="float64")
        layer = layers.Attention(WIDTH, kernel, dtype=jnp.float64, rngs=0)
        names = ("query", "key", "value", "out", "decay") + (("rate",) if preset == "conformal" else ())
        weights = {name: np.asarray(getattr(layer, name).kernel[...], np.float64) for name in names}
        out = np.asarray(run(layer, jnp.asarray(x)))

    def heads(name):
        return (x[0] @ weights[name]).reshape(TIME, -1, 4)

    beta = 1 + np.tanh(x[0] @ weights["rate"]) if preset == "conformal" else np.ones((TIME, 2))
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
    np.testing.assert_allclose(out[0], expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("preset", "max_length", "changes", "recurrent"),
    [
        ("softmax", 10**6, {}, False),
        ("even_power", 10**6, {}, False),
        ("linear", 8, {}, True),
        ("sympow", 10**6, {}, True),
        ("sympow", 8, {}, False),
        ("sympow", 8, {"form": "chunked"}, True),
        ("conformal", 1024, {"power": 8}, True),  # F = 165 at head size 4
    ],
)
def test_state_is_what_costs_less(preset, max_length, changes, recurrent):
    state = make(preset, **changes).init_state(1, max_length=max_length)
    assert isinstance(state.memory, kv_cache.KVCache) != recurrent


def test_power_4_at_head_size_64_uses_a_kv_cache():
    sizes = config.MODEL_SIZES["gpt2_124m"]
    layer = nnx.eval_shape(
        lambda: layers.make_attention(
            config.ModelConfig(**sizes, attention=config.preset("conformal", power=4)), rngs=nnx.Rngs(0)
        )
    )
    state = jax.eval_shape(lambda: layer.init_state(1, max_length=65_536))
    assert isinstance(state.memory, kv_cache.KVCache)
    assert state.memory.key.shape == (1, 12, 65_536, 64)


def test_padding_and_documents_do_not_leak():
    layer = make("conformal", exact_window=4)
    x = inputs()
    ids = jnp.array([[0] * 6 + [-1] * 3 + [0] * 5 + [1] * 10])
    out = run(layer, x, ids)
    np.testing.assert_allclose(out[:, 14:], run(layer, x[:, 14:]), atol=1e-6)
    together = run(layer, jnp.concatenate([x[:, :6], x[:, 9:14]], axis=1))
    np.testing.assert_allclose(jnp.concatenate([out[:, :6], out[:, 9:14]], axis=1), together, atol=1e-6)
    assert not out[:, 6:9].any()


def test_outgrowing_the_kv_cache_is_not_silent():
    layer = make("softmax")
    x = inputs(time=12)
    out, state = run_on(layer, x[:, :6], layer.init_state(1, max_length=8))
    assert np.isfinite(out).all()
    out, state = run_on(layer, x[:, 6:], state)
    assert np.isfinite(out).all()  # within the call all keys are there
    out, state = run_on(layer, x[:, :6], state, jnp.array([[0] * 2 + [1] * 4]))
    assert np.isnan(out[:, :2]).all()
    np.testing.assert_allclose(out[:, 2:], run(layer, x[:, 2:6]), atol=1e-6)  # a document starts afresh
    out, state = run_on(layer, x[:, 6:], state, jnp.ones((1, 6), jnp.int32))
    assert np.isfinite(out).all()


@pytest.mark.parametrize("preset", ["conformal", "linear"])
def test_the_reference_takes_one_token_from_a_state(preset):
    layer = make(preset, implementation="reference", exact_window=4)
    x = inputs()
    _, state = run_on(layer, x[:, :-1], layer.init_state(1, max_length=1, kv_cache=False))
    last, _ = run_on(layer, x[:, -1:], state)
    np.testing.assert_allclose(last, run(layer, x)[:, -1:], atol=1e-5)


def test_a_state_without_tokens():
    x = inputs()
    layer = make("sympow")
    _, state = run_on(layer, x[:, :12], None)
    np.testing.assert_allclose(run(layer, x[:, 12:], initial_state=state), run(layer, x)[:, 12:], atol=1e-5)
    with pytest.raises(ValueError, match="pass max_length"):
        make("softmax")(x, return_state=True)


def squares(layer, ids):
    return (layer(inputs(), segment_ids=ids) ** 2).sum()


def test_gradients_are_finite_and_reach_every_parameter():
    for preset in ("conformal", "softmax_alibi"):
        layer = make(preset, exact_window=4)
        ids = jnp.array([[-1] * 2 + [0] * 12 + [-1] * 3 + [2] * 7])
        gradients = nnx.jit(nnx.grad(squares))(layer, ids)
        for gradient in jax.tree.leaves(gradients):
            assert np.isfinite(gradient).all()
            assert np.abs(gradient).max() > 0


def test_softmax_takes_its_implementation_and_a_kv_cache_takes_xla():
    layer = make("softmax", implementation="cudnn")
    with pytest.raises(NotImplementedError, match="implementation 'cudnn' needs a GPU"):
        layer(inputs())
    state = layer.init_state(1, max_length=TIME)
    out, _ = run_on(layer, inputs(), state)
    np.testing.assert_allclose(out, run(make("softmax", implementation="xla"), inputs()), atol=1e-5)
    with pytest.raises(
        ValueError, match=r"attention.implementation is 'mosaic_gpu'; it must be one of xla, cudnn"
    ):
        make("softmax", implementation="mosaic_gpu")
