"""Tests that `nnx.tabulate` summarizes every layer and model: it compiles each public method that a call uses."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx

from sympow_jax import config, layers, models
from sympow_jax.config import attention as attention_lib
from tests.models import families

SIZES = {"vocab_size": 32, "layers": 1, "width": 16, "heads": 2, "dtype": "float32"}
X, TOKENS, IMAGES = jnp.ones((2, 8, 16)), jnp.zeros((2, 8), jnp.int32), jnp.ones((2, 8, 8, 3))


def decoder(preset, *, stacked=False, **changes):
    settings = config.ModelConfig(**SIZES | changes, attention=config.preset(preset))
    return models.DecoderLM(settings, rngs=0, stacked=stacked)


def encoder(**changes):
    task = config.TaskConfig(name="classification", classes=3, dual_encoder=changes.pop("dual", False))
    settings = config.ModelConfig(**SIZES | changes, attention=config.lrpe_method("type2", causal=False))
    return models.make(settings, task, rngs=0)


def matcher():
    settings = families.settings("qwen3", layers=2, attention_pattern=("conformal_paper", "shared"))
    return models.AttentionMatcher(dataclasses.replace(settings, dtype="float32"), rngs=0)


def layer(kind, position):
    return lambda: getattr(layers, kind)(16, 2, position=position, rngs=0)


OFTEN = [
    (layer("LinearAttention", "spe"), "__call__", X),
    (lambda: decoder("gpt2"), "__call__", TOKENS),
    (matcher, "errors", TOKENS),
]
RARE = [
    *((layer("PowerAttention", position), "__call__", X) for position in attention_lib.LAYER_POSITIONS),
    (lambda: decoder("linear", stacked=True), "__call__", TOKENS),
    (lambda: encoder(dual=True), "classify", TOKENS),
    (lambda: encoder(patch_size=4, vocab_size=0), "classify", IMAGES),
    (lambda: decoder("conformal_paper", remat="full", stacked=True), "hidden", TOKENS),
    (lambda: decoder("sliding_window", activation="swiglu"), "__call__", TOKENS),
    (lambda: decoder("qwen3", norm="rms"), "__call__", TOKENS),
]


@pytest.mark.parametrize(
    ("make", "method", "inputs"), OFTEN + [pytest.param(*case, marks=pytest.mark.slow) for case in RARE]
)
def test_a_summary(make, method, inputs):
    model = make()
    texts = {"segment_ids": inputs} if isinstance(model, models.DualEncoder) else {}
    assert f"{type(model).__name__} Summary" in nnx.tabulate(model, inputs, method=method, **texts)
