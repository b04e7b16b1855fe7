"""Tests of the op by its kernels, interpreted, in the suite of the other implementations: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from sympow_jax import ops
from sympow_jax.ops import target
from tests.ops import cases
from tests.ops import test_power_attention as suite

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def _interpreted():
    with target.interpreted(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def check(kernel, plain):
    """Checks that results are at most a fifth less exact than those of plain JAX on the same bfloat16 inputs.

    The gradient of the decays is float32, which the kernels' operands of 11 bits and more are not.
    """
    for name, error in kernel.items():
        bound = 1.2 * plain[name] if name != "log_decay" else max(1.2 * plain[name], 2.0**-11)
        assert error <= bound, (name, kernel, plain)


# Rows of more than one block of 64, and chunks that the last one does not fill.
CASES = {
    "attention": [
        cases.Case(time=150, decay="mixed", segments="padded", group=2),
        cases.Case(power=4, time=140, decay="none", scale=1e3),
        cases.Case(power=4, time=150, decay="gentle", segments="padded", group=2),
    ],
    "chunked": [
        cases.Case(head_dim=32, value_dim=24, time=200, decay="mixed", segments="padded", group=2),
        cases.Case(head_dim=64, value_dim=64, time=190, decay="none", scale=1e-3),
        cases.Case(power=4, time=140, decay="gentle", segments="padded"),
    ],
}


@pytest.mark.parametrize(
    ("form", "case"), [(form, case) for form, of_form in CASES.items() for case in of_form], ids=str
)
def test_values_and_gradients(form, case):
    check_values_and_gradients(case, batch=1, form=form, chunk_size=64 if form == "chunked" else None)


def check_values_and_gradients(case, *, batch, form, chunk_size):
    drawn = cases.arrays(case, batch=batch, dtype="bfloat16")
    expected = suite.expected_for(drawn, case)
    short = cases.cast(drawn, "bfloat16")

    def errors(implementation):
        actual = suite.outputs_and_gradients(
            short, implementation=implementation, form=form, power=case.power, chunk_size=chunk_size
        )
        assert actual["out"].dtype == actual["query"].dtype == jnp.bfloat16
        return cases.errors(jax.device_get(actual), expected, drawn)

    check(errors("mosaic_gpu"), errors("xla"))


@pytest.mark.parametrize("form", ["attention", "chunked"])
def test_a_nan_is_not_hidden(form):
    """One NaN in a key makes NaN of the outputs and query gradients from its position on, not zeros."""
    drawn = cases.arrays(
        cases.Case(head_dim=32, value_dim=32, time=150, decay="none"), batch=1, dtype="bfloat16"
    )
    short = cases.cast(drawn, "bfloat16")
    short["key"] = short["key"].at[0, 100, 0, 3].set(jnp.nan)
    chunk_size = 64 if form == "chunked" else None
    actual = suite.outputs_and_gradients(
        short, implementation="mosaic_gpu", form=form, power=2, chunk_size=chunk_size
    )
    for name in ("out", "query"):
        found = np.isnan(np.asarray(actual[name], np.float32)[0, :, 0]).all(-1)
        assert found[100:].all(), (name, np.flatnonzero(~found))


def test_a_sequence_split_in_two():
    """A kernel state continues in the kernels and its gradient returns, as exactly as in one plain call."""
    case = cases.Case(head_dim=32, value_dim=32, time=260, decay="gentle", segments="padded")
    drawn = cases.arrays(case, batch=2, dtype="bfloat16")
    expected = suite.expected_for(drawn, case)
    short = cases.cast(drawn, "bfloat16")
    fixed = {"form": "chunked", "chunk_size": 64}
    plain = suite.outputs_and_gradients(short, implementation="xla", power=2, **fixed)
    dout, segment_ids = short.pop("dout"), short.pop("segment_ids")

    def loss(arrays):
        out, state = [], None
        for part in (slice(0, 141), slice(141, None)):
            cut = {name: x[:, part] for name, x in arrays.items()} | {"segment_ids": segment_ids[:, part]}
            o, state = ops.power_attention(
                **cut, **fixed, implementation="mosaic_gpu", initial_state=state, return_state=True
            )
            out.append(o)
        out = jnp.concatenate(out, 1)
        return (out * dout).sum(dtype=jnp.float32), out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True))(short)
    kernel = {"out": out} | gradients
    check(*(cases.errors(jax.device_get(x), expected, drawn) for x in (kernel, plain)))


def test_by_step_after_a_prompt_that_is_shorter_than_the_window():
    """The window of kernels is whole blocks, whatever the length."""
    drawn = cases.cast(cases.arrays(cases.Case(head_dim=32, time=40, decay="gentle"), batch=1), "bfloat16")
    del drawn["dout"]
    call = functools.partial(ops.power_attention, **drawn, form="chunked", return_state=True)
    (out, state), (expected, plain) = (call(implementation=name) for name in ("mosaic_gpu", "xla"))
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, expected)), atol=1e-2)
    for name in ("kv", "norm", "keys", "length"):
        np.testing.assert_array_equal(getattr(state, name), getattr(plain, name))
