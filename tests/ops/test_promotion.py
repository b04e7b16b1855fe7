"""Tests that ops compute where a program has forbidden JAX's implicit promotion of ranks and dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from sympow_jax.ops import documents, lrpe, rotary, spe

TIME = 9
IDS = np.array([[0, 0, 1, 1, 1, 2, -1, 2, 2]] * 2, np.int32)
POSITIONS = np.arange(TIME)[None].repeat(2, 0)


def power(form, **options):
    def call(query, key, value, log_decay):
        options_ = {"form": form, "exact_window": 2, "segment_ids": IDS, "return_state": True} | options
        out, state = ops.power_attention(query, key, value, log_decay=log_decay, **options_)
        token = {"log_decay": log_decay[:, 0], "segment_ids": IDS[:, 0]}
        return out, ops.power_attention_step(query[:, 0], key[:, 0], value[:, 0], state, **token)

    return call


def channels(query, key, value, log_decay):
    return ops.power_attention(
        query, key, value, log_decay=-(value.astype(jnp.float32) ** 2), segment_ids=IDS, exact_window=2
    )


def linear(query, key, value, log_decay):
    ids = {"segment_ids": IDS}
    causal = ops.linear_attention(query, key, value, log_decay=log_decay, feature_map="symmetric", **ids)
    return causal, ops.linear_attention(query, key, value, causal=False, **ids)


def pairwise(op, **options):
    def call(query, key, value, log_decay):
        causal = op(query, key, value, log_decay=log_decay, segment_ids=IDS, **options)
        return causal, op(query, key, value, causal=False, **options)

    return call


def cached(query, key, value, log_decay):
    cache = ops.KVCache.zeros(2, 5, 2, 4, 4, dtype=query.dtype)
    cache, _ = cache.append(key[:, :3], value[:, :3], log_decay[:, :3], IDS[:, :3])
    token = query[:, 3], key[:, 3], value[:, 3], log_decay[:, 3], IDS[:, 3]
    out, cache, _ = cache.without_gaps().newest(5).step(*token, weigh=lambda z, g: jnp.square(z) * jnp.exp(g))
    return out, cache.tokens()


def encoded(query, key, value, log_decay):
    angles, _ = rotary.learned_angles(jnp.tanh(log_decay) + 1, 4, segment_ids=IDS)
    rates = jnp.tanh(log_decay[0, :2]).T
    sines = jnp.ones((2, 4, 2))
    options = {"frequencies": sines, "phases": sines, "gains": sines, "noise": jnp.ones((2, 4, 4, 5))}
    return (
        rotary.rotate(query, angles),
        rotary.rope(query, POSITIONS, layout="halves"),
        rotary.sinusoidal(POSITIONS, 4),
        documents.positions(jnp.asarray(IDS), documents.PositionState.zeros(2)),
        lrpe.encode(query, POSITIONS, core="orthogonal", basis="householder", rates=rates),
        lrpe.encode(query, POSITIONS, core="permutation", basis="fourier"),
        spe.encode(query, key, POSITIONS, **options),
        ops.symmetric_power(query, 4),
        ops.elu_plus_one(query),
    )


CASES = {
    "attention": power("attention"),
    "chunked": power("chunked", chunk_size=4),
    "recurrent": power("recurrent"),
    "reference": power("recurrent", implementation="reference"),
    "channels": channels,
    "linear": linear,
    "softmax": pairwise(ops.softmax_attention, block_size=4),
    "expressive": pairwise(ops.expressive_attention, block_size=4),
    "expressive_reference": pairwise(ops.expressive_attention, implementation="reference"),
    "cached": cached,
    "encoded": encoded,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_ops_and_gradients_need_no_implicit_promotion(name, dtype):
    query, key = jnp.ones((2, TIME, 4, 4), dtype), jnp.ones((2, TIME, 2, 4), dtype)
    arrays = query, key, key, -jnp.ones((2, TIME, 2))

    def loss(*arrays):
        leaves = jax.tree.leaves(CASES[name](*arrays))
        return sum(x.astype(jnp.float32).sum() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))

    gradient = jax.grad(loss, argnums=(0, 1, 2, 3))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        # Once with rules of derivatives traced after the op itself, and once within it.
        jax.eval_shape(gradient, *arrays)
        jax.eval_shape(jax.grad(jax.jit(loss), argnums=(0, 1, 2, 3)), *arrays)
