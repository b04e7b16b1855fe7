"""Tests of the p = 4 backward kernels, interpreted, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_state
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state import window_queries
from pallas_kernels.power_state.quartic import forward as quartic
from pallas_kernels.power_state.quartic import key_vjp as quartic_key_vjp
from pallas_kernels.power_state.quartic import layout as layouts
from pallas_kernels.power_state.quartic import query_vjp as quartic_query_vjp
from tests.ops import cases
from tests.pallas_kernels import plain_quartic as plain

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(900)]

CHUNKS, GROUP, WINDOW = 2, 2, 64

# Chunks of 64 give a block one warpgroup, chunks of 128 two.
CASES = [
    (16, 16, 64),
    (16, 16, 128),
    pytest.param(32, 32, 64, marks=pytest.mark.slow),
    pytest.param(32, 16, 64, marks=pytest.mark.slow),
]


class Drawn:
    """Arrays of one key head and its `GROUP` query heads."""

    def __init__(self, head_dim, value_dim, chunk):
        self.random = np.random.default_rng(0)
        self.layout, self.chunk, self.time = layouts.Layout(head_dim, value_dim), chunk, CHUNKS * chunk
        config = power_state.choose(
            power=4,
            time=65_536,
            heads=8,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=jnp.bfloat16,
            chunk=chunk,
            exact_window=WINDOW,
            state_dtype=jnp.float16,
        )
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        self.options = {"layout": self.layout, "config": config, "chunk": chunk, "exact_window": WINDOW}
        self.interpret = {"interpret": interpret}

    def rows(self, heads, time, size):
        """Draws bfloat16 rows with entries below 1."""
        return jnp.asarray(self.random.uniform(-1, 1, (heads, time, size)), jnp.bfloat16)

    def states(self):
        """Draws float16 states, zero where features have weight zero."""
        shape = (1, CHUNKS, self.layout.stacks, self.layout.value_dim, self.layout.width)
        weights = self.layout.weights.reshape(self.layout.stacks, 1, self.layout.width)
        return jnp.asarray(self.random.normal(size=shape) * weights / 32, jnp.float16)

    def vectors(self, *vectors):
        """Stacks vectors [H, X] in the kernels' layout."""
        stacked = np.stack([x.reshape(len(x), -1, 64) for x in vectors], 2)
        return jnp.asarray(stacked, jnp.float32)

    def factor(self, heads, time):
        return self.random.uniform(0.5, 1, (heads, time))

    def products(self, x):
        vector, scalars = quartic.pair_products(jnp.swapaxes(x, 1, 2).astype(jnp.float32), self.layout)
        return jnp.swapaxes(vector, 1, 2), scalars

    def decays(self, *shape):
        """Draws running sums, coarse and fine."""
        steps = -self.random.exponential(0.02, shape)
        coarse = np.round(steps * 2**12) / 2**12
        return np.cumsum(coarse, -1), np.cumsum(steps - coarse, -1)


def compare(kernel, expected, arguments, options, interpret):
    found = kernel(*arguments, **options, **interpret)
    for actual, wanted in zip(found, expected(*arguments, **options), strict=True):
        # Both have the same operands.
        assert actual.dtype == jnp.float32
        assert np.isfinite(actual).all()
        assert cases.error(actual, wanted) <= 2**-15


@pytest.mark.parametrize(("head_dim", "value_dim", "chunk"), CASES)
def test_queries(head_dim, value_dim, chunk):
    drawn = Drawn(head_dim, value_dim, chunk)
    time = drawn.time
    query, dout = drawn.rows(GROUP, time, head_dim), drawn.rows(GROUP, time, value_dim)
    decay = preparation.key_decays(*map(jnp.float32, drawn.decays(1, CHUNKS, WINDOW + chunk)))
    rows = quartic_query_vjp.Rows(
        narrow=np.exp2(drawn.random.integers(-2, 1, (GROUP, time))),
        state=drawn.factor(GROUP, time),
        delta=drawn.random.normal(size=(GROUP, time)),
        inverse=drawn.factor(GROUP, time),
    )
    rows.inverse[:, 5:9] = 0
    arguments = (
        query,
        *drawn.products(query),
        dout,
        drawn.states(),
        drawn.rows(1, WINDOW + time, head_dim),
        drawn.rows(1, WINDOW + time, value_dim),
        decay,
        drawn.vectors(*rows),
    )
    compare(quartic_query_vjp.query_vjp, plain.query_vjp, arguments, drawn.options, drawn.interpret)


@pytest.mark.parametrize(("head_dim", "value_dim", "chunk"), CASES)
def test_keys(head_dim, value_dim, chunk):
    drawn = Drawn(head_dim, value_dim, chunk)
    time, length = drawn.time, drawn.time + chunk
    key, value = drawn.rows(1, length, head_dim), drawn.rows(1, length, value_dim)
    own, before = drawn.decays(1, length), drawn.decays(1, length)
    rows = quartic_key_vjp.Rows(
        np.exp2(drawn.random.integers(-2, 1, (1, length))),
        drawn.factor(1, length),
        drawn.factor(1, length),
        *own,
        *before,
    )
    columns = window_queries.Columns.of(
        drawn.factor(GROUP, time),
        drawn.random.normal(size=(GROUP, time)),
        *(jnp.asarray(x[:, :time].repeat(GROUP, 0)) for x in own),
    )
    arguments = (
        key,
        *drawn.products(key),
        value,
        drawn.states(),
        drawn.rows(GROUP, time, head_dim),
        drawn.rows(GROUP, time, value_dim),
        drawn.vectors(*rows),
        drawn.vectors(*columns),
    )
    compare(quartic_key_vjp.key_vjp, plain.key_vjp, arguments, drawn.options, drawn.interpret)
