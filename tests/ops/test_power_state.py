"""Tests of states: splits, steps, ragged rows, gradients, and the accuracy of a long state."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from tests.ops import cases

CASE = cases.Case(power=2, head_dim=8, value_dim=5, time=149, decay="mixed", segments="padded", group=2)


def part(drawn, begin, end):
    names = ("query", "key", "value", "log_decay", "segment_ids")
    return {name: None if drawn[name] is None else jnp.asarray(drawn[name])[:, begin:end] for name in names}


def single(drawn):
    return {
        name: x if x is None or x.dtype == np.int32 else x.astype(np.float32) for name, x in drawn.items()
    }


def whole(drawn, power):
    return attend(**part(drawn, 0, None), power=power, implementation="reference")


OPTIONS = ("power", "form", "exact_window", "chunk_size", "implementation", "return_state")
attend = jax.jit(ops.power_attention, static_argnames=OPTIONS)
step = jax.jit(ops.power_attention_step, static_argnames="power")


def run(drawn, cuts, **options):
    """Returns the concatenated outputs of consecutive calls, and the last state."""
    state, outputs = None, []
    for begin, end in zip((0, *cuts), (*cuts, None)):
        out, state = attend(**part(drawn, begin, end), **options, initial_state=state, return_state=True)
        outputs.append(out)
    return jnp.concatenate(outputs, 1), state


def by_steps(drawn, power, exact_window, *, begin=0, end=None, state=None):
    arguments = part(drawn, begin, end)
    batch, _, kv_heads, head_dim = arguments["key"].shape
    sizes = (batch, kv_heads, head_dim, arguments["value"].shape[-1])
    if state is None:
        state = ops.PowerState.zeros(
            *sizes, power=power, exact_window=exact_window, dtype=arguments["key"].dtype
        )

    def step(state, token):
        out, state = ops.power_attention_step(state=state, power=power, **token)
        return state, out

    tokens = {name: jnp.moveaxis(x, 1, 0) for name, x in arguments.items() if x is not None}
    state, out = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(out, 0, 1), state


@pytest.mark.parametrize("form", ["attention", "chunked", "recurrent"])
@pytest.mark.parametrize("exact_window", [0, 6])
def test_any_split_equals_one_call(form, exact_window):
    drawn = cases.arrays(CASE)
    # Splits after one token, and at a document's end in one row, in the middle of a document in the other. The two
    # long pieces have one length, so that they are one program.
    cuts = (1, 75)
    drawn["segment_ids"][0, 60:75], drawn["segment_ids"][0, 75:90] = 3, 4
    drawn["segment_ids"][1, 60:90] = 5
    with jax.enable_x64(True):
        expected = whole(drawn, 2)
        actual, _ = run(
            drawn,
            cuts,
            power=2,
            form=form,
            exact_window=exact_window,
            chunk_size=None if form == "recurrent" else 16,
        )
        np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_forms_accept_states_of_each_other(implementation):
    drawn = cases.arrays(CASE)
    forms = (
        ("attention", "recurrent") if implementation == "reference" else ("recurrent", "chunked", "attention")
    )
    with jax.enable_x64(True):
        expected = whole(drawn, 2)
        state, outputs = None, []
        for begin, form in zip((0, 50, 100), forms):
            end = None if form == forms[-1] else begin + 50
            out, state = attend(
                **part(drawn, begin, end),
                form=form,
                implementation=implementation,
                initial_state=state,
                return_state=True,
            )
            outputs.append(out)
        np.testing.assert_allclose(jnp.concatenate(outputs, 1), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("power", "exact_window"), [(2, 0), (2, 3), (2, 64), (4, 6)])
def test_steps_equal_one_call(power, exact_window):
    drawn = cases.arrays(CASE)
    with jax.enable_x64(True):
        actual, state = by_steps(drawn, power, exact_window)
        np.testing.assert_allclose(actual, whole(drawn, power), rtol=1e-8, atol=1e-9)
        assert state.length.max() <= max(2 * exact_window - 1, 0)


def test_steps_in_float32_are_as_exact_as_the_other_forms():
    drawn = cases.arrays(CASE)
    with jax.enable_x64(True):
        expected = np.asarray(whole(drawn, 2))
    actual, state = by_steps(single(drawn), 2, 64)
    assert actual.dtype == state.kv.dtype == jnp.float32
    assert cases.error(actual, expected) <= 2e-6


@pytest.mark.parametrize("form", ["attention", "chunked", "recurrent"])
def test_padding_passes_the_state_through(form):
    """A call with only padding returns zeros and the unchanged state."""
    drawn = single(cases.arrays(CASE))
    first = part(drawn, 0, 20)
    _, before = attend(**first, power=2, form=form, exact_window=6, initial_state=None, return_state=True)
    padding = part(drawn, 0, 20) | {"segment_ids": jnp.full_like(drawn["segment_ids"][:, :20], -1)}
    out, after = attend(
        **padding, power=2, form=form, exact_window=6, initial_state=before, return_state=True
    )
    assert not np.asarray(out).any()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), after, before)


def test_float32_after_float64_in_one_process():
    """Tables made while float64 is enabled must serve programs compiled without it."""
    drawn = cases.arrays(CASE)
    with jax.enable_x64(True):
        expected, _ = run(drawn, (20,), power=2, form="chunked", exact_window=6)
    actual, _ = run(single(drawn), (20,), power=2, form="chunked", exact_window=6)
    assert cases.error(actual, expected) <= 2e-6


GRADIENT_NAMES = ("query", "key", "value", "log_decay")


def first_state(arguments, drawn):
    """Returns the state after 40 tokens by the reference: its floats, which have gradients, and the other arrays."""
    _, state = ops.power_attention(
        **part(drawn | arguments, 0, 40), exact_window=6, implementation="reference", return_state=True
    )
    integers = {"length": state.length, "segment": state.segment}
    return {name: x for name, x in vars(state).items() if name not in integers}, integers


@jax.jit
def first_state_vjp(arguments, drawn, cotangent):
    return jax.vjp(lambda arguments: first_state(arguments, drawn)[0], arguments)[1](cotangent)[0]


@functools.partial(jax.jit, static_argnames=("form", "implementation"))
def gradients_from_a_state(arguments, floats, integers, drawn, *, form, implementation):
    """Returns gradients of a call from one state to the next, which the reference reads."""

    def loss(arguments, floats):
        inputs, state = drawn | arguments, ops.PowerState(**floats, **integers)
        if form == "step":
            out, state = by_steps(inputs, 2, 6, begin=40, end=60, state=state)
        else:
            out, state = ops.power_attention(
                **part(inputs, 40, 60),
                exact_window=6,
                form=form,
                implementation=implementation,
                initial_state=state,
                return_state=True,
            )
        # Compare results for later queries, so that the split between window and features is free.
        after = ops.power_attention(
            **part(inputs, 60, 80), exact_window=6, implementation="reference", initial_state=state
        )
        return (out * drawn["dout"][:, 40:60]).sum() + (after * drawn["dout"][:, 60:80]).sum()

    return jax.grad(loss, (0, 1))(arguments, floats)


def gradients_through_a_state(drawn, **options):
    """Returns gradients of all arguments; those of the first tokens come through the state that they make."""
    arguments = {name: drawn[name] for name in GRADIENT_NAMES}
    floats, integers = jax.jit(first_state)(arguments, drawn)
    direct, cotangent = gradients_from_a_state(arguments, floats, integers, drawn, **options)
    return jax.tree.map(jnp.add, direct, first_state_vjp(arguments, drawn, cotangent))


def drawn_for_gradients():
    """Draws strong gates in the first row; in the second, decays after which a state keeps all of its tokens."""
    strong, gentle = cases.arrays(CASE), cases.arrays(dataclasses.replace(CASE, decay="gentle"))
    strong["log_decay"][1] = gentle["log_decay"][1]
    strong["segment_ids"][1] = 0
    return jax.tree.map(jnp.asarray, strong)


@functools.cache
def reference_gradients_through_a_state():
    with jax.enable_x64(True):
        drawn = drawn_for_gradients()
        return gradients_through_a_state(drawn, form="attention", implementation="reference")


@pytest.mark.parametrize("form", ["attention", "chunked", "step"])
def test_gradients_through_a_state(form):
    """Compares gradients of the input state, and through the returned state, with the reference."""
    expected = reference_gradients_through_a_state()
    with jax.enable_x64(True):
        drawn = drawn_for_gradients()
        actual = gradients_through_a_state(drawn, form=form, implementation="xla")
    for name in GRADIENT_NAMES:
        assert cases.error(actual[name], expected[name], cases.natural_size(name, drawn)) <= 1e-10, name


def test_long_ungated_state_is_exact_to_1e_5():
    """Compares with sums in float64 after 65,536 tokens in float32."""
    random = np.random.default_rng(0)
    key, value = random.normal(size=(2, 65_536, 16)).astype(np.float32)
    shaped = [jnp.asarray(x)[None, :, None] for x in (key, key, value)]
    call = jax.jit(functools.partial(ops.power_attention, form="chunked", return_state=True))
    _, state = call(*shaped)
    old = slice(0, 65_536 - int(state.length[0]))
    count = 0
    expected = np.zeros(state.kv.shape[2:]), np.zeros(state.norm.shape[2:])
    with jax.enable_x64(True):
        for begin in range(0, old.stop, 4096):
            rows = slice(begin, min(begin + 4096, old.stop))
            phi = np.asarray(ops.symmetric_power(jnp.asarray(key[rows], jnp.float64), 2))
            expected = expected[0] + phi.T @ value[rows], expected[1] + phi.sum(0)
            count += len(phi)
    assert count == old.stop
    assert cases.error(state.kv[0, 0], expected[0]) <= 1e-5
    assert cases.error(state.norm[0, 0], expected[1]) <= 1e-5


def test_state_larger_than_memory_names_the_bytes():
    with pytest.raises(ValueError, match=r"the state takes [\d,]+ bytes .* the device has [\d,]+"):
        ops.PowerState.zeros(64, 12, 64, 64, power=6)


def test_a_state_in_bfloat16_is_that_in_float32_rounded_after_each_call():
    """Keys and values are bfloat16 numbers, which the window holds exactly. The state is updated every 4 tokens."""
    drawn = single(cases.arrays(CASE))
    for name in ("key", "value"):
        drawn[name] = np.asarray(drawn[name].astype(jnp.bfloat16), np.float32)
    state = ops.PowerState.zeros(2, 1, 8, 5, power=2, exact_window=4, dtype="bfloat16")
    options = {"power": 2, "exact_window": 4}
    for begin, end in itertools.pairwise([0, 40, *range(60, 73), 149]):
        split = part(drawn, begin, end)
        if end - begin == 1:
            call = functools.partial(step, **{name: x[:, 0] for name, x in split.items()}, power=2)
            (actual, new), (expected, exact) = call(state=state), call(state=state.astype("float32"))
        else:
            call = functools.partial(attend, **split, **options, return_state=True)
            (actual, new), (expected, exact) = (
                call(initial_state=x) for x in (state, state.astype("float32"))
            )
        assert actual.dtype == jnp.float32
        assert cases.error(actual, expected) < 2e-6
        assert {
            name: getattr(new, name).dtype.name for name in ("kv", "norm", "keys", "values", "log_decays")
        } == {
            "kv": "bfloat16",
            "norm": "float32",
            "keys": "bfloat16",
            "values": "bfloat16",
            "log_decays": "float32",
        }
        # Half a unit in the last place, and what float32 rounds before.
        for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(exact)):
            np.testing.assert_allclose(
                np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=2**-7.99, atol=1e-6
            )
        state = new
    assert cases.error(state.kv, exact.kv) > 1e-4


def test_gradients_through_a_state_in_bfloat16():
    drawn = single(cases.arrays(CASE))
    state = ops.PowerState.zeros(2, 1, 8, 5, power=2, exact_window=4, dtype="bfloat16")
    first, token = part(drawn, 0, 40), {name: x[:, 0] for name, x in part(drawn, 40, 41).items()}

    def loss(key, state):
        _, state = ops.power_attention(
            **first | {"key": key}, power=2, exact_window=4, initial_state=state, return_state=True
        )
        out, _ = ops.power_attention_step(**token, state=state, power=2)
        return (out**2).sum()

    actual, expected = (jax.grad(loss)(first["key"], x) for x in (state, state.astype("float32")))
    assert cases.error(actual, expected) < 2e-2
