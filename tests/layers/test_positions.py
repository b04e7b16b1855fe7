"""Tests of every position encoding and gate in the layer: streamed, packed, differentiated, and bidirectional."""

import jax
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, layers
from sympow_jax.ops import lrpe
from tests.ops.cases import error

WIDTH, TIME = 32, 26
Lrpe = config.LrpeConfig
LLAMA = config.RopeConfig(base=100.0, layout="halves", scaling="llama3", factor=4.0, original_length=32)
LEARNED = Lrpe(basis="householder", learned_rates=True)
PERMUTEFORMER = {"decay": "permuteformer", "position": "lrpe", "normalizer": "rotated"}
PERMUTEFORMER["lrpe"] = Lrpe(core="permutation", permutation_per_head=True)

VARIANTS = {
    "rope behind features": ("linear", {"position": "rope"}),
    "learned rope behind features": ("linear", {"position": "learned_rope"}),
    "orthogonal": ("linear_lrpe", {"lrpe": LEARNED}),
    "orthogonal, rotated normalizer": ("linear_lrpe", {"lrpe": Lrpe(rates="b"), "normalizer": "rotated"}),
    "unitary": ("linear_lrpe", {"lrpe": Lrpe(core="unitary", basis="householder", learned_rates=True)}),
    "permutation": ("linear_lrpe", {"lrpe": Lrpe(core="permutation", basis="odd_even")}),
    "permuteformer": ("linear", PERMUTEFORMER),
    "mixed, fourier": ("linear_lrpe", {"lrpe": Lrpe(core="mixed", basis="fourier", rates="c")}),
    "of symmetric features": ("linear_lrpe", {"feature_map": "symmetric"}),
    "of relu": ("linear", {"position": "none", "feature_map": "relu"}),
    "gated": ("linear_lrpe", {"decay": "learned"}),
    "of powers": ("sympow", {"position": "lrpe", "lrpe": Lrpe(core="unitary", learned_rates=True)}),
    "of softmax": ("softmax", {"position": "lrpe", "lrpe": LEARNED}),
    "of expressive attention": ("expressive", {"position": "lrpe", "lrpe": Lrpe(core="permutation")}),
    "expressive": ("expressive", {"decay": "learned"}),
    "delta rule": ("power_delta", {"power": 3, "negative_eigenvalues": True}),
    "stochastic": ("linear", {"position": "spe"}),
    "stochastic in softmax": ("softmax", {"position": "spe"}),
    "of Llama": ("softmax", {"rope": LLAMA}),
    "learned, of Llama": ("conformal_paper", {"rope": LLAMA}),
    "rates of pairs": ("conformal_paper", {"position": "learned_rope_pairs"}),
    "constant gates": ("sympow", {"decay": "constant"}),
    "fixed channel gates": ("sympow", {"decay": "channel_fixed"}),
    "constant channel gates": ("sympow", {"decay": "channel_constant"}),
    "learned channel gates": ("conformal_paper", {"decay": "channel_learned"}),
}
# A default run has one of each kind.
OFTEN = {"permuteformer", "delta rule", "expressive", "stochastic in softmax", "learned channel gates"}
EACH = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]


def make(variant, **changes):
    preset, options = VARIANTS[variant]
    attention = config.preset(preset, **{"exact_window": 4, "chunk_size": 8} | options | changes)
    sizes = {"vocab_size": 32, "layers": 2, "width": WIDTH, "heads": 4, "kv_heads": 2, "dtype": "float32"}
    return layers.make_attention(config.ModelConfig(**sizes, attention=attention), rngs=nnx.Rngs(0))


X = 3 * np.random.default_rng(1).normal(size=(2, TIME, WIDTH)).astype(np.float32)
# Padding within and between documents, and one document.
SEGMENT_IDS = np.array([[3] * 6 + [-1] + [3] * 5 + [-1] * 2 + [0] * 12, [5] * TIME], np.int32)


@nnx.jit
def run(layer, x):
    return layer(x)


@nnx.jit
def run_on(layer, x, state, segment_ids):
    return layer.extend(x, state, segment_ids=segment_ids)


@nnx.jit
def output_and_gradients(layer, x, segment_ids):
    def squares(layer):
        out = layer(x, segment_ids=segment_ids)
        return (out**2).sum(), out

    return nnx.grad(squares, has_aux=True)(layer)


@pytest.mark.parametrize("variant", EACH)
def test_streams_documents_and_gradients(variant):
    """A stream equals one call, documents do not attend to each other, and gradients reach every parameter."""
    layer = make(variant)
    gradients, whole = output_and_gradients(layer, X, SEGMENT_IDS)
    state = layer.init_state(2, max_length=TIME)
    last, _ = run_on(layer, X[:, 14:], state, SEGMENT_IDS[:, 14:])
    parts = []
    # Pieces of two lengths, each of which compiles.
    for start, stop in ((0, 12), (12, 13), (13, 14), (14, TIME)):
        out, state = run_on(layer, X[:, start:stop], state, SEGMENT_IDS[:, start:stop])
        parts.append(out)
    assert error(np.concatenate(parts, 1), whole) < 1e-5
    assert error(last[0], whole[0, 14:]) < 1e-5
    assert error(last[1], whole[1, 14:]) > 1e-3
    assert not whole[0, 12:14].any()
    for path, gradient in nnx.to_flat_state(gradients):
        assert np.isfinite(gradient[...]).all(), path
        assert np.abs(gradient[...]).max() > 0, path


def test_noise_does_not_depend_on_flags_of_jax():
    layer = make("stochastic in softmax")
    expected = run(layer, X)
    with jax.default_prng_impl("rbg"), jax.threefry_partitionable(False):
        np.testing.assert_array_equal(run(layer, X), expected)


def test_permuteformer_is_its_formula():
    """Weights r^(i-j) P^i phi(q_i) . P^j phi(k_j) (Chen 2021, section 3.2), with P and r of each key/value head."""
    layer, x = make("permuteformer"), X[:1]

    def features(projection):
        projected = (np.asarray(x, np.float64) @ np.asarray(projection.kernel[...], np.float64))[0]
        return np.where(projected > 0, projected + 1, np.exp(np.minimum(projected, 0))).reshape(TIME, -1, 8)

    query, key = features(layer.query), features(layer.key)
    ratios = 1 / (1 + np.exp(-2 - 3 * np.arange(2) / 2))
    actual = nnx.jit(lambda layer, x: layer.maps(x))(layer, x).weights[0]
    for head in range(4):
        matrix = np.eye(8)[lrpe.permutation(8, heads=2)[head // 2]]
        powers = np.array([np.linalg.matrix_power(matrix, i) for i in range(TIME)])
        products = np.einsum("iab,ib,jac,jc->ij", powers, query[:, head], powers, key[:, head // 2])
        weights = np.tril(products * ratios[head // 2] ** np.subtract.outer(range(TIME), range(TIME)))
        expected = weights / weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(actual[head], expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("preset", ["softmax", "expressive"])
def test_bidirectional_attention_ignores_order_except_in_positions(preset):
    order = np.random.default_rng(0).permutation(TIME)
    model = {"vocab_size": 32, "layers": 2, "width": WIDTH, "heads": 4, "dtype": "float32"}
    for position in ("none", "rope"):
        attention = config.preset(preset, position=position, causal=False)
        layer = layers.make_attention(config.ModelConfig(**model, attention=attention), rngs=nnx.Rngs(0))
        difference = np.abs(run(layer, X[:, order]) - np.asarray(run(layer, X))[:, order]).max()
        assert difference < 1e-5 if position == "none" else difference > 1e-3
        with pytest.raises(ValueError, match="attention that is not causal has no state"):
            layer.extend(X, layer.init_state(2, max_length=TIME))


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
    turns = 100.0 ** (-np.arange(0, 8, 2) / 8) * 32 / (2 * np.pi)
    kept = np.clip((turns - 1) / 3, 0, 1)
    expected = turns * 2 * np.pi / 32 * (kept + (1 - kept) / 4)
    np.testing.assert_allclose(make("learned, of Llama").positions.theta, expected, rtol=1e-14)
    papers = make("rates of pairs").positions.theta
    np.testing.assert_allclose(papers, 2 * np.pi * 65_536.0 ** (-np.arange(0, 8, 2) / 8), rtol=1e-14)
