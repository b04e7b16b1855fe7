"""Tests that the ops and their gradients can be exported, which allows only stable operations of XLA."""

import functools

import jax
import jax.numpy as jnp
import pytest

from sympow_jax import ops

OPS = {
    "power": functools.partial(ops.power_attention, form="chunked"),
    "linear": functools.partial(ops.linear_attention, form="chunked"),
    "softmax": ops.softmax_attention,
    "expressive": ops.expressive_attention,
}


@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients_can_be_exported(name):
    def values_and_gradients(query, key, value):
        return jax.value_and_grad(lambda *arrays: OPS[name](*arrays).sum(), argnums=(0, 1, 2))(
            query, key, value
        )

    shape = jax.ShapeDtypeStruct((1, 40, 2, 4), jnp.float32)
    platforms = "cpu", "cuda", "tpu"
    exported = jax.export.export(jax.jit(values_and_gradients), platforms=platforms)(shape, shape, shape)
    assert exported.platforms == platforms
    assert [leaf.shape for leaf in exported.out_avals] == [(), *(3 * [shape.shape])]
