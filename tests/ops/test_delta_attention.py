"""Tests of attention by the delta rule: every form against its recurrence in float64, states, steps and stability."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from tests import marked
from tests.ops import cases

FORMS: tuple[dict, ...] = (
    {"form": "attention"},
    {"form": "chunked", "chunk_size": 8},
    {"form": "recurrent"},
    {},
)
SMALL = cases.Case(head_dim=5, value_dim=3, time=37, decay="gentle", segments="padded", group=2)
GRID = cases.pairwise(
    {
        "power": (1, 2, 3, 4),
        "head_dim": (6,),
        "value_dim": (5,),
        "time": (1, 63, 300),
        "scale": (1e-3, 1.0, 1e3),
        "decay": ("none", "gentle", "mixed"),
        "segments": ("none", "edges", "padded"),
        "group": (1, 2),
    }
)


def arrays(case, largest=2.0, **options):
    """Draws arguments, and write strengths to `largest`."""
    drawn = cases.arrays(case, kv_heads=2, **options)
    random = np.random.default_rng(1)
    strengths = random.uniform(0, largest, drawn["key"].shape[:3]).astype("float32")
    return drawn | {"delta": strengths.astype("float64")}


def recurrence(query, key, value, delta, *, power, log_decay=None, segment_ids=None):
    """Computes the outputs token by token, with all D^p products of the entries of a vector as its features."""
    batch, _, kv_heads, _ = key.shape
    if log_decay is None:
        log_decay = jnp.zeros_like(delta)
    segment_ids = jnp.zeros(key.shape[:2], int) if segment_ids is None else segment_ids
    query, key = (
        ops.tensor_power(x / jnp.linalg.norm(x, axis=-1, keepdims=True), power) for x in (query, key)
    )
    query = query.reshape(*key.shape[:3], -1, key.shape[-1])
    product = functools.partial(jnp.einsum, precision="highest")

    def write(carry, token):
        state, document = carry
        q, k, v, b, g, segment = token
        begins = (segment >= 0) & (segment != document) & (document >= 0)
        kept = jnp.where(begins[:, None, None, None], 0, jnp.exp(g)[..., None, None]) * state
        new = kept + product("bkf,bke->bkfe", k, b[..., None] * (v - product("bkf,bkfe->bke", k, kept)))
        valid = segment[:, None, None, None] >= 0
        state = jnp.where(valid, new, state)
        out = jnp.where(valid, product("bkgf,bkfe->bkge", q, state), 0)
        return (state, jnp.where(segment >= 0, segment, document)), out

    start = jnp.zeros((batch, kv_heads, key.shape[-1], value.shape[-1]), value.dtype)
    tokens = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, delta, log_decay, segment_ids)]
    _, out = jax.lax.scan(write, (start, jnp.full(batch, -1)), tokens)
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1, query.shape[2] * query.shape[3], value.shape[-1])


def check(case, options, dtype):
    drawn = arrays(case, dtype=dtype)
    formula = functools.partial(cases.outputs_and_gradients, recurrence, drawn, power=case.power)
    actual = cases.outputs_and_gradients(ops.delta_attention, drawn, dtype, power=case.power, **options)
    cases.check(actual, formula("float64"), drawn, dtype, lambda: formula("float32"))


@marked.cases(
    ("options", "dtype"),
    [(options, "float32") for options in FORMS],
    slow=[(options, dtype) for options in FORMS for dtype in ("float64", "bfloat16")],
)
def test_outputs_and_gradients(options, dtype):
    # Three chunks of the attention form.
    check(dataclasses.replace(SMALL, time=300), options, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_grid(case, dtype):
    for options in FORMS[:2]:
        check(case, options, dtype)


@pytest.mark.parametrize("power", [2, 4])
def test_a_key_returns_its_last_value(power):
    random = np.random.default_rng(0)
    keys = random.normal(size=(4, 8)).astype("float32")
    order = random.integers(0, 4, 40)
    value = random.normal(size=(1, 40, 1, 5)).astype("float32")
    key = keys[order][None, :, None]
    ones = np.ones((1, 40, 1), "float32")
    out, state = ops.delta_attention(key, key, value, ones, power=power, return_state=True)
    np.testing.assert_allclose(out, value, atol=1e-5)
    # A query of a key that was overwritten returns the newest value as long as keys are orthogonal.
    basis = np.eye(8, dtype="float32")[order][None, :, None]
    _, state = ops.delta_attention(basis, basis, value, ones, power=power, return_state=True)
    for number in set(order):
        asked = np.eye(8, dtype="float32")[number][None, None]
        last = np.flatnonzero(order == number)[-1]
        found, _ = ops.delta_attention_step(asked, asked, value[:, 0], 0 * ones[:, 0], state, power=power)
        np.testing.assert_allclose(found[0], value[0, last], atol=1e-6)


@pytest.mark.parametrize("split", [1, 8, 20])
def test_two_calls_and_steps_equal_one_call(split):
    drawn = arrays(SMALL)
    drawn.pop("dout")
    drawn = {
        name: jnp.asarray(x, x.dtype if name == "segment_ids" else "float32") for name, x in drawn.items()
    }
    call = jax.jit(functools.partial(ops.delta_attention, chunk_size=8, return_state=True))
    whole, end = call(**drawn)
    first, state = call(**{name: x[:, :split] for name, x in drawn.items()})
    rest = {name: x[:, split:] for name, x in drawn.items()}
    second, after = call(**rest, initial_state=state)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, atol=2e-6)
    np.testing.assert_allclose(after.kv, end.kv, atol=2e-6)
    step = jax.jit(ops.delta_attention_step)
    for t in range(drawn["key"].shape[1] - split):
        out, state = step(**{name: x[:, t] for name, x in rest.items()}, state=state)
        np.testing.assert_allclose(out, whole[:, split + t], atol=2e-6)
    np.testing.assert_allclose(state.kv, end.kv, atol=2e-6)
    assert state.segment.tolist() == end.segment.tolist()


@marked.cases(("power", "largest"), [(2, 2.0)], slow=[(4, 2.0), (2, 1.0), (4, 1.0)])
def test_long_documents_with_repeated_keys_are_stable(power, largest):
    """Float32 against float64 over 16,384 tokens, without decays, with keys of which half repeat earlier ones."""
    random = np.random.default_rng(0)
    time = 16_384
    key = random.normal(size=(1, time, 1, 6))
    again = random.random(time) < 0.5
    key[0, again] = key[0, random.integers(0, 16, again.sum())]
    drawn = {
        "query": random.normal(size=(1, time, 1, 6)),
        "key": key,
        "value": random.normal(size=(1, time, 1, 4)),
        "delta": random.uniform(0, largest, (1, time, 1)),
    }

    def run(dtype):
        with jax.enable_x64(dtype == "float64"):
            given = {name: jnp.asarray(x.astype("float32"), dtype) for name, x in drawn.items()}
            call = jax.jit(functools.partial(ops.delta_attention, power=power, return_state=True))
            return jax.device_get(call(**given))

    (out, state), (exact, end) = run("float32"), run("float64")
    assert np.abs(exact).max() < 100
    assert cases.error(out, exact) < 1e-5
    assert cases.error(state.kv, end.kv) < 1e-5
