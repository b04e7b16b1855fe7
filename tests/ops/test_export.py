"""Tests that the ops and their gradients can be exported, which allows only stable operations of XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from sympow_jax.ops import documents, rotary

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


CAUSAL = {
    "none": ops.power_attention,
    **{
        f"{op.__name__}_{form}": functools.partial(op, form=form)
        for op in (ops.power_attention, ops.linear_attention)
        for form in ("attention", "chunked", "recurrent")
    },
    "softmax": ops.softmax_attention,
    "expressive": ops.expressive_attention,
}


@pytest.mark.parametrize("name", CAUSAL)
def test_the_batch_may_be_symbolic_and_the_length_may_not(name):
    def shapes(sizes):
        batch, time = jax.export.symbolic_shape(sizes)
        tokens = [jax.ShapeDtypeStruct((batch, time, 2, 4), jnp.float32)] * 3
        return *tokens, jax.ShapeDtypeStruct((batch, time), jnp.int32)

    def call(query, key, value, segment_ids):
        return CAUSAL[name](query, key, value, segment_ids=segment_ids)

    exported = jax.export.export(jax.jit(call))(*shapes("b, 5"))
    arrays = jax.random.normal(jax.random.key(0), (3, 3, 5, 2, 4))
    ids = jnp.zeros((3, 5), jnp.int32)
    np.testing.assert_allclose(exported.call(*arrays, ids), call(*arrays, ids), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="only the batch may be symbolic"):
        jax.export.export(jax.jit(call))(*shapes("2, t"))


STATES = {
    "power": lambda batch: ops.PowerState.zeros(batch, 1, 4, 4, power=2, exact_window=2),
    "linear": lambda batch: ops.LinearState.zeros(batch, 1, 4, 4, exact_window=2),
    "cache": lambda batch: ops.KVCache.zeros(batch, 3, 1, 4, 4),
    "rotary": lambda batch: rotary.RotaryState.zeros(batch, 1),
    "position": documents.PositionState.zeros,
}
STEPS = {
    "power": ops.power_attention_step,
    "linear": ops.linear_attention_step,
    "cache": lambda x, _key, _value, state: state.step(x, x, x, None, None, weigh=lambda z, _: z**2)[:2],
    "rotary": lambda x, _key, _value, state: rotary.learned_angles(x[:, None, :, 0], 4, initial_state=state),
    "position": lambda x, _key, _value, state: documents.positions(jnp.zeros_like(x[:, :1, 0], int), state),
}


@pytest.mark.parametrize("name", STATES)
def test_a_step_with_its_state_can_be_serialized(name):
    pytest.importorskip("flatbuffers")
    (batch,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((batch, 1, 4), jnp.float32)
    state = jax.eval_shape(lambda x: STATES[name](x.shape[0]), x)
    exported = jax.export.export(jax.jit(STEPS[name]))(x, x, x, state)
    restored = jax.export.deserialize(exported.serialize())
    x, state = jnp.ones((3, 1, 4)), STATES[name](3)
    jax.tree.map(np.testing.assert_array_equal, restored.call(x, x, x, state), STEPS[name](x, x, x, state))
