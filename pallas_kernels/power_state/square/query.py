"""Fused query: the state before the window, the keys from the window on, and the division.

A thread block has `query_blocks` times 64 consecutive rows of one chunk, 64 in each warpgroup. Row i of a warpgroup
sums, in one accumulator,

    scale_i * sum_j (q_i[16 a + j] * q_i[windows]) S_j^T    over the 16 groups j of the state, for every tile a,
    (q_i . k)^2 * 2^(g_i - g_k) v                           over the keys k from the window's first one to i itself,

and divides by the same sums without states and values: q_i^T Z q_i for the state, plain sums for the keys.

The decays g are running sums of base-2 logarithms from the window's first key, in two floats. The first sums multiples
of one power of two, exactly, and the second the small remainders. The difference of two is therefore right to its own
rounding, however large both are.
Weights of keys are split into two bfloat16 operands, whose sum has 16 bits: a single one would add as much error as the
rounding of the output does.

One warpgroup copies, by TMA, into two rings of shared-memory slots, each with a barrier that the copy completes and one
that the readers free: states pass through one ring; Z, then the keys and values, through the other. The other
warpgroups multiply, each with 64 rows of its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, results, ring, tensor_core
from pallas_kernels.power_state import configs, query_tile, window_keys
from pallas_kernels.power_state.square import layouts, state_copies

_BLOCK = configs.BLOCK


class Operands(NamedTuple):
    """Arrays that the kernel reads.

    There are H = B K key heads and HN = B N query heads over the batch, n chunks of C, X = n C tokens, and a window of
    W.
    """

    query: jax.Array  # bfloat16 [HN, at least T, D], largest entries in [1/2, 1)
    scalars: jax.Array  # float16 [HN, D, at least T], the same, time last
    states: jax.Array  # float16 [H, n, 16, E, P], the state that chunk c's queries read at c
    norm: jax.Array  # bfloat16 [H, n, 2 D, D], Z as the sum of two
    key: jax.Array  # bfloat16 [B, at least T, K, D]
    value: jax.Array  # bfloat16 [B, at least T, K, E]
    # float32 [H, n, 3, (W + C) / 64, 64], both parts of g, and the decay from each key to the last of its block
    decay: jax.Array
    scale: jax.Array  # float32 [H, X / 64, 64], from the state to each query


def query_states(operands: Operands, *, time: int, with_remainder: bool, call: configs.Call):
    """Returns the weighted means of values, bfloat16 [B, T, N, E], and their sums of weights, float32 [HN, X].

    Where the sum of weights is not positive, the output is zero. Accumulates in float32.

    time: T. with_remainder: whether to return, between the two, what rounding the means took away, like them.
    """
    query, scalars, states, _, key, value, *_ = operands
    heads, _, head_dim = query.shape
    config, layout, chunk = call.config, layouts.Layout(head_dim), call.chunk
    whole, value_dim, count = states.shape[1] * chunk, value.shape[-1], config.query_blocks
    batch_time, norm_steps = (len(key), time), state_copies.norm_blocks(layout)
    means = ("out", "remainder") if with_remainder else ("out",)

    # gmem has the arguments and results in global memory by name, smem the shared memory of `scratch`.
    def body(gmem, smem):
        # This block's query head, key head and chunk, and the first of its rows.
        tile = query_tile.QueryTile.of_thread_block(heads // len(states), chunk, count)
        # The ring of blocks of 64 keys and values that are visible to any row of the tile, after the blocks of Z.
        keys = window_keys.Keys(gmem, smem, tile, count, call, norm_steps)

        def copy():
            # Inputs that every warpgroup needs from the start.
            ready = smem["ready"]
            for n in range(count):
                rows = tile.tokens_of(n)
                plgpu.copy_gmem_to_smem(gmem["query"].at[tile.head, rows], smem["query_smem"].at[n], ready)
                scalars = gmem["scalars"].at[tile.head, :, rows]
                plgpu.copy_gmem_to_smem(scalars, smem["scalar_smem"].at[n], ready)
            keys.copy_decays(ready)
            blocks = tile.blocks_of(chunk, count)
            plgpu.copy_gmem_to_smem(gmem["scale"].at[tile.key_head, blocks], smem["scale_smem"], ready)
            # The normalizer in blocks of 64 rows, each in the number of copies that slots of keys wait for.
            state_copies.copy_norms(gmem, smem, tile, keys.copies)
            # The states, one step for each part of each group.
            steps = state_copies.copy_states(gmem, smem, tile, config.parts)
            # Keys are copied while the last states are still being read.
            keys.copy()
            # Wait until the last states have been read, so that no barrier is in use when the block ends.
            ring.drain(steps, config.state_stages, smem["state_free"])

        # core.add(acc, a, b) is acc += a @ b, and core.product(a, b) is a @ b^T; both return after reading their
        # operands. Accumulators hold zeros at first.
        def compute(warpgroup, core):
            query_smem, scalar_smem = (smem[name].at[warpgroup] for name in ("query_smem", "scalar_smem"))
            out_smem = smem.get("out_smem", smem["query_smem"]).at[warpgroup]
            plgpu.barrier_wait(smem["ready"])
            scale = plgpu.load(smem["scale_smem"].at[warpgroup], layout=tensor_core.PER_ROW)
            # The state's part of the sum of weights.
            denominator = scale * _norm_of_queries(core, query_smem, smem, layout)

            def attend(acc):
                # The state before the window.
                _read_states(core, acc, query_smem, scalar_smem, smem)
                acc[...] = acc[...] * lax.broadcast_in_dim(scale, acc.shape, [0])
                # The keys from the window on: acc += w v, and the sum of w is added to the denominator.
                total = keys.add_values(core, acc, query_smem, denominator, warpgroup, power=2)
                # The sums of weights, the division, and the store, which drops tokens that do not exist.
                gmem["denominator"][tile.head, tile.tokens_of(warpgroup)] = total
                query_tile.store_mean(gmem, acc, total, out_smem, tile, warpgroup)

            core.accumulators(attend, value_dim)

        return copy, compute

    scratch = {
        "query_smem": tensor_core.operand((count,), _BLOCK, head_dim, query.dtype),
        "scalar_smem": plgpu.SMEM((count, head_dim, _BLOCK), scalars.dtype),
        "scale_smem": plgpu.SMEM((count, _BLOCK), jnp.float32),
        "state_smem": tensor_core.operand(
            (config.state_stages,), value_dim, layout.width // config.parts, states.dtype
        ),
        "ready": plgpu.Barrier(num_arrivals=2 * count + 2),
        "state_full": plgpu.Barrier(num_barriers=config.state_stages),
        "state_free": plgpu.Barrier(num_arrivals=count, num_barriers=config.state_stages),
        **window_keys.scratch(operands, count, call),
    }
    # Else the output takes the memory of the query: each warpgroup overwrites its own rows, after their last product.
    if value_dim != head_dim:
        scratch["out_smem"] = tensor_core.operand((count,), _BLOCK, value_dim, value.dtype)
    output = launch.launch(
        body,
        operands._asdict(),
        {
            **dict.fromkeys(means, results.kind(batch_time, heads, value_dim, value.dtype)),
            "denominator": jax.ShapeDtypeStruct((heads, whole), jnp.float32),
        },
        scratch,
        grid=call.grid(heads, whole, count),
        warpgroups=count,
        name="power_state_query",
        interpret=call.interpret,
    )
    return *(output[name][:, :time] for name in means), output["denominator"]


def _norm_of_queries(core, query_smem, smem, layout):
    """Returns q^T Z q for 64 rows: sums of products with rows of Z, loaded like keys, times entries of q."""
    query = plgpu.load(query_smem, layout=plgpu.Layout.WGMMA)
    # At D = 32 a block has both parts of Z.
    if layout.head_dim < _BLOCK:
        query = jnp.concatenate([query] * (_BLOCK // layout.head_dim), 1)
    total = 0.0
    for step in range(state_copies.norm_blocks(layout)):
        slot = step % smem["key_smem"].shape[0]
        plgpu.barrier_wait(smem["key_full"].at[slot])
        product = core.product(query_smem, smem["key_smem"].at[slot])
        plgpu.barrier_arrive(smem["key_free"].at[slot])
        begin = step * _BLOCK % query.shape[1]
        total += (product * query[:, begin : begin + _BLOCK].astype(jnp.float32)).sum(1)
    return total


def _read_states(core, acc, query_smem, scalar_smem, smem):
    """Adds phi(q) S^T to acc, one part of a group of features at a time."""
    (stages, _, columns), dtype = smem["state_smem"].shape, smem["state_smem"].dtype
    layout = layouts.Layout(query_smem.shape[1])
    parts = layout.width // columns
    query = plgpu.load(query_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32).astype(dtype)
    wrapped = jnp.concatenate([query, query], 1)

    @pl.loop(jnp.int32(0), jnp.int32(layouts.TILE))
    def _group(group):
        for part in range(parts):
            tiles = []
            for piece in layout.pieces(part * columns, (part + 1) * columns):
                # Index scalar + group times `width` indices from `vector` on, cyclically.
                scalar = plgpu.load(scalar_smem.at[piece.scalar + group], layout=tensor_core.PER_ROW)
                # Pairs across tiles represent both orders.
                scalar = scalar + scalar if piece.weight == 2 else scalar
                vector = wrapped[:, piece.vector : piece.vector + piece.width]
                tiles.append(vector * lax.broadcast_in_dim(scalar, vector.shape, [0]))
            features = jnp.concatenate(tiles, 1)
            slot = ring.slot_of(group * parts + part, stages)
            plgpu.barrier_wait(smem["state_full"].at[slot])
            core.add(acc, features, smem["state_smem"].at[slot].T)
            plgpu.barrier_arrive(smem["state_free"].at[slot])
