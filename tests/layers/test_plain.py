"""Tests of layers made by plain arguments: equal to those of a config, with mistakes that name the argument."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sympow_jax import config, layers
from tests import mistakes

WIDTH, HEADS, KV_HEADS = 32, 4, 2

PLAIN = {
    layers.PowerAttention: ("conformal", {"power": 4, "exact_window": 8, "decay_bias": 4.0}),
    layers.PowerDeltaAttention: ("power_delta", {"power": 3, "negative_eigenvalues": True}),
    layers.LinearAttention: (
        "linear",
        {"feature_map": "symmetric", "normalizer": "rotated", "decay": "learned", "position": "rope"},
    ),
    layers.SoftmaxAttention: ("sliding_window", {"window": 5}),
    layers.ExpressiveAttention: ("expressive", {"decay": "alibi"}),
}
EACH = pytest.mark.parametrize("kind", PLAIN)


@EACH
def test_it_is_the_layer_of_a_config(kind):
    preset, changes = PLAIN[kind]
    sizes = {"vocab_size": 8, "layers": 2, "width": WIDTH, "heads": HEADS, "kv_heads": KV_HEADS}
    model = config.ModelConfig(**sizes, dtype="float32", attention=config.preset(preset, **changes))
    expected = layers.make_attention(model, rngs=nnx.Rngs(7))
    layer = kind(WIDTH, HEADS, num_kv_heads=KV_HEADS, **changes, rngs=7)
    assert layer.kernel == expected.kernel
    expected.out.kernel[...] *= 2  # a model's is smaller by sqrt(2 * layers)
    found, wanted = (nnx.to_pure_dict(nnx.state(x, nnx.Param)) for x in (layer, expected))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, wanted)


@EACH
def test_dtypes_by_name_and_as_dtypes(kind):
    for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")):
        made = nnx.eval_shape(
            lambda dtype=dtype: kind(WIDTH, HEADS, dtype=dtype, use_bias=True, rngs=nnx.Rngs(0))
        )
        assert made.query.dtype == jnp.bfloat16
    layer = kind(WIDTH, HEADS, dtype="bfloat16", use_bias=True, rngs=nnx.Rngs(0))
    assert layer.query.bias.dtype == layer.out.kernel.dtype == jnp.float32
    out = jax.eval_shape(layer, jax.ShapeDtypeStruct((1, 8, WIDTH), jnp.bfloat16))
    assert out.dtype == jnp.bfloat16


MISTAKES = [
    ("Power", {"num_heads": 5}, "num_heads is 5 and does not divide width 32; change one of them or set"),
    ("Power", {"num_heads": 2.0}, "num_heads is 2.0; it must be an integer of at least 1"),
    ("Power", {"num_kv_heads": 3}, "num_heads is 4 and num_kv_heads is 3; kv_heads must divide heads"),
    ("Power", {"decay": "gated"}, "decay is 'gated'; it must be one of none, alibi"),
    ("Power", {"dtype": "float15"}, "dtype is 'float15'; it must be one of float32, bfloat16"),
    ("Softmax", {"causal": False, "decay": "alibi"}, "decays run in one direction: use 'none'"),
    ("Linear", {"decay": "channel_fixed"}, "which the kernel 'power' has and 'linear' has not"),
]


def test_mistakes():
    with pytest.raises(TypeError, match="SoftmaxAttention has no argument 'power'; its options are decay"):
        layers.SoftmaxAttention(WIDTH, HEADS, power=2, rngs=0)
    for kind, arguments, message in MISTAKES:
        make = getattr(layers, f"{kind}Attention")
        with mistakes.refused(message) as raised:
            make(**{"width": WIDTH, "num_heads": HEADS, "rngs": 0} | arguments)
        assert "model." not in str(raised.value)


def test_a_trainer_of_nnx_without_a_mesh():
    """Names of axes cause no problem: variables, optimizer states and abstract models are those of any layer."""
    layer, x = layers.SoftmaxAttention(WIDTH, HEADS, rngs=0), np.ones((1, 5, WIDTH), np.float32)
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)
    before = np.array(layer.query.kernel[...])
    value, grads = nnx.jit(nnx.value_and_grad(lambda layer, x: (layer(x) ** 2).mean()))(layer, x)
    optimizer.update(layer, grads)
    assert np.isfinite(value)
    np.testing.assert_allclose(layer.query.kernel[...], before - 0.1 * grads.query.kernel[...], atol=1e-7)
    abstract = nnx.eval_shape(lambda: layers.SoftmaxAttention(WIDTH, HEADS, rngs=0))
    assert nnx.split(abstract)[0] == nnx.split(layers.SoftmaxAttention(WIDTH, HEADS, rngs=0))[0]
