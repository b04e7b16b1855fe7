"""Tests of every position encoding and gate in the layer: streamed, packed, differentiated, and bidirectional."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, layers
from sympow_jax.ops import lrpe

WIDTH, TIME = 32, 26
Lrpe = config.LrpeConfig
LLAMA = config.RopeConfig(base=100.0, layout="halves", scaling="llama3", factor=4.0, original_length=32)
LEARNED = Lrpe(basis="householder", learned_rates=True)

VARIANTS = {
    "rope behind features": ("linear", {"position": "rope"}),
    "learned rope behind features": ("linear", {"position": "learned_rope"}),
    "orthogonal": ("linear_lrpe", {"lrpe": LEARNED}),
    "orthogonal, rotated normalizer": ("linear_lrpe", {"lrpe": Lrpe(rates="b"), "normalizer": "rotated"}),
    "unitary": ("linear_lrpe", {"lrpe": Lrpe(core="unitary", basis="householder", learned_rates=True)}),
    "permutation": ("linear_lrpe", {"lrpe": Lrpe(core="permutation", basis="odd_even")}),
    "permuteformer": (
        "linear",
        {
            "decay": "permuteformer",
            "position": "lrpe",
            "lrpe": Lrpe(core="permutation", permutation_per_head=True),
            "normalizer": "rotated",
        },
    ),
    "mixed, fourier": ("linear_lrpe", {"lrpe": Lrpe(core="mixed", basis="fourier", rates="c")}),
    "of symmetric features": ("linear_lrpe", {"feature_map": "symmetric"}),
    "of relu": ("linear", {"position": "none", "feature_map": "relu"}),
    "gated": ("linear_lrpe", {"decay": "learned"}),
    "of powers": ("sympow", {"position": "lrpe", "lrpe": Lrpe(core="unitary", learned_rates=True)}),
    "of softmax": ("softmax", {"position": "lrpe", "lrpe": LEARNED}),
    "of expressive attention": ("expressive", {"position": "lrpe", "lrpe": Lrpe(core="permutation")}),
    "expressive": ("expressive", {"decay": "learned"}),
    "stochastic": ("linear", {"position": "spe"}),
    "stochastic in softmax": ("softmax", {"position": "spe"}),
    "of Llama": ("softmax", {"rope": LLAMA}),
    "learned, of Llama": ("conformal", {"rope": LLAMA}),
    "rates of pairs": ("conformal", {"position": "learned_rope_pairs"}),
    "constant gates": ("sympow", {"decay": "constant"}),
    "fixed channel gates": ("sympow", {"decay": "channel_fixed"}),
    "constant channel gates": ("sympow", {"decay": "channel_constant"}),
    "learned channel gates": ("conformal", {"decay": "channel_learned"}),
}
# A default run has one of each kind.
OFTEN = {
    "orthogonal",
    "permuteformer",
    "of powers",
    "of softmax",
    "expressive",
    "stochastic",
    "learned, of Llama",
    "constant gates",
    "learned channel gates",
}
EACH = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]


def make(variant, **changes):
    preset, options = VARIANTS[variant]
    model = config.ModelConfig(
        vocab_size=32,
        layers=2,
        width=WIDTH,
        heads=4,
        kv_heads=2,
        dtype="float32",
        attention=config.preset(preset, **{"exact_window": 4, "chunk_size": 8} | options | changes),
    )
    return layers.make_attention(model, rngs=nnx.Rngs(0))


def inputs(time=TIME):
    return 3 * jax.random.normal(jax.random.key(1), (1, time, WIDTH))


@nnx.jit
def run(layer, x, segment_ids=None):
    return layer(x, segment_ids=segment_ids)


@nnx.jit
def run_on(layer, x, state):
    return layer(x, initial_state=state, return_state=True)


@functools.cache
def output_and_gradients(variant):
    """Returns the output of one call, and gradients of the sum of its squares, of one program."""

    def squares(layer, x):
        out = layer(x)
        return (out**2).sum(), out

    gradients, out = nnx.jit(nnx.grad(squares, has_aux=True))(make(variant), inputs())
    return np.asarray(out), nnx.to_flat_state(gradients)


def test_noise_does_not_depend_on_flags_of_jax():
    layer, x = make("stochastic"), inputs()
    expected = run(layer, x)
    with jax.default_prng_impl("rbg"), jax.threefry_partitionable(False):
        np.testing.assert_array_equal(run(layer, x), expected)


@pytest.mark.parametrize("variant", EACH)
def test_a_stream_equals_one_call(variant):
    layer, x = make(variant), inputs()
    state = layer.init_state(1, max_length=TIME)
    parts = []
    # Pieces of two lengths, each of which compiles.
    for start, stop in ((0, 12), (12, 13), (13, 14), (14, TIME)):
        out, state = run_on(layer, x[:, start:stop], state)
        parts.append(out)
    whole, _ = output_and_gradients(variant)
    error = jnp.concatenate(parts, 1) - whole
    assert jnp.sqrt((error**2).mean() / (whole**2).mean()) < 1e-5


def test_permuteformer_is_its_formula():
    """Weights r^(i-j) P^i phi(q_i) . P^j phi(k_j) (Chen 2021, section 3.2), with P and r of each key/value head."""
    layer, x = make("permuteformer"), inputs()

    def features(projection):
        projected = (np.asarray(x, np.float64) @ np.asarray(projection.kernel[...], np.float64))[0]
        return np.where(projected > 0, projected + 1, np.exp(np.minimum(projected, 0))).reshape(TIME, -1, 8)

    query, key = features(layer.query), features(layer.key)
    ratios = 1 / (1 + np.exp(-2 - 3 * np.arange(2) / 2))
    actual = layer.maps(x).weights[0]
    for head in range(4):
        matrix = np.eye(8)[lrpe.permutation(8, heads=2)[head // 2]]
        powers = np.array([np.linalg.matrix_power(matrix, i) for i in range(TIME)])
        products = np.einsum("iab,ib,jac,jc->ij", powers, query[:, head], powers, key[:, head // 2])
        weights = np.tril(products * ratios[head // 2] ** np.subtract.outer(range(TIME), range(TIME)))
        expected = weights / weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(actual[head], expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("variant", EACH)
def test_documents_do_not_attend_to_each_other(variant):
    layer, x = make(variant), inputs()
    out = run(layer, x, jnp.array([[3] * 12 + [-1] * 2 + [0] * 12]))
    alone = jnp.concatenate([run(layer, x[:, :12]), jnp.zeros((1, 2, WIDTH)), run(layer, x[:, 14:])], 1)
    assert jnp.sqrt(((out - alone) ** 2).mean() / (alone**2).mean()) < 1e-5


@pytest.mark.parametrize("variant", EACH)
def test_gradients_reach_every_parameter(variant):
    _, gradients = output_and_gradients(variant)
    for path, gradient in gradients:
        assert jnp.isfinite(gradient[...]).all(), path
        assert jnp.abs(gradient[...]).max() > 0, path


@pytest.mark.parametrize("preset", ["linear", "softmax", "expressive"])
def test_bidirectional_attention_ignores_order_except_in_positions(preset):
    order = np.random.default_rng(0).permutation(TIME)
    x = inputs()
    model = {"vocab_size": 32, "layers": 2, "width": WIDTH, "heads": 4, "dtype": "float32"}
    for position in ("none", "rope"):
        attention = config.preset(preset, position=position, causal=False)
        layer = layers.make_attention(config.ModelConfig(**model, attention=attention), rngs=nnx.Rngs(0))
        error = jnp.abs(run(layer, x[:, order]) - run(layer, x)[:, order]).max()
        assert error < 1e-5 if position == "none" else error > 1e-3
        with pytest.raises(ValueError, match="attention that is not causal has no state"):
            layer(x, return_state=True)


def test_sizes_of_encoded_queries_and_keys():
    sizes = {}
    for variant in ("rope behind features", "unitary", "of symmetric features", "of powers", "stochastic"):
        kernel = make(variant).kernel
        linear = kernel.attention.kernel == "linear"
        sizes[variant] = (
            kernel.encoded_dim,
            kernel.mapped_dim if linear else None,
            kernel.rotated_dim if linear else None,
        )
    assert sizes == {
        "rope behind features": (8, 8, 8),
        "unitary": (8, 8, 16),
        "of symmetric features": (8, 36, 36),
        "of powers": (16, None, None),
        "stochastic": (64, 64, None),
    }


def test_parameters_are_what_is_learned():
    def shapes(variant):
        layer = make(variant)
        state = nnx.state([layer.positions, getattr(layer, "decay_logits", None)], nnx.Param)
        return {str(path[-1]): x.shape for path, x in nnx.to_flat_state(state)}

    assert shapes("orthogonal") == {"rates": (2, 4)}
    assert shapes("permutation") == {}
    assert set(shapes("stochastic")) == {"frequencies", "phases", "gains"}
    assert make("learned channel gates").decay.kernel.shape == (WIDTH, 16)
    assert make("rates of pairs").rate.kernel.shape == (WIDTH, 8)
    assert make("constant channel gates").decay_logits.shape == (2, 8)


def test_rates_of_a_layer():
    """Checks the rates of every rope against the formula that the settings name."""
    turns = 100.0 ** (-np.arange(0, 8, 2) / 8) * 32 / (2 * np.pi)
    kept = np.clip((turns - 1) / 3, 0, 1)
    expected = turns * 2 * np.pi / 32 * (kept + (1 - kept) / 4)
    np.testing.assert_allclose(make("learned, of Llama").positions.theta, expected, rtol=1e-14)
    papers = make("rates of pairs").positions.theta
    np.testing.assert_allclose(papers, 2 * np.pi * 65_536.0 ** (-np.arange(0, 8, 2) / 8), rtol=1e-14)
