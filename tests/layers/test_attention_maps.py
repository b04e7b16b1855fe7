"""Tests that attention maps times values give a layer's output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, layers
from tests import marked

WIDTH, HEADS, TIME = 16, 4, 20
OTHERS = (
    {"kernel": "linear", "decay": "none", "causal": False},
    {"kernel": "linear", "decay": "none", "normalizer": "rotated"},
)


def make(attention, kv_heads=2):
    sizes = {"vocab_size": 8, "layers": 1, "width": WIDTH, "heads": HEADS, "kv_heads": kv_heads}
    settings = config.ModelConfig(**sizes, dtype="float32", attention=attention)
    layer = layers.make_attention(settings, rngs=nnx.Rngs(0))
    for name in ("query", "key", "value", "decay", "rate"):
        if hasattr(layer, name):
            getattr(layer, name).kernel[...] *= 20
    layer.out.kernel[...] = jnp.eye(WIDTH)
    return layer


def inputs():
    # Two documents, with padding before the second.
    segments = jnp.array([[0] * 12 + [-1] * 2 + [1] * (TIME - 14), [0] * TIME])
    return jax.random.normal(jax.random.key(1), (2, TIME, WIDTH)), segments


@nnx.jit
def maps_and_output(layer, x, segment_ids):
    return layer.maps(x, segment_ids=segment_ids), layer(x, segment_ids=segment_ids)


def values_of(layer, x):
    heads = x @ layer.value.kernel[...]
    heads = heads.reshape(*x.shape[:2], layer.kv_heads, layer.head_dim)
    return np.repeat(np.asarray(heads, np.float64), HEADS // layer.kv_heads, axis=2)


def error(actual, expected, segments):
    counts = np.asarray(segments).reshape(*segments.shape, *[1] * (actual.ndim - 2)) >= 0
    return np.linalg.norm((actual - expected) * counts) / np.linalg.norm(expected * counts)


@marked.cases(
    "attention",
    [config.preset("linear_lrpe")],
    slow=[config.preset(name) for name in config.PRESETS if name != "linear_lrpe"]
    + [config.AttentionConfig(**fields, position="rope") for fields in OTHERS],
    ids=config.preset_name,
)
def test_outputs_are_values_by_weights(attention):
    layer = make(attention)
    x, segments = inputs()
    maps, out = maps_and_output(layer, x, segments)
    mixed = np.einsum("bnts,bsne->btne", np.asarray(maps.weights, np.float64), values_of(layer, x))
    assert error(mixed, out.reshape(mixed.shape), segments) < 2e-6
    assert (maps.log_decay is None) == (attention.decay == "none")
    assert (maps.rate is None) == (not attention.position.startswith("learned_rope"))
    assert (layer.positions.theta is None) == (maps.rate is None)


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["channel_fixed", "channel_constant", "channel_learned"])
def test_gates_by_channel_give_the_mean_over_channels(decay):
    layer = make(config.AttentionConfig(decay=decay))
    # Every channel of a head has the same values.
    first = layer.value.kernel[...].reshape(WIDTH, layer.kv_heads, layer.head_dim)[..., :1]
    layer.value.kernel[...] = jnp.broadcast_to(first, (*first.shape[:2], layer.head_dim)).reshape(WIDTH, -1)
    x, segments = inputs()
    maps, out = maps_and_output(layer, x, segments)
    mixed = np.einsum("bnts,bsn->btn", np.asarray(maps.weights, np.float64), values_of(layer, x)[..., 0])
    assert error(mixed, out.reshape(*x.shape[:2], HEADS, -1).mean(-1), segments) < 2e-6
    assert maps.log_decay.shape == (2, TIME, layer.kv_heads, layer.head_dim)
