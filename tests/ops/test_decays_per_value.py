"""Tests of power attention with a decay per channel against its formula in float64, and of its states and steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from tests.ops import cases

STEPS = np.array([0, -1e-4, -0.3, -20, -1e4], np.float32)
CASE = cases.Case(time=129, value_dim=5, segments="padded", group=2)
QUARTIC = cases.Case(time=70, head_dim=8, scale=1e3, power=4, segments="edges")
MORE_CASES = (
    QUARTIC,
    cases.Case(time=63, head_dim=8, scale=1e-3, power=6),
    cases.Case(time=300, value_dim=24, decay="gentle"),
    cases.Case(time=1),
)
STATEFUL = cases.Case(head_dim=8, value_dim=5, time=150, segments="padded", group=2)
SIZES = (2, 2, 8, 5)
OPTIONS = ("implementation", "power", "exact_window", "chunk_size", "return_state")

attend = jax.jit(ops.power_attention, static_argnames=OPTIONS)


def arrays(case, kv_heads=2):
    """Returns the arguments of a case, with decays drawn for every channel."""
    drawn = cases.arrays(case, kv_heads=kv_heads)
    random = np.random.default_rng(1)
    shape = drawn["value"].shape
    steps = random.choice(STEPS, size=shape) if case.decay == "mixed" else -random.exponential(0.01, shape)
    return drawn | {"log_decay": steps.astype(np.float32).astype(np.float64)}


def cast(drawn, dtype):
    return {
        name: x if x is None or name == "segment_ids" else jnp.asarray(x, dtype) for name, x in drawn.items()
    }


@functools.partial(jax.jit, static_argnames=OPTIONS)
def outputs_and_gradients(drawn, **options):
    def loss(arguments):
        out = ops.power_attention(**arguments, segment_ids=drawn["segment_ids"], **options)
        return (out * drawn["dout"]).sum(), out

    gradients, out = jax.grad(loss, has_aux=True)({name: drawn[name] for name in cases.GRADIENTS})
    return {"out": out} | gradients


def errors(actual, expected, drawn):
    return {
        name: cases.error(actual[name], expected[name], cases.natural_size(name, drawn)) for name in expected
    }


@pytest.mark.parametrize(
    "case", [CASE, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)], ids=str
)
def test_values_and_gradients(case):
    drawn = arrays(case)
    short = {"power": case.power, "chunk_size": 24, "exact_window": 16}
    with jax.enable_x64(True):
        double = cast(drawn, "float64")
        expected = outputs_and_gradients(double, implementation="reference", power=case.power)
        expected = jax.device_get(expected)
        exact = errors(outputs_and_gradients(double, **short), expected, drawn)
    assert max(exact.values()) <= 1e-10, exact
    single = cast(drawn, "float32")
    actual = errors(outputs_and_gradients(single, **short), expected, drawn)

    @functools.cache
    def plain():
        formula = outputs_and_gradients(single, implementation="reference", power=case.power)
        return errors(formula, expected, drawn)

    for name, value in actual.items():
        bound = 2e-6 if name == "out" else 1e-5
        # Gradients grow without bound where a score is all but zero, those of the plain formula too.
        if not value <= bound and np.isfinite(plain()[name]):
            bound = max(bound, 4 * plain()[name])
        assert value <= bound, (name, value, bound)


def test_outputs_of_a_higher_power():
    drawn = arrays(QUARTIC)
    drawn.pop("dout")
    with jax.enable_x64(True):
        expected = np.asarray(attend(**cast(drawn, "float64"), power=4, implementation="reference"))
    actual = attend(**cast(drawn, "float32"), power=4, chunk_size=24, exact_window=16)
    assert cases.error(actual, expected) <= 2e-6


def test_equal_channels_are_power_attention():
    drawn = cases.arrays(STATEFUL, kv_heads=2)
    channels = np.repeat(drawn["log_decay"][..., None], 5, -1)
    arguments = {name: drawn[name] for name in ("query", "key", "value", "segment_ids")}
    with jax.enable_x64(True):
        scalar = jax.jit(ops.power_attention, static_argnames="implementation")
        expected = scalar(**arguments, log_decay=drawn["log_decay"], implementation="reference")
        actual = attend(**arguments, log_decay=channels, chunk_size=32, exact_window=16)
    assert cases.error(actual, expected) <= 1e-10


def part(drawn, begin, end):
    return {name: jnp.asarray(drawn[name])[:, begin:end] for name in (*cases.GRADIENTS, "segment_ids")}


@functools.cache
def whole():
    """Returns the formula's outputs and gradients for the stateful case."""
    with jax.enable_x64(True):
        double = cast(arrays(STATEFUL), "float64")
        return jax.device_get(outputs_and_gradients(double, implementation="reference"))


def by_steps(drawn, *, exact_window, begin=0, state=None):
    tokens = part(drawn, begin, None)
    if state is None:
        state = ops.PowerState.zeros(
            *SIZES, power=2, exact_window=exact_window, per_channel=True, dtype=tokens["key"].dtype
        )

    def step(state, token):
        out, state = ops.power_attention_step(**token, state=state)
        return state, out

    state, out = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
    return jnp.moveaxis(out, 0, 1), state


steps = jax.jit(by_steps, static_argnames="exact_window")


def zeros(exact_window):
    return ops.PowerState.zeros(*SIZES, power=2, exact_window=exact_window, per_channel=True, dtype=float)


@pytest.mark.parametrize(
    ("exact_window", "lengths"),
    [(6, (50, 50, 50)), (0, (75, 75)), pytest.param(64, (1, 49, 100), marks=pytest.mark.slow)],
)
def test_any_split_equals_one_call(exact_window, lengths):
    drawn = arrays(STATEFUL)
    with jax.enable_x64(True):
        state, outputs, begin = zeros(exact_window), [], 0
        for length in lengths:
            tokens = part(drawn, begin, begin + length)
            out, state = attend(
                **tokens, exact_window=exact_window, chunk_size=16, initial_state=state, return_state=True
            )
            outputs.append(out)
            begin += length
    assert cases.error(np.concatenate(outputs, 1), whole()["out"]) <= 1e-10


@pytest.mark.parametrize("exact_window", [0, 6])
def test_steps_equal_one_call(exact_window):
    drawn = arrays(STATEFUL)
    with jax.enable_x64(True):
        actual, state = steps(cast(drawn, "float64"), exact_window=exact_window)
    assert cases.error(actual, whole()["out"]) <= 1e-10
    assert state.length.max() <= max(2 * exact_window - 1, 0)


def test_steps_in_float32():
    actual, state = steps(cast(arrays(STATEFUL), "float32"), exact_window=64)
    assert actual.dtype == state.norm.dtype == jnp.float32
    assert cases.error(actual, whole()["out"]) <= 2e-6


def test_gradients_through_states():
    """Compares a call followed by steps with the formula of the whole."""
    drawn = arrays(STATEFUL)

    def loss(arguments):
        inputs = drawn | arguments
        first, state = ops.power_attention(
            **part(inputs, 0, 130), exact_window=6, chunk_size=16, return_state=True
        )
        second, _ = by_steps(inputs, exact_window=6, begin=130, state=state)
        return (jnp.concatenate([first, second], 1) * drawn["dout"]).sum()

    with jax.enable_x64(True):
        arguments = {name: jnp.asarray(drawn[name]) for name in cases.GRADIENTS}
        actual = jax.jit(jax.grad(loss))(arguments)
    expected = {name: whole()[name] for name in cases.GRADIENTS}
    for name, error in errors(actual, expected, drawn).items():
        assert error <= 1e-10, (name, error)


def test_padding_passes_the_state_through():
    drawn = arrays(STATEFUL)
    call = functools.partial(attend, exact_window=6, chunk_size=16, return_state=True)
    with jax.enable_x64(True):
        _, before = call(**part(drawn, 0, 50), initial_state=zeros(6))
        padding = part(drawn, 0, 50) | {"segment_ids": jnp.full((2, 50), -1, jnp.int32)}
        out, after = call(**padding, initial_state=before)
    assert not np.asarray(out).any()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-14), after, before)


def test_no_weight_is_zero_with_finite_gradients():
    drawn = cast(arrays(CASE), "float32")
    drawn |= {"query": drawn["query"].at[:, 40:60].set(0)}
    results = outputs_and_gradients(drawn, power=2, exact_window=16, chunk_size=24)
    assert not np.asarray(results["out"][:, 40:60]).any()
    assert all(np.isfinite(x).all() for x in results.values())


def test_bfloat16_is_summed_in_float32():
    drawn = arrays(cases.Case(time=40, head_dim=4, value_dim=4, decay="gentle"))
    half = {name: jnp.asarray(drawn[name], jnp.bfloat16) for name in ("query", "key", "value")}
    decay = jnp.asarray(drawn["log_decay"], jnp.float32)
    out = attend(**half, log_decay=decay)
    exact = {name: x.astype(jnp.float32) for name, x in half.items()}
    expected = attend(**exact, log_decay=decay, implementation="reference")
    assert out.dtype == jnp.bfloat16
    # Rounded once, at the end.
    assert cases.error(out, expected) <= 2**-9


def test_memory_is_linear_in_time():
    x = jax.ShapeDtypeStruct((1, 2**16, 1, 8), jnp.float32)

    def loss(*arrays):
        *arrays, log_decay = arrays
        return ops.power_attention(*arrays, log_decay=log_decay).sum()

    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(x, x, x, x).compile()
    # Arguments, copies and gradients of 2 MiB each, and states and windows; one T x T array would be 16 GiB.
    assert compiled.memory_analysis().temp_size_in_bytes <= 64 * 2**20


def test_errors_name_the_numbers_and_the_remedy():
    x = jnp.ones((1, 8, 2, 4))
    state = ops.PowerState.zeros(1, 2, 4, 4, power=2, exact_window=3, per_channel=True)
    call = functools.partial(ops.power_attention, x, x, x, log_decay=x)
    with pytest.raises(ValueError, match=r"log_decay has shape \(1, 8, 2, 3\); it must be"):
        call(log_decay=x[..., :3])
    with pytest.raises(ValueError, match=r"the state has 3; pass exact_window=3"):
        call(initial_state=state)
    with pytest.raises(
        ValueError, match=r"\(1, 2, 35, 4\); make it with PowerState.zeros\(1, 2, 4, 4, power=4"
    ):
        call(power=4, initial_state=state)
    with pytest.raises(NotImplementedError, match="only implementation='reference' supports both"):
        ops.power_attention(x[:, 1:], x, x, log_decay=x)
    assert ops.power_attention(x[:, 1:], x, x, log_decay=x, implementation="reference").shape == (1, 7, 2, 4)


def test_the_state_of_the_reference():
    """Compares with the state of the chunked form, which continues from it."""
    drawn = arrays(STATEFUL)
    with jax.enable_x64(True):
        call = functools.partial(attend, exact_window=6, return_state=True)
        _, first = call(**part(drawn, 0, 50), chunk_size=16, initial_state=zeros(6))
        second = part(drawn, 50, 100) | {"initial_state": first}
        out, state = call(**second, chunk_size=16)
        expected, formula = call(**second, implementation="reference")
    assert cases.error(out, expected) <= 1e-10
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
    jax.tree.map(compare, state, formula)
