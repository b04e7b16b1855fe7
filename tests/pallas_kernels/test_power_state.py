"""Tests of the state kernels together, interpreted, against the formula in float64 and the plain JAX form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_state
from pallas_kernels.hopper import results
from pallas_kernels.power_state import config as configs
from sympow_jax import ops
from tests.ops import cases

pytestmark = pytest.mark.timeout(240)

# Log decay at the first token of a document.
BOUNDARY = -88.0


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
    options = {"chunk": 64, "interpret": plgpu.InterpretGPUParams(detect_races=True)} | options
    arrays = [jnp.asarray(drawn[name], jnp.bfloat16) for name in ("query", "key", "value")]
    log_decay = None if log_decay is None else jnp.asarray(log_decay, jnp.float32)
    # Not under jit: other computations could take the threads that the kernel's warpgroups wait for.
    return power_state.power_state(*arrays, log_decay=log_decay, **options)


def formula(drawn, **options):
    with jax.enable_x64(True):
        arrays = {name: None if x is None else jnp.asarray(x) for name, x in drawn.items()}
        return jax.device_get(ops.power_attention(**arrays, implementation="reference", **options))


def plain(drawn, chunk):
    arrays = {
        name: None if x is None else jnp.asarray(x, x.dtype if x.dtype == np.int32 else jnp.bfloat16)
        for name, x in drawn.items()
    }
    if drawn["log_decay"] is not None:
        arrays["log_decay"] = jnp.asarray(drawn["log_decay"], jnp.float32)
    run = functools.partial(ops.power_attention, form="chunked", implementation="xla", chunk_size=chunk)
    return jax.jit(run)(**arrays)


# Chunks of 64, 128 and 192 give a block of the query one, two and three warpgroups.
CASES = [
    (cases.Case(head_dim=64, value_dim=64, time=300, decay="gentle"), 192),
    (cases.Case(head_dim=64, value_dim=64, time=200, decay="mixed", segments="edges", group=2), 128),
    (cases.Case(head_dim=64, value_dim=64, time=190, decay="none", scale=1e3), 64),
    (cases.Case(head_dim=32, value_dim=32, time=190, decay="gentle", scale=1e-3), 64),
    (cases.Case(head_dim=128, value_dim=128, time=130, decay="gentle"), 64),
    (cases.Case(head_dim=48, value_dim=100, time=130, decay="mixed"), 64),
]


@pytest.mark.interpret
@pytest.mark.parametrize(("case", "chunk"), CASES, ids=str)
def test_output_is_as_exact_as_the_plain_form(case, chunk):
    drawn = drawn_case(case)
    expected = formula(drawn)
    out, _, _ = run_kernels(drawn, chunk=chunk)
    assert out.dtype == jnp.bfloat16
    assert cases.error(out, expected) <= 1.2 * cases.error(plain(drawn, chunk), expected)


@pytest.mark.interpret
def test_denominators_are_sums_of_weights():
    """The largest entries of queries are in [1/2, 1).

    Keys are in the chunk, in the window and in the state.
    """
    drawn = drawn_case(cases.Case(head_dim=64, value_dim=64, time=190, decay="gentle", group=2, scale=100))
    _, denominator, _ = run_kernels(drawn)
    query = drawn["query"] / 2.0 ** np.frexp(np.abs(drawn["query"]).max(-1, keepdims=True))[1]
    scores = np.einsum("btnd,bsd->bnts", query, drawn["key"][:, :, 0])
    total = np.cumsum(drawn["log_decay"][..., 0], 1)
    decays = np.tril(np.exp(np.minimum(total[:, :, None] - total[:, None], 0)))
    expected = np.einsum("bnts,bts->btn", scores**2, decays)
    assert denominator.dtype == jnp.float32
    # The normalizer is an operand in two parts, of 16 bits together.
    assert cases.error(denominator, expected) <= 2**-17


@pytest.mark.interpret
@pytest.mark.slow
@pytest.mark.parametrize(("state_dtype", "ratio"), [("float32", 1.2), ("float16", 1.2), ("bfloat16", 2.0)])
def test_output_where_states_hold_most_keys(state_dtype, ratio):
    """Tests the worst case for states: no decay, and queries after hundreds of keys."""
    drawn = drawn_case(cases.Case(head_dim=64, value_dim=64, time=960, decay="none"))
    expected, late = formula(drawn), slice(768, None)
    out, _, _ = run_kernels(
        drawn, chunk=192, state_dtype=jnp.dtype(state_dtype), interpret=plgpu.InterpretGPUParams()
    )
    plain_error = cases.error(plain(drawn, 192)[:, late], expected[:, late])
    assert cases.error(out[:, late], expected[:, late]) <= ratio * plain_error


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("state_dtype", "head_dim", "chunk"),
    [("bfloat16", 64, 64), ("float32", 32, 64), ("float32", 64, 64), ("float32", 128, 128)],
)
def test_types_of_states(state_dtype, head_dim, chunk):
    drawn = drawn_case(cases.Case(head_dim=head_dim, value_dim=64, time=190, decay="gentle"))
    expected = formula(drawn)
    out, _, _ = run_kernels(drawn, chunk=chunk, state_dtype=jnp.dtype(state_dtype))
    assert cases.error(out, expected) <= 1.2 * cases.error(plain(drawn, chunk), expected)


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("head_dim", "state_dtype", "multiprocessors"), [(64, "float16", 8), (48, "float32", 16)]
)
def test_states_in_and_out(head_dim, state_dtype, multiprocessors, monkeypatch):
    """The final state equals the reference's, and a run that continues from it gives the outputs of the whole."""
    # Two segments of the one head, of which the second is shorter.
    monkeypatch.setattr(configs, "MULTIPROCESSORS", multiprocessors)
    options = {"chunk": 64, "state_dtype": jnp.dtype(state_dtype)}
    drawn = drawn_case(cases.Case(head_dim=head_dim, value_dim=64, time=280, decay="gentle"))
    cut = 160
    first = {name: None if x is None else x[:, :cut] for name, x in drawn.items()}
    _, _, (kv, norm) = run_kernels(first, **options)
    _, state = formula(first, return_state=True)
    assert cases.error(kv, state.kv) <= 1e-3
    assert cases.error(norm, state.norm) <= 1e-5

    # The last 64 positions before the cut are not in the state: the next run begins with them.
    rest = {name: None if x is None else x[:, cut - 64 :] for name, x in drawn.items()}
    out, _, _ = run_kernels(rest, **options, initial_state=(kv, norm))
    expected = formula(drawn)
    plain_error = cases.error(plain(drawn, 64), expected)
    assert cases.error(out, expected[:, cut - 64 :]) <= 1.2 * plain_error


@pytest.mark.interpret
def test_zero_queries_give_zero():
    drawn = drawn_case(cases.Case(head_dim=64, value_dim=64, time=128, decay="gentle"))
    drawn["query"][:, 70:80] = 0
    out, _, _ = run_kernels(drawn)
    assert not np.asarray(out[:, 70:80]).any()
    assert np.isfinite(np.asarray(out, np.float32)).all()


UNSUPPORTED = {
    "power": ({"power": 6}, {}),
    "head_dim": ({}, {"head_dim": 144}),
    "value_dim": ({}, {"value_dim": 136}),
    "chunk": ({"chunk": 100}, {}),
    "positions in a chunk": ({"chunk": 1 << 16}, {}),
    "shared memory": ({"chunk": (1 << 14) - 64}, {}),
    "exact_window": ({"exact_window": 10}, {}),
    "states": ({"state_dtype": jnp.int8}, {}),
}


def test_results_are_whole_tiles():
    """TMA's tensor maps need whole tiles; the interpreter does not."""
    shapes = [
        results.kind(batch_time, 6, 64, jnp.bfloat16).shape for batch_time in ((2, 304), (3, 301), (1, 5))
    ]
    assert shapes == [(2, 304, 3, 64), (3, 304, 2, 64), (1, 64, 6, 64)]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_kernels_cannot_do_is_named(name):
    options, sizes = UNSUPPORTED[name]
    drawn = drawn_case(cases.Case(**{"head_dim": 64, "value_dim": 64, "time": 128} | sizes))
    with pytest.raises(NotImplementedError, match=f"need.*{name}"):
        run_kernels(drawn, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "time", "state_dtype"),
    [
        (64, 64, 16_384, "float16"),
        (64, 64, 4000, "float32"),
        (32, 48, 4096, "float16"),
        (128, 128, 5000, "float16"),
    ],
)
def test_on_a_gpu(head_dim, value_dim, time, state_dtype, seed):
    """At real sizes: close to the xla form in float32, and bitwise identical in ten runs."""
    case = cases.Case(head_dim=head_dim, value_dim=value_dim, time=time, decay="gentle", group=2)
    drawn = cases.arrays(case, kv_heads=2, seed=seed, dtype="bfloat16")
    exact = {name: jnp.asarray(drawn[name], jnp.float32) for name in ("query", "key", "value", "log_decay")}
    brief = {
        name: x.astype(jnp.float32 if name == "log_decay" else jnp.bfloat16) for name, x in exact.items()
    }
    plain_form = functools.partial(ops.power_attention, form="chunked", implementation="xla")
    expected = jax.jit(plain_form)(**exact)
    kernels = jax.jit(
        functools.partial(
            power_state.power_state, power=2, exact_window=64, state_dtype=jnp.dtype(state_dtype)
        )
    )
    first = kernels(**brief)
    # The result is rounded to bfloat16, which costs 1.6e-3.
    assert cases.error(first[0], expected) <= 1.2 * cases.error(expected.astype(jnp.bfloat16), expected)
    for _ in range(10):
        same = jax.tree.map(lambda a, b: bool((a == b).all()), kernels(**brief), first)
        assert all(jax.tree.leaves(same))
