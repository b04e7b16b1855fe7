"""In-place update S <- across S + sum_w phi(k_w) v_w^T for some rows of the batch.

A block of one warpgroup updates a tile of the state of one head. TMA loads the tile, the tokens' values and, unless
p = 2, their features for its rows; for p = 2 the block computes these from the keys. A thread adds the products of its
rows and columns, token after token, in float32. The tile is then written back to its place. Rows of the batch that are
not chosen are neither read nor written.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch
from pallas_kernels.power_step import configs, squares

# Tokens whose features a block computes at once, and numbers of their keys that it copies at once, 32 a thread.
_TOKENS, _COPIED = 8, 32 * 128


class Window(NamedTuple):
    """W tokens of some rows of the batch."""

    rows: (
        jax.Array
    )  # int32 [n], rows of the batch, of which the first `updated` are updated; each occurs once
    updated: jax.Array  # int32 [1]
    # float32 [n, K, W, F], phi(k_w) times the decay after token w; or for p = 2 [n, K, W, D], k_w times its square root
    keys: jax.Array
    values: jax.Array  # float32 [n, W, K, E]
    across: jax.Array  # float32 [n, K], the decay over all W tokens


def fold(kv, norm, tokens: Window, *, interpret=None):
    """Updates float32 kv [B, K, F, E] and norm [B, K, F] with the tokens.

    The results reuse the memory of kv and norm if these are not needed any more; other rows are not touched. `choose`
    documents the supported sizes. Not differentiable.
    """
    size, kv_heads, exact_window, width = tokens.keys.shape
    if computes := width != norm.shape[2]:
        # Keys one after the other, with margins, as a whole number of values for each thread.
        flat = tokens.keys.reshape(size, kv_heads, -1)
        ends = squares.ROWS, squares.ROWS + -flat.shape[-1] % 128
        tokens = tokens._replace(keys=jnp.pad(flat, [(0, 0), (0, 0), ends]))
    tile, value_dim = squares.ROWS, tokens.values.shape[-1]
    layout = configs.layout(value_dim)

    def body(kv, norm, *tokens, full, state_smem, norm_smem, feature_smem, value_smem, key_smem):
        rows, updated, keys, values, across = Window(*tokens)
        index, head = lax.axis_index("row"), lax.axis_index("head")

        @pl.when(index < updated[0])
        def _fold():
            row, begin = rows[index], lax.axis_index("tile") * tile
            state_gmem, norm_gmem = (ref.at[row, head, pl.ds(begin, tile)] for ref in (kv, norm))
            plgpu.copy_gmem_to_smem(state_gmem, state_smem, full)
            plgpu.copy_gmem_to_smem(norm_gmem, norm_smem, full)
            plgpu.copy_gmem_to_smem(values.at[index, :, head], value_smem, full)
            if not computes:
                plgpu.copy_gmem_to_smem(keys.at[index, head, :, pl.ds(begin, tile)], feature_smem, full)
            else:
                for first in range(0, key_smem.shape[0], _COPIED):
                    part = pl.ds(first, min(_COPIED, key_smem.shape[0] - first))
                    key_smem[part] = keys[index, head, part]
                together = math.gcd(exact_window, _TOKENS)

                @pl.loop(0, exact_window // together)
                def _put_features(block):
                    chosen = [block * together + t for t in range(together)]
                    offsets = [squares.ROWS + w * width for w in chosen]
                    for w, phi in zip(chosen, squares.features(key_smem, offsets, begin, width)):
                        feature_smem[w] = phi

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

    # A kernel updates references in place.
    held = jax.new_ref(kv), jax.new_ref(norm)
    memory = {
        "state_smem": (tile, value_dim),
        "norm_smem": (tile,),
        "feature_smem": (exact_window, tile),
        "value_smem": (exact_window, value_dim),
        "key_smem": tokens.keys.shape[2:] if computes else (1,),
    }
    plgpu.kernel(
        body,
        scratch_types={"full": plgpu.Barrier(num_arrivals=4 - computes)}
        | {name: plgpu.SMEM(shape, jnp.float32) for name, shape in memory.items()},
        grid=(-(-norm.shape[2] // tile), kv_heads, size),
        grid_names=("tile", "head", "row"),
        kernel_name="power_step_fold",
        compiler_params=configs.COMPILER,
        **launch.interpreted(interpret),
    )(*held, *tokens)
    return tuple(map(jax.freeze, held))
