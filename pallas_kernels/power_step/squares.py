"""Features of vectors for p = 2, a block of rows of the state at a time.

Row f of the state belongs to a pair i <= j of entries, in lexicographic order: the rows of i are consecutive, D - i of
them. Its feature is x_i x_j, times the square root of 2 if i < j. Vectors are in shared memory, with margins of ROWS
finite numbers before and after them, so that a block of rows reads consecutive numbers for each i.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.power_step import configs

# Rows of a block.
ROWS = 64


def put(ref, vector):
    """Stores a vector with margins of zeros to shared memory."""
    zeros = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), configs.line(ROWS))
    end = ref.shape[0] - ROWS
    for begin, x in ((0, zeros), (ROWS, vector), (end, zeros)):
        ref[pl.ds(begin, x.shape[0])] = x


def features(numbers, offsets, begin, head_dim):
    """Returns the features of vectors in rows `begin` to begin + ROWS - 1; beyond the last feature, any finite numbers.

    Vector n is D `numbers` in shared memory from offsets[n] on.
    """

    def start(i):
        return i * head_dim - i * (i - 1) // 2

    # The root of start(i) = begin, less one for its rounding errors. The rows of each i overwrite what those before it
    # left there, so i may start too early.
    middle = head_dim + 0.5
    root = jnp.sqrt(middle * middle - 2 * begin.astype(jnp.float32))
    first = jnp.maximum((middle - root).astype(jnp.int32) - 1, 0)
    rows = begin + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=configs.line(ROWS))

    def add(carried):
        i, phi = carried
        factor = jnp.where(rows == start(i), 1.0, math.sqrt(2))
        # An i that starts too early would read beyond the margin.
        right = jnp.minimum(begin - start(i) + i, head_dim)
        added = []
        for offset, before in zip(offsets, phi):
            entries = plgpu.load(
                numbers.at[pl.ds(offset + right, ROWS)], layout=configs.line(ROWS), optimized=False
            )
            added.append(jnp.where(rows >= start(i), numbers[offset + i] * factor * entries, before))
        return i + 1, tuple(added)

    zeros = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), configs.line(ROWS))
    carried = first, (zeros,) * len(offsets)
    return lax.while_loop(lambda x: (x[0] < head_dim) & (start(x[0]) < begin + ROWS), add, carried)[1]
