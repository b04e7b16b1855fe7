"""Tests that mistakes in the arguments of a model give one clear line."""

import re

import jax.numpy as jnp
import pytest
from flax import nnx

from sympow_jax import config, layers, models

SIZES = {"layers": 1, "width": 16, "heads": 2, "dtype": "float32"}


@pytest.fixture(scope="module")
def model():
    return models.DecoderLM(config.ModelConfig(vocab_size=8, **SIZES), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            jnp.zeros(5, jnp.int32),
            "tokens has shape (5,); it must be [B, T]; add the batch axis to one row with tokens[None]",
        ),
        (jnp.zeros((1, 5, 16), jnp.int32), "tokens has shape (1, 5, 16); it must be [B, T]"),
        (jnp.zeros((1, 5)), "tokens has dtype float32; it must be an integer dtype; pass token ids"),
    ],
)
def test_tokens(model, tokens, message):
    encoder = models.Encoder(
        config.ModelConfig(vocab_size=8, attention=config.preset("softmax", causal=False), **SIZES),
        config.TaskConfig(name="masked_token"),
        rngs=nnx.Rngs(0),
    )
    for call in (model, model.hidden, encoder.hidden):
        with pytest.raises(ValueError, match=re.escape(message)) as raised:
            call(tokens)
        assert "\n" not in str(raised.value)


def test_segment_ids(model):
    tokens = jnp.zeros((1, 5), jnp.int32)
    with pytest.raises(ValueError, match=r"segment_ids has shape \(5,\); it must be \(1, 5\)"):
        model(tokens, segment_ids=tokens[0])


def test_a_layer_takes_rows():
    layer = layers.PowerAttention(16, 2, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"x has shape \(5, 16\); it must be \[B, T, M\]; add the batch axis"
    ):
        layer(jnp.ones((5, 16)))
