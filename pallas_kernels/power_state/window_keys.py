"""In-window keys of a block of query rows: those of the window, and those of its chunk up to each row."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import ring, tensor_core
from pallas_kernels.power_state import config as configs

__all__ = ["Keys", "QueryTile", "scratch"]

_BLOCK = configs.BLOCK
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)


class QueryTile(NamedTuple):
    """Position of a thread block's rows of queries."""

    head: jax.Array
    key_head: jax.Array
    chunk: jax.Array
    block: jax.Array  # of 64 rows in the chunk, of the first warpgroup
    token: jax.Array  # of the first row

    @classmethod
    def of_thread_block(cls, groups, chunk, count):
        """Returns the tile, for `groups` query heads per key head and `count` warpgroups per thread block."""
        head, index, block = lax.axis_index("head"), lax.axis_index("chunk"), lax.axis_index("rows") * count
        return cls(head, lax.div(head, jnp.int32(groups)), index, block, index * chunk + block * _BLOCK)

    def rows(self, warpgroup):
        """Returns the tokens of a warpgroup."""
        return pl.ds(self.token + warpgroup * _BLOCK, _BLOCK)


def scratch(key, value, decay, count, stages):
    """Returns the shared memory of the ring of keys by name, for `count` warpgroups."""
    return {
        "decay_smem": plgpu.SMEM(decay.shape[2:], jnp.float32),
        "key_smem": tensor_core.operand((stages,), _BLOCK, key.shape[-1], key.dtype),
        "value_smem": tensor_core.operand((stages,), _BLOCK, value.shape[-1], value.dtype),
        "key_full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "key_free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
    }


class Keys:
    """Ring of the blocks of 64 keys that are visible to the rows of a thread block.

    gmem: "key" [H, W + X, D] and "value" [H, W + X, E]. smem: as `scratch` returns it; "decay_smem" is copied by the
    caller. first: number of other steps that precede the keys in their ring.
    """

    def __init__(self, gmem, smem, tile, *, count, chunk, exact_window, first=0):
        self._gmem, self._smem, self._tile = gmem, smem, tile
        self._count, self._chunk, self._window, self._first = count, chunk, exact_window, first
        self._stages = smem["key_smem"].shape[0]

    def copy(self):
        """Copies the keys and values that are visible to any row; returns when all have been read."""
        tile, smem = self._tile, self._smem

        def copy(step, slot):
            tokens = pl.ds(tile.chunk * self._chunk + (step - self._first) * _BLOCK, _BLOCK)
            for name in ("key", "value"):
                source = self._gmem[name].at[tile.key_head, tokens]
                plgpu.copy_gmem_to_smem(source, smem[f"{name}_smem"].at[slot], smem["key_full"].at[slot])

        count = self._visible(self._count - 1) + self._first
        ring.fill(count, self._stages, smem["key_free"], copy, self._first)

    def fold(self, step, carry, warpgroup):
        """Runs carry = step(carry, key_smem, value_smem, between) for each block that is visible to a warpgroup's rows.

        between: float32 [64, 64], base-2 logarithms of the decays from keys to rows, very low where a key is later than
        the row.
        """
        smem, last = self._smem, self._visible(warpgroup) - 1
        coarse, fine = (plgpu.load(smem["decay_smem"].at[part, last], layout=_ROWS) for part in range(2))

        def step_of(index, carry, diagonal):
            slot = ring.slot_of(index + self._first, self._stages)
            plgpu.barrier_wait(smem["key_full"].at[slot])

            def between(begin=0, width=_BLOCK):
                # Computed where it is used, to keep it in registers as briefly as possible.
                shape = _BLOCK, width
                columns = pl.ds(begin, width)
                key_coarse, key_fine = (
                    plgpu.load(smem["decay_smem"].at[part, index, columns], layout=_COLUMNS)
                    for part in range(2)
                )
                x = lax.broadcast_in_dim(coarse, shape, [0]) - lax.broadcast_in_dim(key_coarse, shape, [1])
                x += lax.broadcast_in_dim(fine, shape, [0]) - lax.broadcast_in_dim(key_fine, shape, [1])
                if not diagonal:
                    return x
                row, column = (
                    plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
                    for axis in (0, 1)
                )
                return jnp.where(row >= column + begin, x, -1e4)

            carry = step(carry, smem["key_smem"].at[slot], smem["value_smem"].at[slot], between)
            plgpu.barrier_arrive(smem["key_free"].at[slot])
            return carry

        carry = lax.fori_loop(jnp.int32(0), last, functools.partial(step_of, diagonal=False), carry)
        carry = step_of(last, carry, diagonal=True)

        @pl.loop(last + 1, self._visible(self._count - 1))
        def _pass(index):
            # Blocks that are visible only to later rows are skipped: free their slot as soon as it is full.
            slot = ring.slot_of(index + self._first, self._stages)
            plgpu.barrier_wait(smem["key_full"].at[slot])
            plgpu.barrier_arrive(smem["key_free"].at[slot])

        return carry

    def _visible(self, warpgroup):
        """Returns the number of blocks visible to a warpgroup: of the window, of earlier rows, and its own."""
        return self._tile.block + warpgroup + self._window // _BLOCK + 1
