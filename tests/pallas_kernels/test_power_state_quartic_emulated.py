"""What surrounds the p = 4 state kernels, with plain arrays in their place that round where they do.

In seconds, where interpreting the kernels takes minutes: layouts, scales, decays, segments and normalisers.
"""

import numpy as np
import pytest

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import quartic
from pallas_kernels.power_state import quartic_layout as layouts
from tests.ops import cases
from tests.pallas_kernels import quartic_state_vjp as plain
from tests.pallas_kernels import test_power_state as states
from tests.pallas_kernels import test_power_state_quartic as interpreted


def update(vector, scalars, value, carry, initial, weights, *, layout, config, chunk, dtype, interpret):
    """As `quartic_update.update`."""
    heads, chunks = carry.shape
    segments = initial.shape[1]
    stored, finals = [], np.array(initial)
    for head in range(heads):
        columns, factors = plain.blocks_and_scalars(
            plain.single(vector[head]), plain.single(scalars[head]), layout
        )
        factors = np.repeat(factors, layout.value_dim, 1)
        for index in range(chunks):
            state = finals[head, index // -(-chunks // segments)]
            stored.append(layouts.beside(plain.rounded(state * plain.single(weights)), layout))
            time = slice(index * chunk, (index + 1) * chunk)
            scaled = plain.rounded(plain.single(value[head, :, time]) * factors[..., time])
            state *= float(carry[head, index])
            state += scaled @ np.swapaxes(columns[..., time], 1, 2)
    shape = (heads, chunks, layout.stacks, layout.value_dim, layout.width)
    return np.stack(stored).reshape(shape).astype(dtype), finals


def query_states(
    query,
    vector,
    scalars,
    stored,
    denominator,
    key,
    value,
    decay,
    scale,
    *,
    layout,
    config,
    chunk,
    window,
    interpret,
):
    """As `quartic_query.query_states`."""
    heads, time, _ = query.shape
    out = np.zeros((heads, time, layout.value_dim), np.float32)
    total = plain.single(denominator).reshape(heads, time).copy()
    first, count, _ = layout.steps.T
    read = np.concatenate([f + np.arange(n * layouts.STEP) for f, n in zip(first, count, strict=True)])
    for head in range(heads):
        held = head // (heads // len(key))
        columns, factors = plain.blocks_and_scalars(
            plain.single(vector[head]).T, plain.single(scalars[head]), layout
        )
        for index in range(time // chunk):
            rows = slice(index * chunk, (index + 1) * chunk)
            features = plain.rounded(factors[read][:, :, None, rows] * columns[read][:, None, :, rows])
            features = features.reshape(len(read), layout.width, chunk)
            old = np.einsum("upt,uep->te", features, plain.single(stored[held, index])[read])
            seen = slice(index * chunk, (index + 1) * chunk + window)
            sums = plain.single(decay[held, index]).reshape(2, -1).sum(0)
            between = np.where(np.tri(chunk, window + chunk, window), sums[window:, None] - sums, -1e4)
            weights = (plain.single(query[head, rows]) @ plain.single(key[held, seen]).T) ** 4 * np.exp2(
                between
            )
            out[head, rows] = old * plain.single(scale[held]).reshape(-1, 1)[rows]
            out[head, rows] += weights @ plain.single(value[held, seen])
            total[head, rows] += weights.sum(1)
    # Rows behind the last query are zero.
    mean = np.divide(out, total[..., None], out=np.zeros_like(out), where=total[..., None] > 0)
    return mean.astype(query.dtype), total


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    monkeypatch.setattr(quartic.update_kernel, "update", update)
    monkeypatch.setattr(quartic.query_kernel, "query_states", query_states)
    # Two segments of two heads, at D = 16.
    monkeypatch.setattr(configs, "MULTIPROCESSORS", 20)


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
    out, _, _ = states.run_kernels(drawn, chunk=chunk, power=4)
    assert cases.error(out, expected) <= 1.2 * interpreted.error_of_plain(drawn, chunk, expected)


def test_states_in_and_out():
    """At sizes that are filled up."""
    case = cases.Case(power=4, head_dim=12, value_dim=10, time=260, decay="gentle")
    drawn = states.drawn_case(case, kv_heads=2)
    cut = 150
    first = {name: None if x is None else x[:, :cut] for name, x in drawn.items()}
    _, _, state = states.run_kernels(first, chunk=64, power=4)
    _, wanted = states.formula(first, power=4, return_state=True)
    for actual, expected in zip(state, (wanted.kv, wanted.norm), strict=True):
        assert cases.error(actual, expected) <= interpreted.STATE_ERROR

    rest = {name: None if x is None else x[:, cut - 64 :] for name, x in drawn.items()}
    out, _, _ = states.run_kernels(rest, chunk=64, power=4, initial_state=state)
    expected = states.formula(drawn, power=4)
    bound = 1.2 * interpreted.error_of_plain(drawn, 64, expected)
    assert cases.error(out, expected[:, cut - 64 :]) <= bound
