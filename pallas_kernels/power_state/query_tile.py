"""Position of a thread block's query rows, and their final store."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import results
from pallas_kernels.power_state import configs

_BLOCK = configs.BLOCK


class QueryTile(NamedTuple):
    """Position of a thread block's rows of queries."""

    head: jax.Array
    key_head: jax.Array
    chunk: jax.Array
    block: jax.Array  # the first warpgroup's block of 64 rows, counted in the chunk
    token: jax.Array  # the first row

    @classmethod
    def of_thread_block(cls, heads_per_key, chunk, count):
        """Returns the tile, of a grid by `configs.Call.grid`, for `count` warpgroups."""
        head, index, block = lax.axis_index("head"), lax.axis_index("chunk"), lax.axis_index("rows") * count
        return cls(
            head, lax.div(head, jnp.int32(heads_per_key)), index, block, index * chunk + block * _BLOCK
        )

    def tokens_of(self, warpgroup):
        """Returns the tokens of a warpgroup."""
        return pl.ds(self.token + warpgroup * _BLOCK, _BLOCK)

    def blocks_of(self, chunk, count):
        """Returns the blocks of 64 rows of `count` warpgroups, among those of all chunks."""
        return pl.ds(self.chunk * (chunk // _BLOCK) + self.block, count)


def store_mean(gmem, acc, total, out_smem, tile, warpgroup):
    """Writes acc / total through shared memory: zero where the total is zero or subnormal, NaN where it is NaN.

    If gmem has a "remainder" too, what rounding takes away from "out" is written there, itself rounded.
    """
    total = lax.broadcast_in_dim(total, acc.shape, [0])
    none = total < jnp.finfo(jnp.float32).tiny
    mean = jnp.where(none, 0.0, acc[...] / jnp.where(none, 1.0, total))
    begin = tile.token + warpgroup * _BLOCK
    rounded = mean.astype(out_smem.dtype)
    out_smem[...] = rounded
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, results.block(gmem["out"], tile.head, begin))
    if "remainder" in gmem:
        # It takes the place of the rounded mean as soon as that has been read.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_smem[...] = (mean - rounded.astype(jnp.float32)).astype(out_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, results.block(gmem["remainder"], tile.head, begin))
    plgpu.wait_smem_to_gmem(0)
