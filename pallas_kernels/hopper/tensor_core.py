"""The tensor core of one warpgroup, compiled or interpreted, and the memory of its operands."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

# Rows of an accumulator, 16 for each warp of a warpgroup.
ROWS = 64
# Register layouts of a vector with an entry for each row, or each column, of an accumulator.
PER_ROW, PER_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
_WARPS = 4
# Columns of shared memory for the interpreted accumulators of a warpgroup.
_INTERPRETED_COLUMNS = 1024


class TensorCore:
    """Matrix products of one warpgroup, in float32 accumulators of 64 rows.

    In a compiled kernel, accumulators are registers. The interpreter supports no writable accumulator and no operand in
    registers: there, accumulators are columns of shared memory, and a product is an ordinary one of the same 16-bit
    operands, summed in float32.
    """

    def __init__(self, memory=None):
        """memory: float32 [64, columns] in shared memory if the kernel is interpreted, else None."""
        self._memory, self._used = memory, 0

    @staticmethod
    def interpreted_memory(warpgroups: int) -> Any:
        """Returns the type of the memory of interpreted accumulators, for that number of warpgroups."""
        return plgpu.SMEM((warpgroups, ROWS, _INTERPRETED_COLUMNS), jnp.float32)

    def accumulators(self, body: Callable[..., Any], *columns: int):
        """Returns body(*accumulators), where accumulators hold zeros and exist until `body` returns."""
        if self._memory is None:
            return pl.run_scoped(body, *(plgpu.ACC((ROWS, count), jnp.float32) for count in columns))
        before = self._used
        refs = []
        for count in columns:
            refs.append(self._memory.at[:, pl.ds(self._used, count)])
            self._used += count
        assert self._used <= _INTERPRETED_COLUMNS, f"{self._used} columns of accumulators at once"
        for ref in refs:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)
        result = body(*refs)
        self._used = before
        return result

    def add(self, accumulator, a, b, *, wait: int = 0):
        """Adds a @ b, a in registers or shared memory, b in shared memory; `wait` products may stay in flight."""
        if self._memory is None:
            plgpu.wgmma(accumulator, a, b)
            plgpu.wgmma_wait(wait)
            return
        accumulator[...] = accumulator[...] + _interpreted_product(a, b)

    def wait(self):
        """Waits until no product is in flight."""
        if self._memory is None:
            plgpu.wgmma_wait(0)

    def product(self, a, b):
        """Returns a @ b^T in float32, b in shared memory."""

        def compute(accumulator):
            self.add(accumulator, a, b.T)
            return accumulator[...]

        return self.accumulators(compute, b.shape[0])

    def products(self, first, second):
        """Returns a @ b^T in float32 for two pairs (a, b), computed concurrently."""

        def compute(*accumulators):
            # Straight-line code, so that no operand is overwritten while products are in flight.
            for accumulator, (a, b), wait in zip(accumulators, (first, second), (1, 0)):
                self.add(accumulator, a, b.T, wait=wait)
            return tuple(accumulator[...] for accumulator in accumulators)

        return self.accumulators(compute, first[1].shape[0], second[1].shape[0])

    def sum(self, total, a, b):
        """Returns total + a @ b for a total in registers."""
        if self._memory is None:
            return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, a, b))(plgpu.ACC.init(total))
        return total + _interpreted_product(a, b)

    def load_row_per_warp(self, ref, shape):
        """Returns the rows of ref [n, columns] in shared memory, each repeated 64 / n times, in `shape` [64, columns].

        n divides 4. Only elementwise operations may follow: the declared type is a vector that all warps share, but
        each warp has its own.
        """
        if self._memory is not None:
            return jnp.repeat(ref[...], shape[0] // ref.shape[0], 0)

        @plgpu.inline_mgpu(
            return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
        )
        def warp_index(_):
            return mgpu.FragmentedArray.splat(mgpu.utils.warp_idx(), (), is_signed=True)

        part = lax.div(lax.rem(warp_index(), jnp.int32(_WARPS)), jnp.int32(_WARPS // ref.shape[0]))
        row = plgpu.load(ref.at[part], layout=PER_COLUMN)
        return lax.broadcast_in_dim(row, shape, [1])


def along_columns(vector, shape):
    """Loads a vector [64] from shared memory and broadcasts it along the columns of `shape` [64, columns]."""
    return lax.broadcast_in_dim(plgpu.load(vector, layout=PER_ROW), shape, [0])


def operand(lead, rows, columns, dtype, slices=None):
    """Returns a shared-memory type of `lead` times [rows, columns], 16-bit, in the tensor core's layout.

    An ordinary read may take whole `slices` of that many columns, by default all columns; slices of 16, 32 and 64 are
    supported.
    """
    swizzle = plgpu.find_swizzle((slices or columns) * jnp.dtype(dtype).itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM((*lead, rows, columns), dtype, transforms=transforms)


def split(x):
    """Returns two bfloat16 arrays whose sum is x, with an error of at most 2^-16 of each entry."""
    # Truncate instead of rounding: converting to bfloat16 and back would take as long as the exponential.
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def _interpreted_product(a, b):
    """Returns a @ b in float32."""
    result = jnp.dot(a[...].astype(jnp.float32), b[...].astype(jnp.float32))
    # Only a fence orders an ordinary read before the copy that reuses its memory; a wgmma is ordered by its wait.
    plgpu.commit_smem()
    return result
