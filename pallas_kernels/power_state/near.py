"""In-window keys for a block of rows of queries: those of the window and of its chunk up to each row.

Arrays in global and in shared memory are in dictionaries by name. `place` holds the block's head, key head, chunk, and
first block of 64 rows in the chunk.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import ring
from pallas_kernels.power_state import config as configs

__all__ = ["copy_keys", "fold"]

_BLOCK = configs.BLOCK
_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def copy_keys(gmem, smem, place, config, chunk, exact_window, first=0):
    """Copies the keys and values that are visible to the block's rows, after `first` other steps of their ring."""

    def copy(step, slot):
        tokens = pl.ds(place["chunk"] * chunk + (step - first) * _BLOCK, _BLOCK)
        for name in ("key", "value"):
            tile = gmem[name].at[place["key_head"], tokens]
            plgpu.copy_gmem_to_smem(tile, smem[f"{name}_smem"].at[slot], smem["key_full"].at[slot])

    count = _key_blocks(place["block"] + config.query_blocks - 1, exact_window) + first
    ring.fill(count, config.key_stages, smem["key_free"], copy, first)


def fold(step, carry, smem, block, end, config, exact_window, first=0):
    """Runs carry = step(carry, key_smem, value_smem, between) for each block of 64 keys that is visible to the rows.

    between: float32 [64, 64], base-2 logarithms of the decays from keys to rows, very low where a key is later than the
    row. `block` is the block of the rows in the chunk. `end` is the last block whose keys are copied. `first` other
    steps of the ring precede the keys.
    """
    last = _key_blocks(block, exact_window) - 1
    coarse, fine = (plgpu.load(smem["decay_smem"].at[part, last], layout=_ROWS) for part in range(2))

    def step_of(index, carry, diagonal):
        slot = ring.slot_of(index + first, config.key_stages)
        plgpu.barrier_wait(smem["key_full"].at[slot])

        def between(begin=0, width=_BLOCK):
            # Computed where it is used, to keep it in registers as briefly as possible.
            shape = _BLOCK, width
            columns = pl.ds(begin, width)
            key_coarse, key_fine = (
                plgpu.load(smem["decay_smem"].at[part, index, columns], layout=_COLUMNS) for part in range(2)
            )
            x = lax.broadcast_in_dim(coarse, shape, [0]) - lax.broadcast_in_dim(key_coarse, shape, [1])
            x += lax.broadcast_in_dim(fine, shape, [0]) - lax.broadcast_in_dim(key_fine, shape, [1])
            if not diagonal:
                return x
            row, column = (
                plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) for axis in (0, 1)
            )
            return jnp.where(row >= column + begin, x, -1e4)

        carry = step(carry, smem["key_smem"].at[slot], smem["value_smem"].at[slot], between)
        plgpu.barrier_arrive(smem["key_free"].at[slot])
        return carry

    carry = lax.fori_loop(jnp.int32(0), last, functools.partial(step_of, diagonal=False), carry)
    carry = step_of(last, carry, diagonal=True)

    @pl.loop(last + 1, _key_blocks(end, exact_window))
    def _pass(index):
        # Blocks that are visible only to later rows are skipped: free their slot as soon as it is full.
        slot = ring.slot_of(index + first, config.key_stages)
        plgpu.barrier_wait(smem["key_full"].at[slot])
        plgpu.barrier_arrive(smem["key_free"].at[slot])

    return carry


def _key_blocks(block, exact_window):
    """Returns the number of 64-key blocks visible to a block of rows of a chunk: window, earlier rows, and its own."""
    return block + exact_window // _BLOCK + 1
