"""Tests of the gradient kernels, interpreted, against autodiff of the formula in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_attention as kernel
from sympow_jax import ops
from tests.ops import cases

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(240)]

# T and S around the edges of blocks of 64 and 128; each case also has the changes to its arguments.
CASES = [
    (cases.Case(time=257, decay="gentle"), {}),
    (
        cases.Case(power=4, head_dim=64, value_dim=64, time=130, decay="gentle", segments="padded", group=2),
        {},
    ),
    (cases.Case(power=6, head_dim=48, value_dim=24, time=200, decay="none", segments="edges"), {}),
    (cases.Case(power=4, time=300, decay="gentle", segments="padded"), {"queries": 150}),
    (cases.Case(power=4, head_dim=128, value_dim=128, time=100, decay="gentle"), {}),
    (cases.Case(power=4, time=140, scale=1e3, decay="mixed"), {"dtype": "float16"}),
    (cases.Case(power=16, time=128, scale=1e-3, decay="gentle"), {}),
    (cases.Case(power=8, head_dim=64, time=300, decay="gentle"), {"octaves": 2}),
    (cases.Case(power=16, time=300, decay="gentle"), {"octaves": 2}),
    (cases.Case(power=16, head_dim=64, time=260, decay="none"), {}),
    (cases.Case(power=2, head_dim=96, value_dim=40, time=140, decay="gentle"), {}),
]


def _gradients(arrays, dout, power, interpret):
    dtype = arrays["query"].dtype
    found = kernel.power_attention(**arrays, power=power, interpret=interpret)
    gradients = kernel.power_attention_vjp(
        **arrays, saved=found, dout=dout.astype(dtype), power=power, interpret=interpret
    )
    return dict(zip(cases.GRADIENTS, gradients))


@pytest.mark.parametrize(("case", "more"), CASES, ids=str)
def test_gradients(case, more):
    """Errors are little more than the rounding of gradients of 16 bits.

    The gradient of decays is as exact as float32 products.
    """
    dtype, queries = more.get("dtype", "bfloat16"), more.get("queries", case.time)
    drawn = cases.arrays(case, batch=1, kv_heads=1, dtype="bfloat16")
    drawn |= {name: drawn[name][:, -queries:] for name in ("query", "dout")}
    drawn["key"] *= cases.lengths(drawn["key"].shape[:-1], more.get("octaves", 0))[..., None]
    dout = drawn.pop("dout")

    def loss(arguments):
        arrays = drawn | arguments
        out = ops.power_attention(**arrays, power=case.power, form="attention", implementation="reference")
        return (out * dout).sum()

    with jax.enable_x64(True):
        arguments = {name: jnp.asarray(drawn[name]) for name in cases.GRADIENTS if drawn[name] is not None}
        expected = jax.device_get(jax.grad(loss)(arguments))
    short = {name: jnp.asarray(drawn[name], dtype) for name in ("query", "key", "value")}
    for name, kind in (("log_decay", jnp.float32), ("segment_ids", jnp.int32)):
        short[name] = None if drawn[name] is None else jnp.asarray(drawn[name], kind)
    run = functools.partial(
        _gradients, power=case.power, interpret=plgpu.InterpretGPUParams(detect_races=True)
    )
    actual = jax.device_get(jax.jit(run)(short, jnp.asarray(dout, dtype)))
    for name, value in expected.items():
        error = cases.error(actual[name], value, cases.natural_size(name, drawn | {"dout": dout}))
        assert error <= (1e-5 if name == "log_decay" else 2.0**-9), (name, error)


def test_nothing_weighs_anything():
    drawn = cases.arrays(cases.Case(head_dim=32, time=130), batch=2, dtype="bfloat16")
    drawn["query"][:, 5:9] = 0
    drawn["key"][:, :3] = 0
    drawn["key"][1] = 0
    dout = jnp.asarray(drawn.pop("dout"), jnp.bfloat16)
    short = {name: jnp.asarray(drawn[name], jnp.bfloat16) for name in ("query", "key", "value")}
    short |= {"log_decay": jnp.asarray(drawn["log_decay"], jnp.float32), "segment_ids": None}
    run = functools.partial(_gradients, power=2, interpret=plgpu.InterpretGPUParams())
    actual = jax.device_get(jax.jit(run)(short, dout))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in actual.values())
    assert not actual["query"][:, :9].any(
        where=np.r_[[True] * 3, [False] * 2, [True] * 4][None, :, None, None]
    )
    assert not actual["key"][:, :3].any()
    assert actual["key"].any()


def test_heads_and_rows_without_a_cotangent():
    """Their gradients are zero, as those of a loss over other rows are, and others are as without them."""
    case = cases.Case(head_dim=32, value_dim=32, time=130, decay="gentle")
    drawn = cases.arrays(case, batch=2, kv_heads=2, dtype="bfloat16")
    dout = drawn.pop("dout")
    dout[1], dout[0, :, 0], dout[0, :70] = 0, 0, 0
    drawn["key"][0, 0] *= 2.0**-50
    short = {name: jnp.asarray(drawn[name], jnp.bfloat16) for name in ("query", "key", "value")}
    short |= {"log_decay": jnp.asarray(drawn["log_decay"], jnp.float32), "segment_ids": None}
    run = functools.partial(_gradients, power=2, interpret=plgpu.InterpretGPUParams())
    actual = jax.device_get(jax.jit(run)(short, jnp.asarray(dout, jnp.bfloat16)))
    for name, x in actual.items():
        x = np.asarray(x, np.float32)
        assert np.isfinite(x).all(), name
        assert x[0, :, 1].any(), name
        assert not x[1].any(), name
        assert not x[0, :, 0].any(), name


def test_a_first_token_whose_score_is_almost_zero():
    """It attends to itself alone: its weight is 1, and its value's gradient the cotangent, however small the score."""
    shape = 1, 64, 8, 64
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, dout = (jax.random.normal(x, shape) for x in keys)
    along = (query * key).sum(-1, keepdims=True) / (key * key).sum(-1, keepdims=True)
    query = query.at[:, 0].set((query - along * key)[:, 0])
    query, key, value, dout = (x.astype(jnp.bfloat16) for x in (query, key, value, dout))
    score = (query[:, 0].astype(jnp.float32) * key[:, 0].astype(jnp.float32)).sum(-1)
    lengths = jnp.linalg.norm(query[:, 0].astype(jnp.float32), axis=-1) * jnp.linalg.norm(
        key[:, 0].astype(jnp.float32), axis=-1
    )
    assert float(jnp.abs(score / lengths).max()) < 1e-3
    arrays = {"query": query, "key": key, "value": value, "log_decay": jnp.full(shape[:3], -200.0)}
    gradients = _gradients(arrays, dout, 2, plgpu.InterpretGPUParams())
    assert all(bool(jnp.isfinite(x).all()) for x in gradients.values())
    np.testing.assert_array_equal(gradients["value"], dout)
