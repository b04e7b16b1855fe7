"""Tests of norms: the formulas in float64, running means over the batch, and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, layers

WIDTH = 6
SEGMENT_IDS = np.array([[0, 0, 0, 0, -1], [0, 0, -1, -1, -1]], np.int32)


def make(norm, dtype="float32", **changes):
    model = config.ModelConfig(
        vocab_size=8, layers=1, width=WIDTH, heads=1, dtype=dtype, norm=norm, **changes
    )
    module = layers.make_norm(model, jnp.dtype(dtype), rngs=nnx.Rngs(0))
    module.scale[...] = jnp.linspace(0.5, 2, WIDTH)
    if norm != "rms":
        module.bias[...] = jnp.linspace(-1, 1, WIDTH)
    return module


def values(shift=3.0):
    return np.random.default_rng(0).normal(shift, 2.0, (2, 5, WIDTH)).astype(np.float32)


def formula(x, mean, variance):
    return (x - mean) / np.sqrt(variance + 1e-5) * np.linspace(0.5, 2, WIDTH) + np.linspace(-1, 1, WIDTH)


@pytest.mark.parametrize("segment_ids", [None, SEGMENT_IDS])
def test_batch_normalization_is_the_formula_over_tokens_that_are_not_padding(segment_ids):
    norm, x = make("batch"), values()
    norm.train()
    tokens = (x if segment_ids is None else x[segment_ids >= 0]).reshape(-1, WIDTH).astype(np.float64)
    out = layers.normalize(norm, jnp.asarray(x), segment_ids)
    np.testing.assert_allclose(out, formula(x, tokens.mean(0), tokens.var(0)), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(norm.mean[...], 0.1 * tokens.mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.var[...], 0.9 + 0.1 * tokens.var(0), rtol=1e-5)


def test_means_of_a_batch_far_from_zero():
    """The variance is computed from differences from the mean: with squares of 1e4 it would be lost."""
    norm, x = make("batch"), values(shift=1e4)
    norm.train()
    tokens = x.reshape(-1, WIDTH).astype(np.float64)
    layers.normalize(norm, jnp.asarray(x), None)
    np.testing.assert_allclose(norm.var[...], 0.9 + 0.1 * tokens.var(0), rtol=1e-3)


def test_evaluation_uses_running_means_and_leaves_them():
    norm, x = make("batch"), values()
    norm.mean[...], norm.var[...] = jnp.full(WIDTH, 2.0), jnp.full(WIDTH, 9.0)
    out = layers.normalize(norm, jnp.asarray(x), SEGMENT_IDS)
    np.testing.assert_allclose(out, formula(x, 2.0, 9.0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(norm.mean[...], np.full(WIDTH, 2.0))


@pytest.mark.parametrize("norm", ["batch", "rms"])
def test_statistics_are_float32_whatever_the_dtype(norm):
    modules = make(norm), make(norm, "bfloat16")
    x = jnp.asarray(values(shift=100.0))  # bfloat16 keeps no fractional digit of these
    outs = []
    for module in modules:
        module.train()
        outs.append(layers.normalize(module, x, None))
    assert outs[1].dtype == jnp.bfloat16
    np.testing.assert_array_equal(outs[0].astype(jnp.bfloat16), outs[1])
    jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(x)) for x in modules))


@pytest.mark.parametrize(("norm", "epsilon"), [("layer", 1e-5), ("layer", 0.5), ("batch", 0.5)])
def test_epsilon_is_added_to_the_variance(norm, epsilon):
    module, x = make(norm, norm_epsilon=epsilon), values()
    module.train()
    assert bool(nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))) == (norm == "batch")
    axes = -1 if norm == "layer" else (0, 1)
    mean, variance = (f(x.astype(np.float64), axes, keepdims=True) for f in (np.mean, np.var))
    out = layers.normalize(module, jnp.asarray(x), None)
    np.testing.assert_allclose(out, formula(x, mean, variance + epsilon - 1e-5), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_rms_normalization_has_a_scale_alone(epsilon):
    norm, x = make("rms", norm_epsilon=epsilon), values()
    assert set(nnx.to_pure_dict(nnx.state(norm))) == {"scale"}
    exact = x.astype(np.float64)
    expected = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + epsilon) * np.linspace(0.5, 2, WIDTH)
    np.testing.assert_allclose(layers.normalize(norm, jnp.asarray(x), SEGMENT_IDS), expected, rtol=1e-6)
