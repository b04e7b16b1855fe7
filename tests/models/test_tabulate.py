"""Tests that `nnx.tabulate` summarizes layers and models: it compiles each public method that a call uses."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx

from sympow_jax import config, layers, models
from tests.models import families

X, TOKENS = jnp.ones((2, 8, 16)), jnp.zeros((2, 8), jnp.int32)


def decoder():
    sizes = {"vocab_size": 32, "layers": 1, "width": 16, "heads": 2, "dtype": "float32"}
    return models.DecoderLM(config.ModelConfig(**sizes, attention=config.preset("gpt2")), rngs=0)


def matcher():
    settings = families.settings("qwen3", layers=2, attention_pattern=("conformal_paper", "shared"))
    return models.AttentionMatcher(dataclasses.replace(settings, dtype="float32"), rngs=0)


@pytest.mark.parametrize(
    ("make", "method", "inputs"),
    [
        (lambda: layers.LinearAttention(16, 2, position="spe", rngs=0), "__call__", X),
        (decoder, "__call__", TOKENS),
        (matcher, "errors", TOKENS),
    ],
)
def test_a_summary(make, method, inputs):
    model = make()
    assert f"{type(model).__name__} Summary" in nnx.tabulate(model, inputs, method=method)
