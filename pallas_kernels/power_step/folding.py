"""In-place update S <- across S + sum_w phi(k_w) v_w^T for some rows of the batch.

A block of one warpgroup updates a tile of the state of one head. TMA loads the tile, the tokens' features for its rows
and the tokens' values. A thread adds the products of its rows and columns, token after token, in float32. The tile is
then written back to its place. Rows of the batch that are not chosen are neither read nor written.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch
from pallas_kernels.power_step import configs

__all__ = ["Window", "fold"]


class Window(NamedTuple):
    """W tokens of some rows of the batch."""

    rows: jax.Array  # int32 [n], rows of the batch, of which the first `updated` are updated
    updated: jax.Array  # int32 [1]
    features: jax.Array  # float32 [n, K, W, F], phi(k_w) times the decay after token w
    values: jax.Array  # float32 [n, W, K, E]
    across: jax.Array  # float32 [n, K], the decay over all W tokens


def fold(kv, norm, tokens: Window, *, interpret=None):
    """Updates kv [B, K, F, E] and norm [B, K, F], `jax.Ref`s of float32, with the tokens, in place."""
    size, kv_heads, exact_window, count_features = tokens.features.shape
    tile, value_dim = configs.FOLD_TILE, tokens.values.shape[-1]
    layout = configs.layout(value_dim)

    def body(kv, norm, *tokens, full, **smem):
        rows, updated, features, values, across = Window(*tokens)
        state_smem, norm_smem, feature_smem, value_smem = (
            smem[name] for name in ("state_smem", "norm_smem", "feature_smem", "value_smem")
        )
        index, head = lax.axis_index("row"), lax.axis_index("head")

        @pl.when(index < updated[0])
        def _fold():
            row, begin = rows[index], lax.axis_index("tile") * tile
            state_gmem, norm_gmem = (ref.at[row, head, pl.ds(begin, tile)] for ref in (kv, norm))
            plgpu.copy_gmem_to_smem(state_gmem, state_smem, full)
            plgpu.copy_gmem_to_smem(norm_gmem, norm_smem, full)
            plgpu.copy_gmem_to_smem(features.at[index, head, :, pl.ds(begin, tile)], feature_smem, full)
            plgpu.copy_gmem_to_smem(values.at[index, :, head], value_smem, full)
            plgpu.barrier_wait(full)

            decay = across[index, head]
            state = plgpu.load(state_smem, layout=layout) * decay
            weight = plgpu.load(norm_smem, layout=layout.reduce(1), optimized=False) * decay

            def add(w, sums):
                state, weight = sums
                phi = plgpu.load(feature_smem.at[w], layout=layout.reduce(1), optimized=False)
                v = plgpu.load(value_smem.at[w], layout=layout.reduce(0), optimized=False)
                product = configs.spread(phi, state.shape, 0) * configs.spread(v, state.shape, 1)
                return state + product, weight + phi

            state, weight = lax.fori_loop(jnp.int32(0), feature_smem.shape[0], add, (state, weight))
            state_smem[...] = state
            norm_smem[...] = weight
            plgpu.commit_smem()
            # A contiguous copy to global memory is clipped only at the end of the whole array, not at the end of this
            # head's features. The last tile therefore stores exactly the remaining rows of the head.
            remainder = norm.shape[2] % tile
            whole = begin + tile <= norm.shape[2]

            def store(count):
                tile_rows, state_rows = pl.ds(0, count), pl.ds(begin, count)
                plgpu.copy_smem_to_gmem(state_smem.at[tile_rows], kv.at[row, head, state_rows])
                plgpu.copy_smem_to_gmem(norm_smem.at[tile_rows], norm.at[row, head, state_rows])

            pl.when(whole)(lambda: store(tile))
            if remainder:
                pl.when(~whole)(lambda: store(remainder))
            plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        scratch_types={
            "state_smem": plgpu.SMEM((tile, value_dim), jnp.float32),
            "norm_smem": plgpu.SMEM((tile,), jnp.float32),
            "feature_smem": plgpu.SMEM((exact_window, tile), jnp.float32),
            "value_smem": plgpu.SMEM((exact_window, value_dim), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=4),
        },
        grid=(-(-count_features // tile), kv_heads, size),
        grid_names=("tile", "head", "row"),
        kernel_name="power_step_fold",
        compiler_params=configs.COMPILER,
        **launch.interpreted(interpret),
    )(kv, norm, *tokens)
