"""Tests that gradients of gradients are right, and that derivatives which do not exist are errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def from_state(form):
    """Returns a call, or two steps, from a state with one token in its window to a state."""

    def call(query, key, value, log_decay, floats):
        state = ops.PowerState(**floats, length=jnp.ones(1, jnp.int32), segment=jnp.zeros(1, jnp.int32))
        if form != "step":
            options = {"exact_window": 1, "form": form, "initial_state": state, "return_state": True}
            out, state = ops.power_attention(query, key, value, log_decay=log_decay, **options)
            return out, state.kv
        out = []
        for i in range(2):
            tokens = (x[:, i] for x in (query, key, value))
            y, state = ops.power_attention_step(*tokens, state, log_decay=log_decay[:, i])
            out.append(y)
        return out, state.kv

    return (*TOKENS, "log_decay", "state"), call


def conformal(query, rate):
    angles, _ = rotary.learned_angles(rate, 4, theta=np.array([0.5, 0.1]), segment_ids=SEGMENTS)
    return jnp.square(rotary.rotate(query, angles))


CASES = {
    "attention": power("attention", chunk_size=3),
    "chunked": power("chunked", chunk_size=3),
    "recurrent": power("recurrent"),
    "reference": power("attention", implementation="reference"),
    "channels": attention(ops.power_attention, names=(*TOKENS, "channels"), form="chunked", chunk_size=3),
    "attention_state": from_state("attention"),
    "chunked_state": from_state("chunked"),
    "step": from_state("step"),
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
# They share most of their code with others.
SLOW = ("attention_state", "chunked", "recurrent", "step", "linear")


def drawn(names, seed=0):
    random = np.random.default_rng(seed)
    arrays = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    for name in ("log_decay", "channels", "rate"):
        arrays[name] = (-1 if name != "rate" else 1) * random.uniform(0.1, 1.5, SHAPES[name])
    # A state of three earlier tokens, and one in the first of two slots of its window.
    old, values = random.normal(size=(3, 4)), random.normal(size=(3, 3))
    phi = np.asarray(ops.symmetric_power(jnp.asarray(old), 2))
    arrays["state"] = {"kv": (phi.T @ values)[None, None], "norm": phi.sum(0)[None, None]}
    window = {"keys": old[:2], "values": values[:2], "log_decays": -np.ones(2)}
    arrays["state"] |= {name: x[None, :, None] for name, x in window.items()}
    return jax.tree.map(jnp.asarray, [arrays[name] for name in names])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
def test_gradients_of_gradients(name):
    """Compares derivatives of the gradient in one direction, in each mode, with its central difference."""
    names, call = CASES[name]

    def loss(arrays):
        leaves = jax.tree.leaves(call(*arrays))
        return sum((jnp.sin(1 + jnp.arange(x.size)).reshape(x.shape) * x).sum() for x in leaves)

    @jax.jit
    def derivatives(arrays, direction):
        def gradient(arrays):
            first = jax.grad(loss)(arrays)
            return sum(map(jnp.vdot, jax.tree.leaves(first), jax.tree.leaves(direction))), first

        second, first = jax.grad(gradient, has_aux=True)(arrays)
        if name in FORWARD:
            return first, second, jax.jvp(jax.grad(loss), (arrays,), (direction,))[1]
        return first, second

    # Softmax attention is computed in float32, which its finite differences show.
    tolerance, step = (2e-2, 1e-3) if name == "softmax" else (1e-6, 1e-5)
    with jax.enable_x64(True):
        arrays, direction = drawn(names), drawn(names, seed=1)
        _, *actual = derivatives(arrays, direction)
        above, below = (
            derivatives(jax.tree.map(lambda x, d, eps=eps: x + eps * d, arrays, direction), direction)[0]
            for eps in (step, -step)
        )
    expected = jax.tree.map(lambda a, b: np.asarray(a - b) / (2 * step), above, below)
    for mode in actual:
        for a, b in zip(jax.tree.leaves(mode), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * abs(b).max())


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
        jax.eval_shape(outer(gradient), *(x.astype(jnp.float32) for x in drawn(names)))
