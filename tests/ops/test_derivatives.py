"""Tests that derivatives in forward mode and of second order are right, and that those of kernels are errors."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from sympow_jax import ops
from sympow_jax.ops import lrpe, means, phase, rotary, target
from tests import marked
from tests.ops import cases, every_op, test_time_axis

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
    "expressive": attention(ops.expressive_attention, block_size=3),
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
# Each is one program of five derivatives; those of the others take up to 20 s to compile.
OFTEN = ["attention", "expressive", "conformal", "lrpe", "permutation", "phase"]
FORWARD = """
attention chunked channel-gated step bidirectional expressive learned-positions lrpe-permutation
"""


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


def loss_of(call):
    def loss(arrays):
        leaves = jax.tree.leaves(call(*arrays))
        return sum((jnp.sin(1 + jnp.arange(x.size)).reshape(x.shape) * x).sum() for x in leaves)

    return loss


def along(tree, direction):
    return sum(map(jnp.vdot, jax.tree.leaves(tree), jax.tree.leaves(direction)))


@marked.cases("name", FORWARD.split(), slow=sorted(every_op.OPS.keys() - set(FORWARD.split())))
def test_forward_mode_of_every_op(name):
    f, arrays, *_ = every_op.OPS[name]()
    leaves, tree = jax.tree.flatten(arrays)
    floats = [i for i, x in enumerate(leaves) if every_op.is_float(x)]
    random = np.random.default_rng(0)

    def like(arrays, *batch):
        return [jnp.asarray(random.normal(size=(*batch, *x.shape)), x.dtype) for x in arrays]

    def call(changed):
        merged = leaves.copy()
        for i, x in zip(floats, changed, strict=True):
            merged[i] = x
        return [x for x in jax.tree.leaves(f(**jax.tree.unflatten(tree, merged))) if every_op.is_float(x)]

    def derivatives(values, directions):
        out, pull = jax.vjp(call, values)
        cotangents = like(out)
        push = jax.vmap(lambda direction: jax.jvp(call, (values,), (direction,))[1])
        forward = jax.vmap(along, (0, None))(push(directions), cotangents)
        (gradients,) = pull(cotangents)
        reverse = jax.vmap(along, (0, None))(directions, gradients)
        return forward, reverse, along(gradients, gradients) ** 0.5

    values = [leaves[i] for i in floats]
    if values:
        forward, reverse, size = jax.jit(derivatives)(values, like(values, 2))
        np.testing.assert_allclose(forward, reverse, atol=1e-5 * size)


def accuracy(name):
    """Returns the relative error of derivatives: softmax attention is computed in float32."""
    return 1e-4 if name == "softmax" else 1e-9


@marked.cases("name", OFTEN, slow=[name for name in CASES if name not in OFTEN])
def test_second_derivatives(name):
    """Compares derivatives of the gradient in a direction, by each order of modes, with its central difference.

    The first derivatives are those of both modes.
    """
    names, call = CASES[name]
    loss = loss_of(call)
    gradient = jax.jit(jax.grad(loss))

    @jax.jit
    def derivatives(arrays, direction):
        def slope(arrays):
            return jax.jvp(loss, (arrays,), (direction,))[1]

        reverse_twice = jax.grad(lambda arrays: along(jax.grad(loss)(arrays), direction))(arrays)
        forward_over_reverse = jax.jvp(jax.grad(loss), (arrays,), (direction,))[1]
        forward_twice = jax.jvp(slope, (arrays,), (direction,))[1]
        first = slope(arrays), along(jax.grad(loss)(arrays), direction)
        return first, (reverse_twice, forward_over_reverse, jax.grad(slope)(arrays)), forward_twice

    tolerance, step = (2e-2, 1e-3) if name == "softmax" else (1e-6, 1e-5)
    with jax.enable_x64(True):
        arrays, direction = drawn(names), drawn(names, seed=1)
        first, seconds, forward_twice = derivatives(arrays, direction)
        np.testing.assert_allclose(*first, rtol=accuracy(name))
        above, below = (
            gradient(jax.tree.map(lambda x, d, eps=eps: x + eps * d, arrays, direction))
            for eps in (step, -step)
        )
        np.testing.assert_allclose(along(seconds[0], direction), forward_twice, rtol=10 * accuracy(name))
    expected = jax.tree.map(lambda a, b: np.asarray(a - b) / (2 * step), above, below)
    for second in seconds:
        for a, b in zip(jax.tree.leaves(second), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "chunked", "expressive", "step"])
def test_third_derivatives(name):
    names, call = CASES[name]
    loss = loss_of(call)

    @jax.jit
    def thirds(arrays, direction):
        def forward(f):
            return lambda arrays: jax.jvp(f, (arrays,), (direction,))[1]

        def reverse(f):
            return lambda arrays: along(jax.grad(f)(arrays), direction)

        return forward(forward(forward(loss)))(arrays), reverse(reverse(reverse(loss)))(arrays)

    with jax.enable_x64(True):
        np.testing.assert_allclose(*thirds(drawn(names), drawn(names, seed=1)), rtol=1e-8)


def test_reverse_mode_keeps_residuals_only():
    def kept(f, *arrays):
        return sum(x.nbytes for x in jax.tree.leaves(jax.vjp(f, *arrays)[1]))

    out, denominators = jnp.ones((4, 8)), jnp.ones((4, 1))
    assert kept(lambda *sums: means.mean(*sums, 1), out, denominators) == out.nbytes + denominators.nbytes
    argument = weakref.ref(out)
    _, pull = jax.vjp(lambda *sums: means.mean(*sums, 1), out, denominators)
    del out
    gc.collect()
    assert argument() is None
    del pull
    # An argument that is not differentiated has no tangent of zeros.
    names, call = CASES["attention"]
    query, *others = drawn(names)
    assert kept(lambda query: call(query, *others), query) < 0.8 * kept(call, query, *others)


def test_second_derivatives_are_exported_for_any_batch():
    names, _ = CASES["expressive"]
    (batch,) = jax.export.symbolic_shape("b")
    arrays = [jax.ShapeDtypeStruct((batch, *SHAPES[name][1:]), jnp.float32) for name in names]

    def loss(arrays):
        query, key, value, log_decay = arrays
        return jnp.square(
            ops.expressive_attention(query, key, value, log_decay=log_decay, block_size=3)
        ).sum()

    def second(arrays):
        return sum(jnp.square(x).sum() for x in jax.grad(loss)(arrays))

    jax.export.export(jax.jit(jax.grad(second)))(arrays)


@marked.cases("name", ["gentle chunked"], slow=["linear by heads", "gentle pairs", "expressive", "no window"])
def test_forward_mode_over_devices_is_that_of_one(name):
    draw, formula, op, _ = test_time_axis.CASES[name]
    arrays = jax.tree.map(jnp.asarray, draw())
    ids, _ = arrays.pop("segment_ids"), arrays.pop("dout")
    random = np.random.default_rng(0)
    tangents = {key: jnp.asarray(random.normal(size=x.shape), x.dtype) for key, x in arrays.items()}

    @functools.partial(jax.jit, static_argnums=0)
    def change(call, arrays, tangents):
        return jax.jvp(lambda arrays: call(**arrays, segment_ids=ids), (arrays,), (tangents,))[1]

    actual = change(test_time_axis.sharded(op, 4), arrays, tangents)
    assert cases.error(actual, change(formula, arrays, tangents)) <= 1e-5


@pytest.mark.interpret
@pytest.mark.parametrize("form", ["attention", "chunked"])
def test_other_derivatives_of_kernels_are_an_error(form):
    x = jnp.ones((1, 128, 1, 64), jnp.bfloat16)

    def call(x):
        return ops.power_attention(x, x, x, form=form, implementation="mosaic_gpu")

    with target.interpreted(plgpu.InterpretGPUParams()):
        jax.eval_shape(jax.grad(lambda x: call(x).sum().astype(jnp.float32)), x)
        with pytest.raises(NotImplementedError, match="use implementation='xla'"):
            jax.jit(lambda x: jax.jvp(call, (x,), (x,))).lower(x)
