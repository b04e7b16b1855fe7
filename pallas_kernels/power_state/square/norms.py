"""Normalizers of chunks at p = 2: Z = sum of w_x k_x k_x^T over the tokens x of a chunk.

A block has one chunk of one head, with 64 rows of Z in each warpgroup. Keys are multiplied by their weights in
registers, in float32, and split into two float16 operands: keys have 8 bits, which float16 holds, so that Z is exact to
2^-22. Nothing of the size of the keys is written.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, ring, tensor_core
from pallas_kernels.power_state import configs
from pallas_kernels.power_state.square import update

_BLOCK = configs.BLOCK
# Blocks of 64 tokens in flight.
_STAGES = 4


def norms(key, weights, *, reverse=False, interpret=None):
    """Returns Z of each chunk, float32 [H, n, D, D].

    key: float16 [HN, D, any length], D = 32 or a multiple of 64, entries below 1, time last; HN a multiple of H.
    weights: float32 [H, n, G C], of G heads, at most 1. reverse: as in `update.update`.
    """
    head_dim, weights = key.shape[1], weights.reshape(*weights.shape[:2], -1, _BLOCK)
    heads, chunks, blocks, _ = weights.shape
    group = len(key) // heads
    order = update.Order(group, chunks, blocks // group, reverse)
    warpgroups = max(1, head_dim // _BLOCK)
    # With fewer than 64 indices, a tile has copies of them, and so does the result.
    rows = min(head_dim, _BLOCK)
    copies = _BLOCK // rows

    def body(gmem, smem):
        head, chunk = lax.axis_index("head"), lax.axis_index("chunk")

        def copy():
            def copy_tokens(step, slot):
                (row, tokens), full = order.place(head, chunk, step), smem["full"].at[slot]
                for tile in range(warpgroups):
                    source = gmem["key"].at[row, pl.ds(tile * rows, rows), tokens]
                    for n in range(copies):
                        target = smem["key_smem"].at[slot, tile, pl.ds(n * rows, rows)]
                        plgpu.copy_gmem_to_smem(source, target, full)
                weight_smem = smem["weight_smem"].at[slot]
                plgpu.copy_gmem_to_smem(gmem["weights"].at[head, chunk, step], weight_smem, full)

            ring.fill(jnp.int32(blocks), _STAGES, smem["free"], copy_tokens)

        def compute(warpgroup, core):
            def sums(acc):
                @pl.loop(jnp.int32(0), jnp.int32(blocks))
                def _block(step):
                    slot = ring.slot_of(step, _STAGES)
                    plgpu.barrier_wait(smem["full"].at[slot])
                    own = plgpu.load(smem["key_smem"].at[slot, warpgroup], layout=plgpu.Layout.WGMMA)
                    weight = plgpu.load(smem["weight_smem"].at[slot], layout=tensor_core.PER_COLUMN)
                    weighted = own.astype(jnp.float32) * lax.broadcast_in_dim(weight, own.shape, [1])
                    high = weighted.astype(own.dtype)
                    low = (weighted - high.astype(jnp.float32)).astype(own.dtype)
                    # Straight-line code, so that each operand has its own registers until all products are done.
                    for tile in range(warpgroups):
                        columns = acc.at[:, tile * rows : (tile + 1) * rows]
                        keys = smem["key_smem"].at[slot, tile, :rows].T
                        for part in (high, low):
                            core.add(columns, part, keys, wait=1)
                    core.wait()
                    plgpu.barrier_arrive(smem["free"].at[slot])

                gmem["norm"][head, chunk, pl.ds(warpgroup * _BLOCK, _BLOCK)] = acc[...]

            core.accumulators(sums, head_dim)

        return copy, compute

    output = launch.launch(
        body,
        {"key": key, "weights": weights},
        {"norm": jax.ShapeDtypeStruct((heads, chunks, warpgroups * _BLOCK, head_dim), jnp.float32)},
        {
            "key_smem": tensor_core.operand((_STAGES, warpgroups), _BLOCK, _BLOCK, key.dtype),
            "weight_smem": plgpu.SMEM((_STAGES, _BLOCK), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=warpgroups * copies + 1, num_barriers=_STAGES),
            "free": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=_STAGES),
        },
        grid={"head": heads, "chunk": chunks},
        warpgroups=warpgroups,
        name="power_state_norms",
        interpret=interpret,
        approximate=False,
    )
    return output["norm"][:, :, :head_dim]
