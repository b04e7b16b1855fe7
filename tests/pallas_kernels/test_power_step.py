"""Tests of the step kernels: interpreted on a CPU, compiled for an H100, and within the op."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_step as kernels
from sympow_jax import ops
from sympow_jax.ops import target
from sympow_jax.ops.backends import hopper_step
from tests.ops import cases
from tests.pallas_kernels import marks
from tools import h100

WINDOW = 4
NAMES = ("query", "key", "value", "log_decay", "segment_ids")
INTERPRETED = {
    "documents": cases.Case(time=20, decay="gentle", segments="padded", group=2),
    "no decay": cases.Case(time=18, decay="none", value_dim=40),
    "mixed decays": cases.Case(time=20, decay="mixed", head_dim=24, value_dim=16),
    "power 4": cases.Case(power=4, time=12, decay="gentle", group=2),
}


def drawn_case(case, batch=2, kv_heads=2):
    drawn = cases.arrays(case, batch=batch, kv_heads=kv_heads)
    return {
        name: jnp.asarray(x, np.int32 if name == "segment_ids" else np.float32)
        for name, x in drawn.items()
        if name in NAMES and x is not None
    }


def by_steps(step, drawn, power, state=None, exact_window=WINDOW):
    batch, time, kv_heads, head_dim = drawn["key"].shape
    if state is None:
        sizes = batch, kv_heads, head_dim, drawn["value"].shape[-1]
        state = ops.PowerState.zeros(*sizes, power=power, exact_window=exact_window)
    absent = {name: None for name in ("log_decay", "segment_ids") if name not in drawn}
    call = jax.jit(lambda state, token: step(state=state, power=power, **token, **absent))
    for t in range(time):
        out, state = call(state, {name: x[:, t] for name, x in drawn.items()})
        yield out, state


def formula(drawn, power):
    whole = functools.partial(ops.power_attention, power=power, implementation="reference")
    with jax.enable_x64(True):
        exact = {n: x if n == "segment_ids" else np.asarray(x, np.float64) for n, x in drawn.items()}
        return np.asarray(whole(**jax.tree.map(jnp.asarray, exact)))


plain_step = functools.partial(ops.power_attention_step, implementation="xla")


def interpreted_step(detect_races=True, **arguments):
    with target.interpreted(plgpu.InterpretGPUParams(detect_races=detect_races)):
        return ops.power_attention_step(**arguments, implementation="mosaic_gpu")


@pytest.mark.interpret
@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name, monkeypatch):
    """Each token's output and state are those of the xla step, and the outputs those of the reference."""
    # One row of the batch per call, so that a fold of several rows needs several calls.
    monkeypatch.setattr(hopper_step, "_CACHED_BYTES", 1)
    case = INTERPRETED[name]
    # Degree 4 has 3,876 features, which are slow to interpret.
    drawn = drawn_case(case, kv_heads=1 if case.power == 4 else 2)
    expected = formula(drawn, case.power)
    outputs, plain_outputs, folded = [], [], False
    both = zip(by_steps(interpreted_step, drawn, case.power), by_steps(plain_step, drawn, case.power))
    for (out, state), (plain, plain_state) in both:
        for field in ("kv", "norm"):
            assert cases.error(getattr(state, field), getattr(plain_state, field)) <= 1e-6
        for field in ("keys", "values", "log_decays", "length", "segment"):
            np.testing.assert_array_equal(getattr(state, field), getattr(plain_state, field))
        folded |= bool(state.norm.any())
        outputs.append(out)
        plain_outputs.append(plain)
    assert folded
    actual, plain = jnp.stack(outputs, 1), jnp.stack(plain_outputs, 1)
    assert cases.error(actual, plain) <= 1e-6
    assert cases.error(actual, expected) <= max(1.2 * cases.error(plain, expected), 1e-6)


@pytest.mark.interpret
def test_rows_are_ragged():
    """Rows fill up at different tokens: full rows are folded, the others are unchanged."""
    drawn = drawn_case(cases.Case(time=12, decay="gentle"), batch=3)
    drawn["segment_ids"] = jnp.where(jnp.arange(12) < jnp.array([[0], [1], [3]]), -1, 0).astype(jnp.int32)
    lengths = []
    both = zip(by_steps(interpreted_step, drawn, 2), by_steps(plain_step, drawn, 2))
    for (out, state), (plain, plain_state) in both:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5), state, plain_state)
        np.testing.assert_allclose(out, plain, rtol=2e-5, atol=1e-5)
        lengths.append(state.length.tolist())
    assert lengths[7] == [4, 7, 5]


@pytest.mark.interpret
def test_gradients_are_those_of_the_xla_step():
    drawn = drawn_case(cases.Case(time=10, decay="gentle", segments="padded", group=2))
    segment_ids = drawn.pop("segment_ids")
    dout = jnp.asarray(np.random.default_rng(1).normal(size=drawn["query"].shape), jnp.float32)

    def gradients(step):
        def loss(arrays):
            outputs = by_steps(step, arrays | {"segment_ids": segment_ids}, 2)
            outputs, states = zip(*outputs)
            return (jnp.stack(outputs, 1) * dout).sum() + (states[-1].kv ** 2).sum()

        return jax.grad(loss)(drawn)

    expected, actual = (
        gradients(plain_step),
        gradients(functools.partial(interpreted_step, detect_races=False)),
    )
    for name in expected:
        assert cases.error(actual[name], expected[name]) <= 2e-6, name


def test_constraints_are_named():
    def choose(
        group=1, features=2080, head_dim=64, value_dim=64, dtype=jnp.float32, exact_window=64, power=2
    ):
        kv = jax.ShapeDtypeStruct((1, 8, features, value_dim), dtype)
        return kernels.choose((1, 8, group, head_dim), kv, exact_window=exact_window, power=power)

    choose()
    for wrong, message in (
        ({"dtype": jnp.float64}, "float32 states, not float64"),
        ({"power": 18}, "power up to 16, not 18"),
        ({"head_dim": 20}, "head_dim a multiple of 8 up to 128, not 20"),
        ({"value_dim": 136}, "value_dim a multiple of 8 up to 128, not 136"),
        ({"features": 330}, "features in multiples of 4.* not 330"),
        ({"features": 64 * 2**16}, "at most 4194240 features, not 4194304"),
        ({"exact_window": 0}, "window from 1 to 128, not 0"),
        ({"exact_window": 7, "value_dim": 40}, "multiple of 32, the size of copies, not 7 and 40"),
        ({"group": 64}, "at most 16 query heads for each key head where value_dim is 64, not 64"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            choose(**wrong)


def test_named_implementation_needs_a_hopper_gpu():
    state = ops.PowerState.zeros(1, 1, 16, 16, power=2)
    token = {name: jnp.zeros((1, 1, 16)) for name in ("query", "key", "value")}
    with pytest.raises(NotImplementedError, match="Hopper"):
        ops.power_attention_step(**token, state=state, implementation="mosaic_gpu")


@pytest.mark.h100
@marks.needs_compiler
@pytest.mark.parametrize("documents", [False, True])
def test_a_donated_state_is_not_copied(documents):
    """There is no copy, either at tokens where W tokens are folded or at the others."""
    text = h100.run("tests.pallas_kernels.sharded", "step-documents" if documents else "step")
    assert text.count('custom_call_target="mosaic_gpu') == 2
    state = r"= \(?f32\[64,8,2080,64\]\S* "
    assert not re.search(state + "copy", text)
    # The first token of a document clears its row in place; nothing else allocates a state.
    assert len(re.findall(state + r"fusion\(", text)) == documents


@pytest.mark.h100
@marks.needs_compiler
def test_no_gather_around_the_kernels_on_eight_devices():
    text = h100.run("tests.pallas_kernels.sharded", "step-sharded")
    assert text.count('custom_call_target="mosaic_gpu') == 2
    assert "f32[16,4,2080,64]" in text
    assert "all-gather" not in text


@pytest.mark.gpu
@pytest.mark.parametrize(("power", "width"), [(2, 64), (2, 128), (4, 16)])
@pytest.mark.parametrize("batch", [1, 32])
def test_on_a_gpu(power, width, batch):
    """At real sizes, over several folds: as exact as the xla step, and bitwise identical in ten runs."""
    case = cases.Case(
        power=power, head_dim=width, value_dim=width, time=250, decay="gentle", segments="edges", group=2
    )
    drawn = drawn_case(case, batch=batch, kv_heads=8)
    first, before, last = run(drawn, power, "mosaic_gpu")
    plain_out, _, plain = run(drawn, power, "xla")
    expected = np.moveaxis(formula(drawn, power), 1, 0)
    assert cases.error(first, expected) <= max(1.2 * cases.error(plain_out, expected), 2e-6)
    assert last.kv.any()
    assert cases.error(last.kv, plain.kv) <= 2e-6
    token = {name: x[:, -1:] for name, x in drawn.items()}
    for _ in range(10):
        again, _, state = run(token, power, "mosaic_gpu", before)
        assert (again[-1] == first[-1]).all()
        assert (state.kv == last.kv).all()


def run(drawn, power, implementation, state=None):
    step = functools.partial(ops.power_attention_step, implementation=implementation)
    outputs, before = [], state
    for out, after in by_steps(step, drawn, power, state=state, exact_window=16):
        outputs.append(out)
        before, state = state, after
    return jnp.stack(outputs), before, state
