"""Compares a sequence split over two devices with one call.

Each half updates an empty state once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import power_state
from tests.ops import cases
from tests.pallas_kernels import plain

WINDOW = 64
OPTIONS = {"power": 2, "chunk": 64, "exact_window": WINDOW, "state_dtype": jnp.float16}
# Half the sequence; the second half's rows begin with the first one's last WINDOW.
TIME, CUT = 260, 132


def part(x, begin, end):
    return x[:, begin:end]


@jax.jit
def compute(arrays, dout, size):
    """Returns what the halves and one call give: outputs, final states, their gradients and those of all arrays.

    The gradient of each final state is `size` everywhere.
    """
    query, key, value, _ = arrays
    # The second half's first rows are the window: visible and folded, but without queries.
    asks = jnp.arange(TIME) >= CUT
    halves = [
        tuple(part(x, 0, CUT) for x in arrays),
        tuple(
            part(jnp.where(asks[None, :, None, None], x, 0) if x is query else x, CUT - WINDOW, TIME)
            for x in arrays
        ),
    ]
    douts = [part(dout, 0, CUT), part(jnp.where(asks[None, :, None, None], dout, 0), CUT - WINDOW, TIME)]
    folds = [jnp.arange(x[1].shape[1])[None] < x[1].shape[1] - WINDOW for x in halves]

    all_fold = jnp.arange(TIME)[None] < TIME - WINDOW
    call = power_state.call_for(key, value, **OPTIONS)
    calls = [power_state.call_for(x[1], x[2], **OPTIONS) for x in halves]
    (out, denominator, final), saved = power_state.power_state_fwd(*arrays, all_fold, call=call)
    dfinal = tuple(jnp.full_like(x, size) for x in final)
    expected, initial = power_state.power_state_vjp(
        *arrays, all_fold, out, denominator, saved, dout, dfinal, call=call
    )

    folded = [power_state.fold(*x[1:], f, call=c) for x, f, c in zip(halves, folds, calls, strict=True)]
    folded[1] = power_state.add_incoming(*folded[1], folded[0][1], *halves[1][1:], folds[1], call=calls[1])
    results = [
        power_state.attend(*x, f, states, call=c)
        for x, f, (states, _), c in zip(halves, folds, folded, calls, strict=True)
    ]
    duals = [
        power_state.fold_vjp(*x, f, *result, do, cotangent, call=c)
        for x, f, result, do, cotangent, c in zip(
            halves, folds, results, douts, (None, dfinal), calls, strict=True
        )
    ]
    duals[0] = power_state.add_incoming(
        *duals[0], duals[1][1], *halves[0][1:], folds[0], call=calls[0], reverse=True
    )
    gradients = [
        power_state.attend_vjp(*x, f, *result, states, dual, do, call=c)
        for x, f, result, (states, _), (dual, _), do, c in zip(
            halves, folds, results, folded, duals, douts, calls, strict=True
        )
    ]
    return results, folded, duals, gradients, (out, final, initial, expected)


@pytest.mark.parametrize(
    ("scale", "end"),
    [
        pytest.param(1e-3, CUT, marks=pytest.mark.slow),
        (1e3, CUT),
        pytest.param(1e-4, TIME, marks=pytest.mark.slow),
        pytest.param(1e4, TIME, marks=pytest.mark.slow),
    ],
)
def test_halves_are_the_whole(scale, end):
    """Compares outputs and gradients, with keys of the first half, or of all, multiplied by `scale`."""
    case = cases.Case(head_dim=32, value_dim=24, time=TIME, decay="gentle", group=2)
    drawn = cases.arrays(case, batch=1, kv_heads=2, dtype="bfloat16")
    drawn["key"][:, :end] *= scale
    drawn["log_decay"][:, 20] = -100.0
    query, key, value, dout = (
        jnp.asarray(drawn[name], jnp.bfloat16) for name in ("query", "key", "value", "dout")
    )
    decay = jnp.asarray(drawn["log_decay"], jnp.float32)
    # As large as those that come from queries, which have the size of 1 / key^2.
    size = (1 if end == CUT else scale**-2) / 8
    with plain.kernels():
        results, folded, duals, gradients, whole = compute((query, key, value, decay), dout, size)
    out, final, initial, expected = whole

    assert cases.error(jnp.concatenate([results[0][0], results[1][0][:, WINDOW:]], 1), out) <= 2.0**-11
    for found, wanted in zip(folded[1][1], final, strict=True):
        assert cases.error(found, wanted) <= 2.0**-11
    for found, wanted in zip(duals[0][1], initial, strict=True):
        assert cases.error(found, wanted) <= 2.0**-11
    for found, wanted in zip(zip(*gradients), expected, strict=True):
        joined = np.zeros(wanted.shape, np.float32)
        joined[:, :CUT] += np.asarray(found[0], np.float32)
        joined[:, CUT - WINDOW :] += np.asarray(found[1], np.float32)
        assert cases.error(joined, wanted) <= 2.0**-8
