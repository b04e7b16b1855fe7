"""Tests of the op around plain-JAX stand-ins for the state kernels: values, gradients, states in and out."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.power_state.square import forward
from sympow_jax import ops
from sympow_jax.ops import target
from tests import marked
from tests.ops import cases
from tests.ops import test_power_attention as suite
from tests.pallas_kernels import plain, plain_quartic
from tests.pallas_kernels import test_op as interpreted

FIXED = {"form": "chunked", "chunk_size": 64}


@pytest.fixture(autouse=True)
def _without_kernels():
    with target.interpreted(object()), plain.kernels(), plain_quartic.kernels():
        yield


CASES = [
    cases.Case(head_dim=32, value_dim=24, time=330, decay="mixed", segments="padded", group=2),
    cases.Case(head_dim=20, value_dim=64, time=260, decay="gentle", scale=1e3),
    cases.Case(head_dim=64, value_dim=32, time=256, decay="none", segments="edges", scale=1e-3),
    cases.Case(power=4, time=200, decay="mixed", segments="padded", group=2),
    cases.Case(power=4, time=200, decay="mixed", segments="edges", group=2, scale=1e3),
    cases.Case(power=4, time=1024, decay="none"),
    cases.Case(power=4, head_dim=12, value_dim=24, time=260, decay="gentle", scale=1e-3),
    cases.Case(power=4, head_dim=32, value_dim=32, time=200, decay="gentle"),
]


# One case over devices is in tests/ops/test_time_axis.py, which the default run has.
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case):
    interpreted.check_values_and_gradients(case, batch=2, **FIXED)


def test_queries_of_few_keys_with_small_weights():
    """The backward pass reads an output that is not rounded; without one, the kernel writes no remainder."""
    drawn = suite.arrays(suite.HALF, dtype="bfloat16")
    short, expected = cases.cast(drawn, "bfloat16"), suite.expected_for(drawn, suite.HALF)
    arrays = {name: x for name, x in short.items() if name != "dout"}
    query_states = mock.Mock(side_effect=plain.query_states)
    with mock.patch.object(forward.query_kernel, "query_states", query_states):
        jax.eval_shape(lambda x: ops.power_attention(**x, implementation="mosaic_gpu", **FIXED), arrays)
    assert [call.kwargs["with_remainder"] for call in query_states.call_args_list] == [False]

    found = (
        suite.outputs_and_gradients(short, implementation=name, **FIXED) for name in ("mosaic_gpu", "xla")
    )
    interpreted.check(*(cases.errors(jax.device_get(x), expected, drawn) for x in found))


@marked.cases(
    ("power", "scale", "zeros"), [(2, 1e-5, 30), (2, 1.0, 150)], slow=[(4, 1e-3, 30), (4, 1.0, 150)]
)
def test_keys_of_zeros_do_not_set_the_scale_of_states(power, scale, zeros):
    """Padding has such keys. With many of them, all keys of the first chunks are zeros."""
    case = cases.Case(power=power, time=260, decay="gentle", scale=scale)
    drawn = cases.arrays(case, batch=1, dtype="bfloat16")
    drawn["key"][:, :zeros] = 0
    expected, short = suite.expected_for(drawn, case), cases.cast(drawn, "bfloat16")
    found = (
        suite.outputs_and_gradients(short, implementation=name, power=power, **FIXED)
        for name in ("mosaic_gpu", "xla")
    )
    interpreted.check(*(cases.errors(jax.device_get(x), expected, drawn) for x in found))


@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy
@marked.cases("power", [4], slow=[2])
def test_a_nan_stays_one_in_its_own_head(power):
    case = cases.Case(power=power, time=150, decay="gentle")
    short = cases.cast(cases.arrays(case, batch=2, kv_heads=2, dtype="bfloat16"), "bfloat16")
    short["key"] = short["key"].at[1, 100, 0, 3].set(jnp.nan)
    found = suite.outputs_and_gradients(short, implementation="mosaic_gpu", power=power, **FIXED)
    for name, x in jax.device_get(found).items():
        nan = np.isnan(np.asarray(x, np.float32).reshape(2, 150, 2, -1)).all(-1)
        assert nan[1, 100:, 0].all(), name
        assert not nan[0].any(), name
        assert not nan[1, :, 1].any(), name


@pytest.mark.parametrize(("power", "scale"), [(2, 2.0**-64), (4, 2.0**-33)])
def test_a_state_of_zeros_is_none(power, scale):
    """Also where the sums of the first keys are so small that no float32 takes a state of zeros to their scale."""
    case = cases.Case(power=power, time=260, decay="none")
    drawn = cases.arrays(case, batch=1, dtype="bfloat16")
    drawn["key"][:, :160] *= scale
    arrays = {name: x for name, x in cases.cast(drawn, "bfloat16").items() if name != "dout"}
    call = functools.partial(ops.power_attention, **arrays, **FIXED, power=power, implementation="mosaic_gpu")
    head_dim, value_dim = (arrays[name].shape[-1] for name in ("key", "value"))
    kv_heads = arrays["key"].shape[2]
    zeros = ops.PowerState.zeros(1, kv_heads, head_dim, value_dim, power=power)
    np.testing.assert_array_equal(call(initial_state=zeros), call())


@marked.cases(("power", "size"), [(4, 1e-3), (2, 1.0)], slow=[(4, 1.0), (2, 1e-6)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_in_a_state_stays_in_its_channel(power, size, bad):
    case = cases.Case(power=power, time=260, decay="gentle")
    drawn = cases.arrays(case, batch=1, dtype="bfloat16")
    drawn = cases.cast(drawn | {"key": drawn["key"] * size}, "bfloat16")
    call = functools.partial(ops.power_attention, **FIXED, power=power, return_state=True)

    def part(begin, end):
        return {name: x[:, begin:end] for name, x in drawn.items() if name != "dout" and x is not None}

    _, state = call(**part(0, 130), implementation="xla")
    broken = dataclasses.replace(state, kv=state.kv.at[..., 0].set(bad))
    found, expected = (
        call(**part(130, 260), initial_state=x, implementation="mosaic_gpu")[0] for x in (broken, state)
    )
    assert not np.isfinite(np.asarray(found[..., 0], np.float32)).any()
    np.testing.assert_array_equal(found[..., 1:], expected[..., 1:])


@marked.cases(("power", "values"), [(2, 1), (2, 0)], slow=[(4, 1), (4, 0)])
def test_states(power, values):
    """Checks outputs and states after a state, and all gradients, from those of outputs and of the final state.

    values: 0 for an initial state and a final gradient that have normalizers only.
    """
    size = {2: 20, 4: 12}[power]
    case = cases.Case(power=power, head_dim=size, value_dim=10, time=200, decay="gentle", group=2)
    drawn = cases.arrays(case, batch=2, kv_heads=2, dtype="bfloat16")
    dout = drawn.pop("dout")[:, 120:]
    drawn["value"][:, :120] *= values
    call = functools.partial(ops.power_attention, power=power, return_state=True)

    @functools.partial(jax.jit, static_argnames="implementation")
    def results(state, arrays, implementation):
        def loss(state, arrays):
            fixed = FIXED if implementation == "mosaic_gpu" else {}
            out, final = call(**arrays, **fixed, implementation=implementation, initial_state=state)
            total = (out.astype(dout.dtype) * dout).sum() + (values * weights[..., :-1] * final.kv).sum()
            return total + (weights[..., -1] * final.norm).sum(), (out, final)

        return jax.grad(loss, (0, 1), has_aux=True, allow_int=True)(state, arrays)

    def part(x, begin, end):
        return {name: None if y is None else y[:, begin:end] for name, y in x.items()}

    with jax.enable_x64(True):
        exact = cases.cast(drawn, "float64")
        reference = functools.partial(call, implementation="reference")
        _, state = jax.jit(lambda arrays: reference(**arrays))(part(exact, 0, 120))
        weights = np.random.default_rng(0).normal(size=(*state.norm.shape, 11))
        expected = jax.device_get(results(state, part(exact, 120, None), "reference"))
        state = jax.device_get(state)
    state, weights, dout = (
        jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, x)
        for x in (state, weights, dout)
    )
    short = part(cases.cast(drawn, "bfloat16"), 120, None)
    found = jax.device_get(results(state, short, "mosaic_gpu"))
    ((dstate, gradients), (out, final)), ((wanted_dstate, wanted), (wanted_out, wanted_final)) = (
        found,
        expected,
    )
    assert cases.error(out, wanted_out) <= 2.0**-9
    for name in ("kv", "norm"):
        assert cases.error(getattr(final, name), getattr(wanted_final, name)) <= 2.0**-11, name
    for name in ("kv", "norm", "keys", "values", "log_decays"):
        # The window's keys and values are rounded to bfloat16 in between.
        bound = 2.0 ** (-9 if name in ("keys", "values") else -11)
        assert cases.error(getattr(dstate, name), getattr(wanted_dstate, name)) <= bound, name
    for name in cases.GRADIENTS:
        assert cases.error(gradients[name], wanted[name]) <= 2.0**-9, name


@marked.cases(
    ("scale", "end", "pass_"),
    [(1e3, 130, "forward")],
    slow=[(scale, end, "both") for scale, end in ((1e3, 130), (1e-3, 130), (1e-4, 260), (1e4, 260))],
)
def test_two_devices_are_one(scale, end, pass_):
    """The keys of the first device, or of both, are multiplied by `scale`: a state arrives at one of another size."""
    case = cases.Case(head_dim=32, value_dim=24, time=260, decay="gentle", group=2)
    drawn = cases.arrays(case, batch=1, kv_heads=2, dtype="bfloat16")
    drawn["key"][:, :end] *= scale
    drawn["log_decay"][:, 20] = -100.0
    arrays = {name: x for name, x in cases.cast(drawn, "bfloat16").items() if x is not None}
    dout = arrays.pop("dout")

    def results(axis_name):
        def call(arrays):
            return ops.power_attention(**arrays, **FIXED, implementation="mosaic_gpu", axis_name=axis_name)

        spec = jax.P(None, "time")
        mesh = jax.make_mesh((2,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
        mapped = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec) if axis_name else call
        if pass_ == "forward":
            return {}, jax.device_get(jax.jit(mapped)(arrays))

        def loss(arrays):
            out = mapped(arrays)
            return (out * dout).sum(dtype=jnp.float32), out

        return jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(arrays))

    (gradients, out), (expected, wanted) = results("time"), results(None)
    assert cases.error(out, wanted) <= 2.0**-11
    for name, x in expected.items():
        assert cases.error(gradients[name], x) <= 2.0**-8, name
