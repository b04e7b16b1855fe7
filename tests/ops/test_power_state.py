"""Tests of states: calls and steps from state to state, their gradients, and the accuracy of a long state."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import ops
from tests import marked
from tests.ops import cases
from tests.ops import test_power_attention as suite

CASE = cases.Case(head_dim=8, value_dim=5, time=120, segments="padded", group=2)
INTEGERS = ("length", "segment")


@functools.cache
def arrays(decay="mixed", power=2):
    """Draws strong gates in the first row; in the second, decays after which a state keeps all of its tokens."""
    case = dataclasses.replace(CASE, decay=decay, power=power)
    drawn = cases.arrays(case, kv_heads=2)
    gentle = cases.arrays(dataclasses.replace(case, decay=decay.replace("mixed", "gentle")), kv_heads=2)
    drawn["log_decay"][1] = np.maximum(gentle["log_decay"][1], -0.3)
    # A document ends with a piece in the first row, and goes on over all pieces in the second.
    drawn["segment_ids"][0, 30:40], drawn["segment_ids"][0, 40:50] = 3, 4
    drawn["segment_ids"][1] = 0
    return drawn, suite.expected_for(drawn, case)


def zeros(decay="mixed", power=2, exact_window=6, dtype=jnp.float64):
    return ops.PowerState.zeros(
        2, 2, 8, 5, power=power, exact_window=exact_window, per_channel=decay == "channels", dtype=dtype
    )


def part(drawn, begin, end):
    return {name: x[:, begin:end] for name, x in drawn.items() if name != "dout"}


def by_steps(tokens, state, power=2):
    def step(state, token):
        out, state = ops.power_attention_step(**token, state=state, power=power)
        return state, out

    state, out = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
    return jnp.moveaxis(out, 0, 1), state


def floats_of(state):
    return {name: x for name, x in vars(state).items() if name not in INTEGERS}


@functools.partial(jax.jit, static_argnames="form")
def piece(tokens, state, cotangents, *, form):
    """Returns the output and the state after some tokens, and gradients with respect to tokens and state."""
    fixed = {name: getattr(state, name) for name in INTEGERS}
    implementation, form = ("reference", form[10:]) if form.startswith("reference") else ("xla", form)

    def call(varied, floats):
        state, inputs = ops.PowerState(**floats, **fixed), tokens | varied
        if form == "step":
            out, state = by_steps(inputs, state)
        else:
            out, state = ops.power_attention(
                **inputs,
                form=form,
                implementation=implementation,
                chunk_size=16 if implementation == "xla" and form != "recurrent" else None,
                exact_window=state.exact_window,
                initial_state=state,
                return_state=True,
            )
        return (out, floats_of(state)), state

    varied = {name: tokens[name] for name in cases.GRADIENTS}
    (out, _), pull, state = jax.vjp(call, varied, floats_of(state), has_aux=True)
    return out, state, pull(cotangents)


def nothing(state):
    out = jnp.zeros((2, 20, 4, 5), state.norm.dtype)
    return out, jax.tree.map(jnp.zeros_like, floats_of(state))


def pieces(drawn, state, forms):
    parts = [part(drawn, 20 * i, 20 * i + 20) for i in range(len(forms))]
    douts = [drawn["dout"][:, 20 * i : 20 * i + 20] for i in range(len(forms))]
    states, outputs, gradients = [state], [], []
    for tokens, form in zip(parts, forms):
        out, state, _ = piece(tokens, states[-1], nothing(state), form=form)
        states.append(state)
        outputs.append(out)
    _, cotangent = nothing(state)
    for tokens, state, dout, form in reversed(list(zip(parts, states, douts, forms))):
        _, _, (gradient, cotangent) = piece(tokens, state, (dout, cotangent), form=form)
        gradients.insert(0, gradient)
    joined = {name: jnp.concatenate([g[name] for g in gradients], 1) for name in cases.GRADIENTS}
    return jax.device_get({"out": jnp.concatenate(outputs, 1)} | joined), states


@marked.cases(
    ("decay", "exact_window", "forms"),
    [
        ("mixed", 6, ("chunked", "attention", "step") * 2),
        ("mixed", 0, ("chunked",) * 6),
        ("channels", 6, ("chunked", "step") * 3),
    ],
    slow=[
        ("mixed", 6, ("chunked", "recurrent", "attention") * 2),
        ("mixed", 6, ("chunked", "reference attention", "step") * 2),
        ("mixed", 0, ("step", "recurrent", "attention") * 2),
        ("mixed", 64, ("step", "chunked", "recurrent") * 2),
        ("channels", 6, ("chunked", "reference attention", "step") * 2),
        ("channels", 0, ("step", "chunked", "step") * 2),
        ("channels", 64, ("step", "chunked", "step") * 2),
    ],
)
def test_any_split_equals_one_call(decay, exact_window, forms):
    """Checks values, gradients through states, and that padding passes a state through."""
    drawn, expected = arrays(decay)
    with jax.enable_x64(True):
        actual, states = pieces(cases.cast(drawn, "float64"), zeros(decay, exact_window=exact_window), forms)
    cases.check(actual, expected, drawn, "float64")
    padding = part(drawn, 0, 20) | {"segment_ids": np.full((2, 20), -1, np.int32)}
    with jax.enable_x64(True):
        for form in {*forms}:
            out, after, _ = piece(padding, states[1], nothing(states[1]), form=form)
            assert not np.asarray(out).any()
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-13), after, states[1])


def test_a_split_in_float32_and_from_a_state_in_bfloat16():
    """Runs after the same program in float64: tables made for that must serve this."""
    drawn, expected = arrays()
    single = cases.cast(drawn, "float32")
    actual, _ = pieces(single, zeros(dtype=jnp.float32), ("chunked",) * 6)
    cases.check(actual, expected, drawn, "float32")
    short, _ = pieces(single, zeros(dtype=jnp.bfloat16), ("chunked",) * 6)
    for name, error in cases.errors(short, expected, drawn).items():
        assert error <= 2e-2, (name, error)


steps = jax.jit(by_steps, static_argnames="power")


@marked.cases(
    ("power", "exact_window", "decay", "dtype"),
    [
        (2, 0, "mixed", "float64"),
        (4, 6, "mixed", "float64"),
        *((2, 64, x, "float32") for x in ("mixed", "channels")),
    ],
    slow=[(2, 3, "mixed", "float64"), (2, 64, "mixed", "float64"), (6, 6, "mixed", "float64")],
)
def test_steps_equal_one_call(power, exact_window, decay, dtype):
    drawn, expected = arrays(decay, power)
    with jax.enable_x64(dtype == "float64"):
        state = zeros(decay, power, exact_window, dtype=dtype)
        actual, state = steps(part(cases.cast(drawn, dtype), 0, None), state, power=power)
    assert actual.dtype == state.kv.dtype == state.norm.dtype == dtype
    assert cases.error(actual, expected["out"]) <= (2e-6 if dtype == "float32" else 1e-9)
    assert state.length.max() <= max(2 * exact_window - 1, 0)


def test_long_ungated_state_is_exact_to_1e_5():
    random = np.random.default_rng(0)
    key, value = random.normal(size=(2, 65_536, 16)).astype(np.float32)
    shaped = [jnp.asarray(x)[None, :, None] for x in (key, key, value)]
    call = jax.jit(functools.partial(ops.power_attention, form="chunked", return_state=True))
    _, state = call(*shaped)
    old = 65_536 - int(state.length[0])
    expected = np.zeros(state.kv.shape[2:]), np.zeros(state.norm.shape[2:])
    with jax.enable_x64(True):
        for rows in (slice(begin, min(begin + 4096, old)) for begin in range(0, old, 4096)):
            phi = np.asarray(ops.symmetric_power(jnp.asarray(key[rows], jnp.float64), 2))
            expected = expected[0] + phi.T @ value[rows], expected[1] + phi.sum(0)
    assert cases.error(state.kv[0, 0], expected[0]) <= 1e-5
    assert cases.error(state.norm[0, 0], expected[1]) <= 1e-5


step = jax.jit(ops.power_attention_step)


def test_a_state_in_bfloat16_is_that_in_float32_rounded_after_each_call():
    """Keys and values are bfloat16 numbers, which the window holds exactly. The state is updated every 6 tokens."""
    drawn = cases.cast(arrays()[0], "float32")
    for name in ("key", "value"):
        drawn[name] = drawn[name].astype(jnp.bfloat16).astype(jnp.float32)
    state = zeros(dtype=jnp.bfloat16)
    for begin, end in itertools.pairwise([0, 20, 40, *range(60, 81), 100, 120]):
        split, states = part(drawn, begin, end), (state, state.astype("float32"))
        if end - begin == 1:
            token = {name: x[:, 0] for name, x in split.items()}
            (actual, new), (expected, exact) = (step(**token, state=x) for x in states)
        else:
            (actual, new, _), (expected, exact, _) = (
                piece(split, x, nothing(x), form="chunked") for x in states
            )
        assert actual.dtype == jnp.float32
        assert cases.error(actual, expected) < 2e-6
        assert {name for name, x in floats_of(new).items() if x.dtype == jnp.bfloat16} == {
            "kv",
            "keys",
            "values",
        }
        assert new.norm.dtype == new.log_decays.dtype == jnp.float32
        # Half a unit in the last place, and what float32 rounds before.
        for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(exact)):
            np.testing.assert_allclose(
                np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=2**-7.99, atol=1e-6
            )
        state = new
    assert cases.error(state.kv, exact.kv) > 1e-4


def test_a_step_keeps_the_last_tokens_exactly():
    """The window grows to 2W tokens, of which the oldest W then enter the state: never fewer than W are exact."""
    query, key, value = jnp.ones((3, 1, 1, 2))
    state, lengths = ops.PowerState.zeros(1, 1, 2, 2, power=2, exact_window=3), []
    step = jax.jit(ops.power_attention_step)
    for _ in range(10):
        _, state = step(query, key, value, state)
        lengths.append(int(state.length[0]))
    assert lengths == [1, 2, 3, 4, 5, 3, 4, 5, 3, 4]
