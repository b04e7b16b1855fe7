"""Tests of the backward kernels of the state form, interpreted, against plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_state
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state.square import layout as layouts
from pallas_kernels.power_state.square import query_vjp
from tests.ops import cases
from tests.pallas_kernels import plain, state_vjp

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(240)]

HEADS, GROUP, CHUNKS, WINDOW = 1, 2, 2, 64


def drawn_state(random, layout, value_dim, dtype, terms):
    """Returns states of random keys and values, as a query reads them: [H, n, 16, terms E, P], and Z [H, n, 2 D, D]."""
    shape, count = (HEADS, CHUNKS), 96
    key = random.normal(size=(*shape, count, layout.head_dim))
    value = random.normal(size=(*shape, count, value_dim))
    features = key[..., layout.indices].prod(-1)
    states = split(np.einsum("hctjp,hcte->hcjep", features, value) / count, dtype, terms)
    norm = split(np.einsum("hctd,hctb->hcdb", key, key) / count, jnp.bfloat16, 2)
    return states, norm


def split(x, dtype, terms):
    """Returns x [..., A, B] as the concatenation of terms of a 16-bit dtype, [..., terms A, B]."""
    parts = []
    for _ in range(terms):
        parts.append(x.astype(dtype))
        x = x - parts[-1].astype("float64")
    return jnp.asarray(np.concatenate(parts, -2))


def drawn_decays(random, chunk):
    """Returns `prepare.Tokens.decay`."""
    steps = -random.exponential(0.02, (HEADS, CHUNKS, WINDOW + chunk))
    coarse = np.round(steps * 2**12) / 2**12
    sums = (jnp.asarray(np.cumsum(x, -1), jnp.float32) for x in (coarse, steps - coarse))
    return preparation.key_decays(*sums)


def drawn_arguments(layout, value_dim, state_dtype, chunk):
    """Draws arguments of `query_vjp`, by name."""
    random = np.random.default_rng(0)
    dtype, terms = configs.operands(jnp.dtype(state_dtype))
    time, queries = CHUNKS * chunk, HEADS * GROUP

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.bfloat16)

    query, dout = normal(queries, time, layout.head_dim), 30 * normal(queries, time, value_dim)
    query = query / 4
    largest = np.abs(np.asarray(dout, "float32")).max(-1)
    power = np.frexp(largest)[1]
    scale = 2.0**-4 * random.uniform(0.5, 1, (queries, time))
    delta = 30 * random.normal(size=(queries, time))
    inverse = random.uniform(0.5, 1, (queries, time))
    inverse[:, 5:9] = 0
    unit, unit_rest = 2.0 ** random.integers(-2, 3, (2, queries, time))
    rows = query_vjp.Rows(2.0**-power, scale * 2.0**power, delta, inverse, unit, unit_rest)
    rows = np.stack(rows, 1).reshape(queries, len(rows), -1, configs.BLOCK).swapaxes(1, 2)
    states, norm = drawn_state(random, layout, value_dim, dtype, terms)
    return {
        "query": query,
        "scalars": jnp.swapaxes(query, 1, 2).astype(dtype),
        "dout": dout,
        "states": states,
        "norm": norm,
        "key": normal(HEADS, WINDOW + time, layout.head_dim),
        "value": normal(HEADS, WINDOW + time, value_dim),
        "decay": drawn_decays(random, chunk),
        "rows": jnp.asarray(rows, jnp.float32),
    }


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "state_dtype"),
    [
        (32, 64, "float16"),
        (64, 64, "float16"),
        (64, 64, "bfloat16"),
        (32, 128, "float32"),
        pytest.param(128, 64, "float32", marks=pytest.mark.slow),
        pytest.param(128, 128, "float16", marks=pytest.mark.slow),
    ],
)
def test_query(head_dim, value_dim, state_dtype):
    layout, chunk = layouts.Layout(head_dim), 128
    arguments = drawn_arguments(layout, value_dim, state_dtype, chunk)
    config = power_state.choose(
        power=2,
        time=65_536,
        heads=8,
        head_dim=head_dim,
        value_dim=value_dim,
        chunk=chunk,
        exact_window=WINDOW,
        dtype=jnp.bfloat16,
        state_dtype=jnp.dtype(state_dtype),
    )
    sizes = {"layout": layout, "chunk": chunk, "exact_window": WINDOW}
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    # Two rows, whose last tokens are padding.
    batch_time = 2, arguments["query"].shape[1] - 30
    options = {**sizes, "config": config, "batch_time": batch_time, "interpret": interpret}
    gradient, sums = query_vjp.query_vjp(**arguments, **options)
    with jax.default_matmul_precision("highest"):
        del arguments["scalars"]
        expected, expected_sums = state_vjp.query_vjp(**arguments, **sizes)
    assert gradient.dtype == jnp.bfloat16
    # The result is rounded to bfloat16; everything else to float16 or better, except bfloat16 operands of states.
    assert cases.error(gradient, plain.as_arguments(expected, batch_time)) <= 2**-9
    assert cases.error(sums[:, 0], expected_sums[:, 0]) <= 1e-5
    assert cases.error(sums[:, 1], expected_sums[:, 1]) <= 1e-5
