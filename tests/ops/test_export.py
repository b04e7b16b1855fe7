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
    def values_and_gradients(query, key, value, log_decay, segment_ids):
        def loss(query, key, value, log_decay):
            given = {"log_decay": log_decay} if name != "linear" else {}
            return OPS[name](query, key, value, segment_ids=segment_ids, **given).sum()

        return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(query, key, value, log_decay)

    array, decay = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 40, 2, 4), (1, 40, 2)))
    ids = jax.ShapeDtypeStruct((1, 40), jnp.int32)
    export = jax.export.export(jax.jit(values_and_gradients), platforms=("cpu", "cuda", "tpu"))
    assert len(export(array, array, array, decay, ids).out_avals) == 5
