"""From-state contributions to a block of query rows: the copies of states, and of their normalizer Z."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import ring
from pallas_kernels.power_state import configs, query_tile
from pallas_kernels.power_state.square import layouts

_BLOCK = configs.BLOCK
# First row and number of rows of each copy of a block of Z, by the number of copies: Z passes through rings of tokens,
# whose slots wait for two or three.
NORM_COPIES = {2: ((0, 32), (32, 32)), 3: ((0, 32), (32, 16), (48, 16))}


def copy_states(gmem, smem, tile: query_tile.QueryTile, parts, piece_of=None):
    """Copies states by groups, `parts` of a group and blocks of values, or in the order of `piece_of`.

    piece_of(index): the index-th group and part. Returns the number of steps, the last of which may not have been read.
    """
    stages, height, columns = smem["state_smem"].shape
    blocks = gmem["states"].shape[3] // height

    def copy(step, slot):
        block, index = lax.rem(step, blocks), lax.div(step, blocks)
        group, part = piece_of(index) if piece_of else (lax.div(index, parts), lax.rem(index, parts))
        rows, columns_of = pl.ds(block * height, height), pl.ds(part * columns, columns)
        state = gmem["states"].at[tile.key_head, tile.chunk, group, rows, columns_of]
        plgpu.copy_gmem_to_smem(state, smem["state_smem"].at[slot], smem["state_full"].at[slot])

    count = jnp.int32(layouts.TILE * parts * blocks)
    pl.loop(jnp.int32(0), count)(lambda step: ring.put(step, stages, smem["state_free"], copy))
    return count


def norm_blocks(layout):
    """Returns the number of blocks of 64 rows in both parts of Z: they precede the keys in the ring."""
    return 2 * layout.head_dim // _BLOCK


def copy_norms(gmem, smem, tile: query_tile.QueryTile, copies):
    """Copies both parts of Z into the ring of keys, whose slots wait for that number of copies."""

    def copy(step, slot):
        for begin, size in NORM_COPIES[copies]:
            source = gmem["norm"].at[tile.key_head, tile.chunk, pl.ds(step * _BLOCK + begin, size)]
            target = smem["key_smem"].at[slot, pl.ds(begin, size)]
            plgpu.copy_gmem_to_smem(source, target, smem["key_full"].at[slot])

    @pl.loop(jnp.int32(0), jnp.int32(gmem["norm"].shape[2] // _BLOCK))
    def _step(step):
        ring.put(step, smem["key_smem"].shape[0], smem["key_free"], copy)
