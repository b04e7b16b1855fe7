"""The state kernels together, interpreted, against the formula in float64 and against the plain JAX form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_state
from sympow_jax import ops
from tests.ops import cases

pytestmark = pytest.mark.timeout(240)

# What the logarithm of a decay is at the start of a document.
BOUNDARY = -88.0
CHUNK = 128


def drawn_case(case, *, batch=1, kv_heads=1):
    drawn = cases.arrays(case, batch=batch, kv_heads=kv_heads, dtype="bfloat16")
    names = ("query", "key", "value", "log_decay", "segment_ids")
    return {name: drawn[name] for name in names}


def run_kernels(drawn, **options):
    log_decay = drawn["log_decay"]
    if drawn["segment_ids"] is not None:
        shape = drawn["key"].shape[:3]
        log_decay = np.zeros(shape) if log_decay is None else log_decay
        start = np.diff(drawn["segment_ids"], axis=1, prepend=-1) != 0
        log_decay = np.where(start[..., None], BOUNDARY, log_decay)
    options = {"chunk": CHUNK, "interpret": plgpu.InterpretGPUParams(detect_races=True)} | options
    run = functools.partial(power_state.power_state, **options)
    arrays = [jnp.asarray(drawn[name], jnp.bfloat16) for name in ("query", "key", "value")]
    return jax.jit(run)(*arrays, log_decay=None if log_decay is None else jnp.asarray(log_decay, jnp.float32))


def formula(drawn, **options):
    with jax.enable_x64(True):
        arrays = {name: None if x is None else jnp.asarray(x) for name, x in drawn.items()}
        return jax.device_get(ops.power_attention(**arrays, implementation="reference", **options))


def plain(drawn):
    arrays = {
        name: None if x is None else jnp.asarray(x, x.dtype if x.dtype == np.int32 else jnp.bfloat16)
        for name, x in drawn.items()
    }
    if drawn["log_decay"] is not None:
        arrays["log_decay"] = jnp.asarray(drawn["log_decay"], jnp.float32)
    run = functools.partial(ops.power_attention, form="chunked", implementation="xla", chunk_size=CHUNK)
    return jax.jit(run)(**arrays)


CASES = [
    cases.Case(head_dim=64, value_dim=64, time=420, decay="gentle"),
    cases.Case(head_dim=64, value_dim=64, time=300, decay="mixed", segments="edges", group=2),
    cases.Case(head_dim=64, value_dim=64, time=300, decay="none", scale=1e3),
    cases.Case(head_dim=32, value_dim=64, time=300, decay="gentle", scale=1e-3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_is_as_exact_as_the_plain_form(case):
    drawn = drawn_case(case)
    expected = formula(drawn)
    out, _ = run_kernels(drawn)
    assert out.dtype == jnp.bfloat16
    assert cases.error(out, expected) <= 1.2 * cases.error(plain(drawn), expected)


def test_states_in_and_out():
    """The final state is the reference's, and a run that continues from it gives the outputs of the whole."""
    case = cases.Case(head_dim=64, value_dim=64, time=400, decay="gentle")
    drawn = drawn_case(case)
    cut = 200
    first = {name: None if x is None else x[:, :cut] for name, x in drawn.items()}
    _, (kv, norm) = run_kernels(first)
    _, state = formula(first, return_state=True)
    assert cases.error(kv, state.kv) <= 2e-3
    assert cases.error(norm, state.norm) <= 1e-5

    # The last 64 positions before the cut were not folded: the next run begins with them.
    rest = {name: None if x is None else x[:, cut - 64 :] for name, x in drawn.items()}
    out, _ = run_kernels(rest, initial_state=(kv, norm))
    expected = formula(drawn)
    whole, _ = run_kernels(drawn)
    error = cases.error(out, expected[:, cut - 64 :])
    assert error <= 1.2 * cases.error(whole[:, cut - 64 :], expected[:, cut - 64 :])


def test_zero_queries_give_zero():
    drawn = drawn_case(cases.Case(head_dim=64, value_dim=64, time=128, decay="gentle"))
    drawn["query"][:, 70:80] = 0
    out, _ = run_kernels(drawn)
    assert not np.asarray(out[:, 70:80]).any()
    assert np.isfinite(np.asarray(out, np.float32)).all()


UNSUPPORTED = {
    "power": ({"power": 4}, {}),
    "head_dim": ({}, {"head_dim": 48}),
    "value_dim": ({}, {"value_dim": 32}),
    "chunk": ({"chunk": 100}, {}),
    "window": ({"window": 10}, {}),
    "states": ({"state_dtype": jnp.float32}, {}),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_kernels_cannot_do_is_named(name):
    options, sizes = UNSUPPORTED[name]
    drawn = drawn_case(cases.Case(**{"head_dim": 64, "value_dim": 64, "time": 128} | sizes))
    with pytest.raises(NotImplementedError, match=name):
        run_kernels(drawn, **options)
