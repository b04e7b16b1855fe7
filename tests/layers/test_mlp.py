"""Tests of feed-forward layers against their formulas in float64."""

import pickle

import jax
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, layers

WIDTH, HIDDEN = 6, 10


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


FORMULAS = {
    "gelu": lambda gate, up: gelu(up),
    "relu": lambda gate, up: np.maximum(up, 0),
    "swiglu": lambda gate, up: gate / (1 + np.exp(-gate)) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
}


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", FORMULAS)
def test_the_formula(activation, biases):
    sizes = {"vocab_size": 8, "layers": 1, "width": WIDTH, "heads": 1, "mlp_width": HIDDEN}
    model = config.ModelConfig(**sizes, activation=activation, biases=biases, dtype="float32")
    layer, generator = layers.make_mlp(model, rngs=0), np.random.default_rng(0)
    nnx.update(layer, jax.tree.map(lambda x: generator.normal(size=x.shape), nnx.state(layer)))
    x = generator.normal(size=(2, 3, WIDTH))

    def project(x, name):
        projection = getattr(layer, name)
        out = x @ np.asarray(projection.kernel[...], np.float64)
        return out + np.asarray(projection.bias[...], np.float64) if biases else out

    gate = project(x, "gate") if isinstance(layer, layers.GatedMLP) else None
    expected = project(FORMULAS[activation](gate, project(x, "up")), "down")
    assert layer.up.kernel.shape == (WIDTH, HIDDEN)
    np.testing.assert_allclose(layer(x.astype(np.float32)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", FORMULAS)
def test_a_layer_can_be_pickled(activation):
    sizes = {"vocab_size": 8, "layers": 1, "width": WIDTH, "heads": 1}
    layer = layers.make_mlp(config.ModelConfig(**sizes, activation=activation), rngs=0)
    definition, state = nnx.split(layer)
    copied = nnx.merge(pickle.loads(pickle.dumps(definition)), state)
    x = np.ones((1, 2, WIDTH), np.float32)
    np.testing.assert_array_equal(copied(x), layer(x))
