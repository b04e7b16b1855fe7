"""Tests of the op around plain-JAX stand-ins for the state kernels: values, gradients, states in and out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from sympow_jax.ops._shared import target
from tests.ops import cases
from tests.ops import test_power_attention as suite
from tests.pallas_kernels import plain, plain_quartic
from tests.pallas_kernels import test_op as interpreted


@pytest.fixture(autouse=True)
def _without_kernels():
    with target.interpreted(object()), plain.kernels(), plain_quartic.kernels():
        yield


CASES = [
    cases.Case(head_dim=32, value_dim=24, time=330, decay="mixed", segments="padded", group=2),
    cases.Case(head_dim=20, value_dim=64, time=260, decay="gentle", scale=1e3),
    pytest.param(
        cases.Case(head_dim=64, value_dim=32, time=256, decay="none", segments="edges", scale=1e-3),
        marks=pytest.mark.slow,
    ),
    cases.Case(power=4, time=200, decay="mixed", segments="padded", group=2),
    pytest.param(
        cases.Case(power=4, head_dim=12, value_dim=24, time=260, decay="gentle", scale=1e-3),
        marks=pytest.mark.slow,
    ),
    pytest.param(
        cases.Case(power=4, head_dim=32, value_dim=32, time=200, decay="gentle"), marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case):
    drawn = cases.arrays(case, batch=2, dtype="bfloat16")
    expected = suite.expected_for(drawn, case)
    short = suite.cast(drawn, "bfloat16")

    def errors(implementation):
        actual = suite.outputs_and_gradients(
            short, implementation=implementation, form="chunked", power=case.power, chunk_size=64
        )
        return suite.errors(jax.device_get(actual), expected, drawn)

    interpreted.check(errors("mosaic_gpu"), errors("xla"))


@pytest.mark.parametrize("power", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_of_states(power):
    """Checks the gradient of the initial state, from that of the final one, in float32."""
    size = {2: 32, 4: 12}[power]
    case = cases.Case(power=power, head_dim=size, value_dim=size, time=200, decay="gentle", group=2)
    arrays = suite.cast(cases.arrays(case, batch=2, kv_heads=2, dtype="bfloat16"), "bfloat16")
    dout = arrays.pop("dout")
    first, second = (
        {name: None if x is None else x[:, part] for name, x in arrays.items()}
        for part in (slice(0, 120), slice(120, None))
    )
    fixed = {"form": "chunked", "chunk_size": 64, "power": power}
    call = functools.partial(ops.power_attention, **fixed, implementation="xla", return_state=True)
    _, state = jax.jit(call)(**first)
    shape = (*state.norm.shape, size + 1)
    weights = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)

    def loss(state, arrays, implementation):
        out, state = ops.power_attention(
            **arrays, **fixed, implementation=implementation, initial_state=state, return_state=True
        )
        total = (out.astype(jnp.float32) * dout[:, 120:].astype(jnp.float32)).sum()
        return total + (weights[..., :-1] * state.kv).sum() + (weights[..., -1] * state.norm).sum()

    def gradients(implementation, dtype):
        function = functools.partial(loss, implementation=implementation)
        return jax.jit(jax.grad(function, allow_int=True))(state, suite.cast(second, dtype))

    expected, actual = gradients("xla", "float32"), gradients("mosaic_gpu", "bfloat16")
    for name in ("kv", "norm", "keys", "values", "log_decays"):
        found, wanted = (jax.device_get(getattr(x, name)) for x in (actual, expected))
        # The window's keys and values are rounded to bfloat16 in between.
        assert cases.error(found, wanted) <= 2.0 ** (-9 if name in ("keys", "values") else -11), name
