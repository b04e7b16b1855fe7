"""Tests that NaN and infinity reach only tokens that may attend to them, and that padding is ignored."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from tests.ops import every_op

TIME, DOCUMENT, BAD = 48, 12, 17
SIZES = {"exact_window": 4, "chunk_size": 8}
SEGMENTS = np.repeat(np.arange(TIME // DOCUMENT, dtype=np.int32), DOCUMENT)[None].repeat(2, 0)
POWER = {
    f"power {implementation} {form}": functools.partial(
        ops.power_attention,
        implementation=implementation,
        form=form,
        exact_window=4,
        chunk_size=None if form == "recurrent" else 8,
    )
    for implementation, forms in (
        ("reference", ("attention",)),
        ("xla", ("attention", "chunked", "recurrent")),
    )
    for form in forms
}
OTHERS = {
    "linear": functools.partial(ops.linear_attention, form="chunked", exact_window=4, chunk_size=8),
    "linear, rotated": functools.partial(
        ops.linear_attention, rotate=lambda x: x, exact_window=4, chunk_size=8
    ),
    "channels": lambda *x, log_decay, **options: ops.power_attention(
        *x, log_decay=jnp.broadcast_to(log_decay[..., None], x[2].shape), **SIZES, **options
    ),
    "delta": lambda *x, **options: ops.delta_attention(
        *x, np.full(x[1].shape[:3], 0.5, "float32"), chunk_size=8, **options
    ),
    "softmax": functools.partial(ops.softmax_attention, block_size=8),
    "softmax, window": functools.partial(ops.softmax_attention, block_size=8, window=5),
    "expressive": functools.partial(ops.expressive_attention, block_size=8),
}


def _without_decay(op):
    return lambda *x, log_decay, **options: op(*x, causal=False, **options)


BIDIRECTIONAL = {
    "linear, bidirectional": _without_decay(functools.partial(ops.linear_attention, chunk_size=8)),
    "softmax, bidirectional": _without_decay(OTHERS["softmax"]),
    "expressive, bidirectional": _without_decay(OTHERS["expressive"]),
}


def by_steps(step):
    def op(query, key, value, *, initial_state, return_state, **options):
        def advance(state, token):
            out, state = step(*token[0], state, **token[1])
            return state, out

        tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), ((query, key, value), options))
        state, out = jax.lax.scan(advance, initial_state, tokens)
        return jnp.moveaxis(out, 0, 1), state

    return op


POWER_STATE = ops.PowerState.zeros(2, 2, 4, 3, power=2, exact_window=4)
LINEAR_STATE = ops.LinearState.zeros(2, 2, 4, 3, exact_window=4)
CHANNEL_STATE = ops.PowerState.zeros(2, 2, 4, 3, power=2, exact_window=4, per_channel=True)
CACHE = ops.KVCache.zeros(2, TIME, 2, 4, 3)


def _step_of_cache(*token, log_decay, segment_ids):
    *vectors, cache = token
    return cache.step(*vectors, log_decay, segment_ids, weigh=every_op.squares)[:2]


def _one_by_one(step, state):
    op = by_steps(step)
    return lambda *x, **options: op(*x, initial_state=state, return_state=True, **options)[0]


STEPS = {
    "step": _one_by_one(ops.power_attention_step, POWER_STATE),
    "linear step": _one_by_one(ops.linear_attention_step, LINEAR_STATE),
    "cache step": _one_by_one(_step_of_cache, CACHE),
}
EVERY = POWER | OTHERS | BIDIRECTIONAL
# Those that share most of their code with another of them.
RARE = {
    "power reference attention",
    "attention",
    "linear",
    "linear step",
    "linear, rotated",
    "softmax, bidirectional",
    "expressive, bidirectional",
}


def rare_are_slow(names):
    return [pytest.param(name, marks=pytest.mark.slow if name in RARE else ()) for name in names]


def drawn() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def normal(heads, width):
        return random.normal(size=(2, TIME, heads, width)).astype("float32")

    return {
        "query": normal(4, 4),
        "key": normal(2, 4),
        "value": normal(2, 3),
        "log_decay": -np.float32(0.1) * np.abs(normal(2, 1)[..., 0]),
    }


def changed(array, place, number) -> np.ndarray:
    array = array.copy()
    array[place] = number
    return array


@functools.cache
def outputs_and_gradients(name):
    def loss(arrays, segments):
        out = (EVERY | STEPS)[name](
            *(arrays[x] for x in ("query", "key", "value")),
            log_decay=arrays["log_decay"],
            segment_ids=segments,
        )
        return (out * jnp.arange(out.shape[1])[:, None, None]).sum(), out

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", rare_are_slow(EVERY))
def test_nonfinite_tokens_reach_only_tokens_that_attend_to_them(name, packed):
    arrays, segments = drawn(), SEGMENTS if packed else None

    def outputs(arrays):
        return np.asarray(outputs_and_gradients(name)(arrays, segments)[1])

    clean = outputs(arrays)
    end = -(-BAD // DOCUMENT) * DOCUMENT if packed else TIME
    begin = BAD if name not in BIDIRECTIONAL else end - DOCUMENT if packed else 0
    for array in ("query", "key", "value", "log_decay"):
        if array == "log_decay" and name in BIDIRECTIONAL:
            continue
        for number in (np.nan, np.inf):
            if (array, number) == ("log_decay", np.inf) and "softmax" in name:
                continue  # counts as no decay
            out = outputs(arrays | {array: changed(arrays[array], (0, BAD, 1), number)})
            heads = slice(1, 2) if array == "query" else slice(2, 4)
            seen = np.zeros((2, TIME, 4), bool)
            last = BAD + 1 if array == "query" else min(end, BAD + (5 if "window" in name else TIME))
            seen[0, BAD if array == "query" else begin : last, heads] = True
            assert np.isnan(out[seen]).all(), (array, number)
            np.testing.assert_allclose(out[~seen], clean[~seen], rtol=1e-5, atol=1e-6)


def test_nonfinite_tokens_of_one_document():
    test_nonfinite_tokens_reach_only_tokens_that_attend_to_them("power xla chunked", packed=False)


@pytest.mark.parametrize("name", rare_are_slow(EVERY | STEPS))
def test_padding_may_hold_anything(name):
    """Outputs and gradients are bitwise identical to those with zeros at padding."""
    segments = SEGMENTS.copy()
    padding = np.zeros((2, TIME), bool)
    padding[0, BAD : BAD + 9] = padding[1, 30:] = padding[1, 0] = True
    segments[padding] = -1

    def padded(number):
        return {k: changed(x, padding, number) for k, x in drawn().items()}

    expected = outputs_and_gradients(name)(padded(0), segments)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    assert (np.asarray(expected[1])[padding] == 0).all()
    for number in (np.nan, np.inf):
        actual = outputs_and_gradients(name)(padded(number), segments)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


# Ops with their empty states.
RECURRENT = {
    "attention": (functools.partial(ops.power_attention, form="attention", **SIZES), POWER_STATE),
    "chunked": (functools.partial(ops.power_attention, form="chunked", **SIZES), POWER_STATE),
    "step": (by_steps(ops.power_attention_step), POWER_STATE),
    "channels": (OTHERS["channels"], CHANNEL_STATE),
    "linear": (functools.partial(ops.linear_attention, **SIZES), LINEAR_STATE),
    "linear step": (by_steps(ops.linear_attention_step), LINEAR_STATE),
}


@functools.cache
def with_state(name):
    @jax.jit
    def call(arrays, segments, state):
        return RECURRENT[name][0](
            *(arrays[k] for k in ("query", "key", "value")),
            log_decay=arrays["log_decay"],
            segment_ids=segments,
            initial_state=state,
            return_state=True,
        )

    return call


def in_halves(name, arrays, segments):
    """Returns the outputs of two calls, the second from the state of the first, and the last state."""
    state, halves = RECURRENT[name][1], []
    for part in (slice(0, TIME // 2), slice(TIME // 2, None)):
        cut = {k: x[:, part] for k, x in arrays.items()}
        out, state = with_state(name)(cut, segments[:, part], state)
        halves.append(out)
    return np.concatenate(halves, 1), state


@pytest.mark.parametrize("array", ["key", "value"])
@pytest.mark.parametrize("name", rare_are_slow(RECURRENT))
def test_nan_stays_in_the_state_until_its_document_ends(name, array):
    arrays, half = drawn(), TIME // 2
    # The second document continues in the second half, so that both halves are one compiled function.
    begin, end = half - 6, half + 6
    segments = (SEGMENTS + (np.arange(TIME) % DOCUMENT >= DOCUMENT // 2)).astype(np.int32)

    clean, _ = in_halves(name, arrays, segments)
    for bad_token in (half - 1, half - 5):
        bad = arrays | {array: changed(arrays[array], (0, bad_token, 1, 2), np.nan)}
        out, last = in_halves(name, bad, segments)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(last))
        nan = np.isnan(out)
        assert begin < bad_token < end
        # A step keeps the NaN of a value in its channel.
        channels = slice(2, 3) if "step" in name and array == "value" else slice(None)
        assert nan[0, bad_token:end, 2:, channels].all()
        assert nan.sum() == nan[0, bad_token:end, 2:, channels].size
        np.testing.assert_allclose(out[~nan], clean[~nan], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", rare_are_slow(["power xla attention", "softmax", "expressive"]))
def test_more_keys_than_queries(name):
    arrays = drawn()
    arrays["key"] = changed(arrays["key"], (0, BAD, 1), np.nan)
    log_decay = arrays.pop("log_decay")
    query = arrays.pop("query")[:, -40:]
    nan = np.isnan(jax.jit(EVERY[name])(query, *arrays.values(), log_decay=log_decay))
    assert nan[0, BAD - 8 :, 2:].all()
    assert nan.sum() == nan[0, BAD - 8 :, 2:].size


@pytest.mark.parametrize("name", ["power xla attention", "power xla chunked"])
def test_minus_infinity_is_a_decay(name):
    arrays = drawn()
    forgets, starts = (
        outputs_and_gradients(name)(
            arrays | {"log_decay": changed(arrays["log_decay"], (0, BAD), number)}, SEGMENTS
        )[1]
        for number in (-np.inf, -1e4)
    )
    np.testing.assert_allclose(forgets, starts, rtol=1e-5)


@pytest.mark.parametrize("name", rare_are_slow(RECURRENT))
def test_minus_infinity_in_a_state_is_a_decay(name):
    arrays = drawn()
    forgets, starts = (
        in_halves(
            name,
            arrays | {"log_decay": changed(arrays["log_decay"], (0, TIME // 2 - 3), number)},
            SEGMENTS,
        )[0]
        for number in (-np.inf, -1e4)
    )
    np.testing.assert_allclose(forgets, starts, rtol=1e-5)


def test_a_nonfinite_state_does_not_affect_other_rows():
    state = ops.PowerState.zeros(2, 2, 4, 3, power=2, exact_window=4)
    state = dataclasses.replace(
        state,
        kv=jnp.asarray(changed(np.asarray(state.kv), (0, 1), np.nan)),
        segment=jnp.zeros_like(state.segment),
    )
    arrays = {name: x[:, : TIME // 2] for name, x in drawn().items()}
    # The program that also continues states in the tests above.
    out, _ = with_state("chunked")(arrays, SEGMENTS[:, : TIME // 2], state)
    nan = np.isnan(out)
    assert nan[0, :DOCUMENT, 2:].all()
    assert nan.sum() == nan[0, :DOCUMENT, 2:].size
