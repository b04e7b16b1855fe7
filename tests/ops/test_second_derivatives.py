"""Tests that gradients of gradients are right, and that derivatives which do not exist are errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from sympow_jax import ops
from sympow_jax.ops import lrpe, phase, rotary

TIME = 7
SEGMENTS = np.array([[0, 1, 2, 2, 3, -1, 4]], np.int32)
POSITIONS = np.arange(TIME)[None]
SHAPES = {
    "query": (1, TIME, 2, 4),
    "key": (1, TIME, 1, 4),
    "value": (1, TIME, 1, 3),
    "log_decay": (1, TIME, 1),
    "channels": (1, TIME, 1, 3),
    "rate": (1, TIME, 1),
    "rates": (2,),
}
TOKENS = ("query", "key", "value")


def attention(op, *, names=(*TOKENS, "log_decay"), **options):
    def call(query, key, value, *log_decay):
        decays = {"log_decay": log_decay[0]} if log_decay else {}
        return op(query, key, value, segment_ids=SEGMENTS, **decays, **options)

    return names, call


def power(form, **options):
    return attention(ops.power_attention, form=form, exact_window=2, **options)


def with_state(form):
    def call(query, key, value, log_decay):
        first, state = ops.power_attention(
            *(x[:, :5] for x in (query, key, value)),
            log_decay=log_decay[:, :5],
            exact_window=1,
            return_state=True,
        )
        options = {"log_decay": log_decay[:, 5:], "initial_state": state, "return_state": True}
        last, state = ops.power_attention(
            *(x[:, 5:] for x in (query, key, value)), exact_window=1, form=form, **options
        )
        return first, last, state.kv

    return (*TOKENS, "log_decay"), call


def by_steps(query, key, value, log_decay):
    state = ops.PowerState.zeros(1, 1, 4, 3, power=2, exact_window=1, dtype=query.dtype)
    out = []
    for i in range(4):
        token = {"log_decay": log_decay[:, i], "segment_ids": SEGMENTS[:, i]}
        y, state = ops.power_attention_step(query[:, i], key[:, i], value[:, i], state, **token)
        out.append(y)
    return out, state.kv


def conformal(query, rate):
    angles, _ = rotary.learned_angles(rate, 4, theta=np.array([0.5, 0.1]), segment_ids=SEGMENTS)
    return jnp.square(rotary.rotate(query, angles))


CASES = {
    "attention": power("attention", chunk_size=3),
    "chunked": power("chunked", chunk_size=3),
    "recurrent": power("recurrent"),
    "reference": power("attention", implementation="reference"),
    "channels": attention(ops.power_attention, names=(*TOKENS, "channels"), form="chunked", chunk_size=3),
    "attention_state": with_state("attention"),
    "chunked_state": with_state("chunked"),
    "step": ((*TOKENS, "log_decay"), by_steps),
    "linear": attention(ops.linear_attention, form="chunked", chunk_size=3),
    "bidirectional": attention(ops.linear_attention, names=TOKENS, causal=False, chunk_size=3),
    "softmax": attention(ops.softmax_attention, block_size=3),
    "expressive_reference": attention(ops.expressive_attention, implementation="reference"),
    "conformal": (("query", "rate"), conformal),
    "lrpe": (
        ("query", "rates"),
        lambda x, rates: lrpe.encode(x, POSITIONS, core="orthogonal", basis="householder", rates=rates) ** 2,
    ),
    "permutation": (
        ("query",),
        lambda x: lrpe.encode(x, POSITIONS, core="permutation", basis="fourier") ** 2,
    ),
    "phase": (("rates",), lambda rates: jnp.sin(phase.learned(POSITIONS, rates, dtype=jnp.float64))),
}
FORWARD = ("reference", "softmax", "expressive_reference", "lrpe", "phase")


def drawn(names):
    random = np.random.default_rng(0)
    arrays = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    for name in ("log_decay", "channels", "rate"):
        arrays[name] = (-1 if name != "rate" else 1) * random.uniform(0.1, 1.5, SHAPES[name])
    return [jnp.asarray(arrays[name]) for name in names]


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_gradients(name):
    names, call = CASES[name]
    # Softmax attention is computed in float32, which its finite differences show.
    tolerance, eps = (2e-2, 1e-3) if name == "softmax" else (1e-4, None)
    with jax.enable_x64(True):
        modes = ("rev", "fwd") if name in FORWARD else ("rev",)
        options = {"order": 2, "modes": modes, "atol": tolerance, "rtol": tolerance, "eps": eps}
        check_grads(jax.jit(call), drawn(names), **options)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {*FORWARD}))
def test_forward_mode_is_an_error(name):
    names, call = CASES[name]
    with jax.enable_x64(True), pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(call, drawn(names), drawn(names))


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_of_expressive_blocks_are_an_error(outer):
    names, call = attention(ops.expressive_attention)
    gradient = jax.grad(lambda *arrays: call(*arrays).sum())
    with pytest.raises(NotImplementedError, match="use implementation='reference'"):
        outer(gradient)(*(x.astype(jnp.float32) for x in drawn(names)))
