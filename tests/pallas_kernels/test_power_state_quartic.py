"""Tests of the p = 4 state kernels together, interpreted, against the formula in float64 and the plain JAX form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.power_state import config as configs
from sympow_jax import ops
from tests.ops import cases
from tests.pallas_kernels import test_power_state as states

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(900)]

# States are to be right to float16's rounding of operands.
STATE_ERROR = 2.0**-11


def error_of_plain(drawn, chunk, expected):
    def kind(name, x):
        return x.dtype if x.dtype == np.int32 else jnp.float32 if name == "log_decay" else jnp.bfloat16

    arrays = {name: None if x is None else jnp.asarray(x, kind(name, x)) for name, x in drawn.items()}
    run = functools.partial(ops.power_attention, power=4, form="chunked", implementation="xla")
    return cases.error(jax.jit(functools.partial(run, chunk_size=chunk))(**arrays), expected)


# Chunks of 64, 128 and 192 give a block of the query one, two and three warpgroups; values of up to 16 make stacks of
# four scalars, larger ones of two.
CASES = [
    (cases.Case(power=4, time=150, decay="gentle"), 64),
    (cases.Case(power=4, time=190, decay="mixed", segments="edges", group=2), 128),
    (cases.Case(power=4, time=260, decay="none", scale=1e3), 192),
    (cases.Case(power=4, head_dim=12, time=150, value_dim=24, decay="gentle", scale=1e-3), 64),
    pytest.param(
        cases.Case(power=4, head_dim=32, value_dim=32, time=130, decay="gentle"), 64, marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("case", "chunk"), CASES, ids=str)
def test_output_is_as_exact_as_the_plain_form(case, chunk):
    drawn = states.drawn_case(case)
    expected = states.formula(drawn, power=4)
    out, denominator, _ = states.run_kernels(drawn, chunk=chunk, power=4)
    assert out.dtype == jnp.bfloat16
    assert denominator.shape == out.shape[:-1]
    assert cases.error(out, expected) <= 1.2 * error_of_plain(drawn, chunk, expected)


def test_states_in_and_out(monkeypatch):
    """The final state equals the reference's, and a run that continues from it gives the outputs of the whole."""
    # Two segments of the one head, of which the second is shorter.
    monkeypatch.setattr(configs, "MULTIPROCESSORS", 10)
    drawn = states.drawn_case(cases.Case(power=4, time=280, decay="gentle"))
    cut = 160
    first = {name: None if x is None else x[:, :cut] for name, x in drawn.items()}
    _, _, (kv, norm) = states.run_kernels(first, chunk=64, power=4)
    _, state = states.formula(first, power=4, return_state=True)
    assert cases.error(kv, state.kv) <= STATE_ERROR
    assert cases.error(norm, state.norm) <= STATE_ERROR

    # The last 64 positions before the cut are not in the state: the next run begins with them.
    rest = {name: None if x is None else x[:, cut - 64 :] for name, x in drawn.items()}
    out, _, _ = states.run_kernels(rest, chunk=64, power=4, initial_state=(kv, norm))
    expected = states.formula(drawn, power=4)
    assert cases.error(out, expected[:, cut - 64 :]) <= 1.2 * error_of_plain(drawn, 64, expected)


def test_zero_queries_give_zero():
    drawn = states.drawn_case(cases.Case(power=4, time=128, decay="gentle"))
    drawn["query"][:, 70:80] = 0
    out, _, _ = states.run_kernels(drawn, power=4)
    assert not np.asarray(out[:, 70:80]).any()
    assert np.isfinite(np.asarray(out, np.float32)).all()


UNSUPPORTED = {
    "head_dim": ({}, {"head_dim": 64}),
    "value_dim": ({}, {"value_dim": 48}),
    "states": ({"state_dtype": jnp.bfloat16}, {}),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_kernels_cannot_do_is_named(name):
    options, sizes = UNSUPPORTED[name]
    drawn = states.drawn_case(cases.Case(**{"power": 4, "time": 128} | sizes))
    with pytest.raises(NotImplementedError, match=f"need.*{name}.*power 4"):
        states.run_kernels(drawn, power=4, **options)
