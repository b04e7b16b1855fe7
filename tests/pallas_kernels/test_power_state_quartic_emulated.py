"""Tests of the code around the p = 4 state kernels, with NumPy stand-ins that have the same roundings.

They run in seconds, where interpreting the kernels takes minutes, and cover layouts, scales, decays, segments and
normalizers.
"""

import jax
import pytest

from tests.ops import cases
from tests.pallas_kernels import plain_quartic as plain
from tests.pallas_kernels import test_power_state as states
from tests.pallas_kernels import test_power_state_quartic as interpreted


@pytest.fixture(autouse=True)
def _without_kernels():
    with plain.kernels():
        yield


def run_compiled(drawn, **options):
    """Runs the code around the kernels as one program, which compiles faster than each of its operations."""
    return jax.jit(lambda: states.run_kernels(drawn, **options))()


CASES = [
    (cases.Case(power=4, time=200, decay="mixed", segments="edges", group=2, scale=1e3), 64),
    *(
        pytest.param(case, chunk, marks=pytest.mark.slow)
        for case, chunk in (
            (cases.Case(power=4, time=1024, decay="none"), 256),
            (cases.Case(power=4, head_dim=12, time=150, value_dim=24, decay="gentle", scale=1e-3), 64),
            (cases.Case(power=4, time=200, head_dim=32, value_dim=32, decay="none"), 64),
        )
    ),
]


@pytest.mark.parametrize(("case", "chunk"), CASES, ids=str)
def test_output_and_state(case, chunk):
    drawn = states.drawn_case(case, kv_heads=2 if case.head_dim == 16 else 1)
    expected = states.formula(drawn, power=4)
    out, _, _ = run_compiled(drawn, chunk=chunk, power=4)
    assert cases.error(out, expected) <= 1.2 * interpreted.error_of_plain(drawn, chunk, expected)


def test_states_in_and_out():
    """Uses sizes that are padded."""
    case = cases.Case(power=4, head_dim=12, value_dim=10, time=260, decay="gentle")
    drawn = states.drawn_case(case, kv_heads=2)
    cut = 150
    first = {name: None if x is None else x[:, :cut] for name, x in drawn.items()}
    _, _, state = run_compiled(first, chunk=64, power=4)
    _, wanted = states.formula(first, power=4, return_state=True)
    for actual, expected in zip(state, (wanted.kv, wanted.norm), strict=True):
        assert cases.error(actual, expected) <= interpreted.STATE_ERROR

    rest = {name: None if x is None else x[:, cut - 64 :] for name, x in drawn.items()}
    out, _, _ = run_compiled(rest, chunk=64, power=4, initial_state=state)
    expected = states.formula(drawn, power=4)
    bound = 1.2 * interpreted.error_of_plain(drawn, 64, expected)
    assert cases.error(out, expected[:, cut - 64 :]) <= bound
