"""Tests that mistakes in the arguments of a model give one clear line."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, layers, models
from tests import mistakes

SIZES = {"layers": 1, "width": 16, "heads": 2, "dtype": "float32"}


@pytest.fixture(scope="module")
def model():
    return models.DecoderLM(config.ModelConfig(vocab_size=8, **SIZES), rngs=nnx.Rngs(0))


def test_tokens(model):
    encoder = models.Encoder(
        config.ModelConfig(vocab_size=8, attention=config.preset("softmax", causal=False), **SIZES),
        config.TaskConfig(name="masked_token"),
        rngs=nnx.Rngs(0),
    )
    for tokens, message in (
        (np.zeros(5, np.int32), "tokens has shape (5,); it must be [B, T]; add the batch axis to one row"),
        (np.zeros((1, 5, 16), np.int32), "tokens has shape (1, 5, 16); it must be [B, T]"),
        ([[1, 2]], "tokens is a list; it must be an array; pass jnp.asarray(tokens)"),
        (np.array([[1, 8]]), "tokens are from 1 to 8; they must be in the vocabulary of 8"),
        (np.array([[-1, 2]]), "tokens are from -1 to 2"),
        (np.zeros((1, 5), np.float32), "tokens has dtype float32; it must be an integer dtype; pass token"),
    ):
        for call in (model, model.hidden, encoder.hidden):
            with mistakes.refused(message):
                call(tokens)


def test_segment_ids(model):
    tokens = jnp.zeros((1, 5), jnp.int32)
    with pytest.raises(ValueError, match=r"segment_ids has shape \(5,\); it must be \(1, 5\)"):
        model(tokens, segment_ids=tokens[0])

    for call in (model, model.hidden, layers.PowerAttention(8, 2, rngs=0)):
        x = tokens if call is model or call == model.hidden else jnp.ones((1, 5, 8))
        with pytest.raises(ValueError, match="segment_ids is a list; it must be an array"):
            call(x, segment_ids=[[0] * 5])


def test_states(model):
    for length in (-3, 0):
        with pytest.raises(ValueError, match=f"max_length is {length}; it must be at least 1"):
            model.init_state(1, max_length=length)
    with pytest.raises(ValueError, match=r"max_length is 2\.5; it must be an integer of at least 1"):
        model.init_state(1, max_length=2.5)
    softmax = models.DecoderLM(
        config.ModelConfig(vocab_size=8, attention=config.preset("softmax"), **SIZES), rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="kernel 'softmax' does not support; pass kv_cache=True"):
        softmax.init_state(1, max_length=4, kv_cache=False)
    with pytest.raises(ValueError, match="kv_cache is 'yes'"):
        model.init_state(1, max_length=4, kv_cache="yes")
    state = model.init_state(1, max_length=4)
    with pytest.raises(ValueError, match="the state has 0 layers and the model 1; make it"):
        model.extend(jnp.zeros((1, 2), jnp.int32), dataclasses.replace(state, layers=()))


def test_states_of_other_layers():
    power, linear, softmax = (
        functools.partial(getattr(layers, f"{kind}Attention"), rngs=0)
        for kind in ("Power", "Linear", "Softmax")
    )
    own = power(16, 2).init_state(2)
    wrong_norm = dataclasses.replace(own.memory, norm=own.memory.norm[:, :1])
    for kind, state, message in (
        (power, power(16, 2).init_state(3), "has 3 rows and there are tokens for 2"),
        (power, power(16, 4).init_state(2), ".memory.kv is float32 [2, 4, 10, 4], not float32 [2, 2, 36, 8]"),
        (power, linear(16, 2).init_state(2), ".memory.kv is absent"),
        (power, own.memory, "is a PowerState"),
        (power, dataclasses.replace(own, memory=wrong_norm), ".memory.norm is float32 [2, 1, 36], not"),
        (power, jax.tree.map(lambda x: x.astype("bfloat16"), own), ".memory.kv is bfloat16"),
        (linear, power(16, 2, position="rope").init_state(2), ".memory.numerator.kv is absent"),
        (softmax, linear(16, 2).init_state(2), "does not support"),
        (softmax, softmax(16, 4).init_state(2, max_length=4), ".memory.key is float32 [2, 4, 4, 4]"),
        (softmax, (1, 2), "the state is a tuple"),
    ):
        layer = kind(16, 2)
        for time in (5, 1):
            with mistakes.refused(message):
                layer.extend(np.ones((2, time, 16), np.float32), state)


def test_a_layer_requires_rows_of_its_width():
    layer = layers.PowerAttention(16, 2, rngs=nnx.Rngs(0))
    for x, message in (
        (jnp.ones((5, 16)), "x has shape (5, 16); it must be [B, T, M]; add the batch axis to one row with"),
        (jnp.ones((1, 5, 8)), "its last axis must be the layer's width 16; make the layer with width=8"),
        (jnp.ones((1, 5, 16), jnp.int32), "x has dtype int32; it must be one of float16"),
        ([[1.0]], "x is a list; it must be an array"),
        (jnp.ones((1, 0, 16)), "x has shape (1, 0, 16); every size must be at least 1"),
    ):
        for call in (layer, layer.maps):
            with pytest.raises(ValueError, match=re.escape(message)):
                call(x)
