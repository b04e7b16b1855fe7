"""Fused query at p = 4: the state before the window, the keys from the window on, and the division.

A block has one chunk's rows in `query_blocks` warpgroups of 64. For each block of y (layouts.py), row i holds
its 48 entries y_i in registers and loops over the scalars s that need them:

    scale_i * sum_s (s_i * y_i) S_s^T,   S_s [E, 48] the state of one scalar and one block.

The scalars of a stack are in one product, with their S_s side by side. As at p = 2, (q_i . k)^4 2^(g_i - g_k) v is then
added over the keys k from the window's first one to i itself, and the result is divided by the same sums without states
and values. The state's contribution to the divisor, y_i^T Z y_i, is an argument.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, results, ring, tensor_core
from pallas_kernels.power_state import configs, query_tile, window_keys
from pallas_kernels.power_state.quartic import layouts

_BLOCK = configs.BLOCK
# Blocks of y in flight: each is used until all its scalars are processed.
_VECTOR_STAGES = 2


class Operands(NamedTuple):
    """Arrays that the kernel reads.

    There are H = B K key heads and HN = B N query heads over the batch, n chunks of C, X = n C tokens, and a window of
    W.
    """

    query: jax.Array  # bfloat16 [HN, X, D], largest entries in [1/2, 1)
    vector: jax.Array  # float16 [HN, X, layout.rows], y of the queries with zeros in front
    scalars: (
        jax.Array
    )  # float16 [HN, layout.scalar_rows, X], the products in the order of the scalars, time last
    states: (
        jax.Array
    )  # float16 [H, n, U, E, P], the state that chunk c's queries read at c, times its weights
    denominator: jax.Array  # float32 [HN, X / 64, 64], the state's contribution to the sum of weights
    key: jax.Array  # bfloat16 [B, at least T, K, D]
    value: jax.Array  # bfloat16 [B, at least T, K, E]
    decay: jax.Array  # float32 [H, n, 3, (W + C) / 64, 64], `decays.Decays.of_keys`
    scale: jax.Array  # float32 [H, X / 64, 64], from the state to each query


def query_states(operands: Operands, *, time: int, with_remainder: bool, call: configs.Call):
    """Returns the weighted means of values, bfloat16 [B, T, N, E], and their sums of weights, float32 [HN, X].

    If all weights of a row are zero, its output is zero. Accumulates in float32.

    time: T. with_remainder: whether to return, between the two, what rounding the means took away, like them.
    """
    query, vector, scalars, states, _, key, value, *_ = operands
    (heads, whole, head_dim), value_dim, chunk = query.shape, value.shape[-1], call.chunk
    layout, batch_time = layouts.Layout(head_dim, value_dim), (len(key), time)
    count, stages = call.config.query_blocks, call.config.state_stages
    means = ("out", "remainder") if with_remainder else ("out",)

    def body(gmem, smem):
        tile = query_tile.QueryTile.of_thread_block(heads // len(states), chunk, count)
        keys = window_keys.Keys(gmem, smem, tile, count, call)

        def copy():
            # Inputs that every warpgroup needs from the start.
            ready = smem["ready"]
            for n in range(count):
                source = gmem["query"].at[tile.head, tile.tokens_of(n)]
                plgpu.copy_gmem_to_smem(source, smem["query_smem"].at[n], ready)
            keys.copy_decays(ready)
            blocks = tile.blocks_of(chunk, count)
            plgpu.copy_gmem_to_smem(gmem["scale"].at[tile.key_head, blocks], smem["scale_smem"], ready)
            denominators = gmem["denominator"].at[tile.head, blocks]
            plgpu.copy_gmem_to_smem(denominators, smem["denominator_smem"], ready)
            _copy_states(gmem, smem, tile, layout, count)
            # Keys are copied while the last states are still being read.
            keys.copy()
            ring.drain(jnp.int32(layout.blocks), _VECTOR_STAGES, smem["vector_free"])
            ring.drain(jnp.int32(layout.steps(layouts.STEP)[:, 1].sum()), stages, smem["state_free"])

        def compute(warpgroup, core):
            query_smem, out_smem = (smem[name].at[warpgroup] for name in ("query_smem", "out_smem"))

            def attend(acc):
                plgpu.barrier_wait(smem["ready"])
                # The state before the window.
                _read_states(core, acc, gmem["steps"], smem, warpgroup, layout)
                scale = plgpu.load(smem["scale_smem"].at[warpgroup], layout=tensor_core.PER_ROW)
                acc[...] = acc[...] * lax.broadcast_in_dim(scale, acc.shape, [0])
                # The keys from the window on.
                total = plgpu.load(smem["denominator_smem"].at[warpgroup], layout=tensor_core.PER_ROW)
                total = keys.add_values(core, acc, query_smem, total, warpgroup, power=4)
                # The division.
                gmem["total"][tile.head, tile.tokens_of(warpgroup)] = total
                query_tile.store_mean(gmem, acc, total, out_smem, tile, warpgroup)

            core.accumulators(attend, value_dim)

        return copy, compute

    output = launch.launch(
        body,
        operands._asdict()
        | {
            "states": states.reshape(*states.shape[:2], -1, layout.width),
            "steps": jnp.asarray(layout.steps(layouts.STEP).ravel()),
        },
        {
            **dict.fromkeys(means, results.kind(batch_time, heads, value_dim, value.dtype)),
            "total": jax.ShapeDtypeStruct((heads, whole), jnp.float32),
        },
        {
            "query_smem": tensor_core.operand((count,), _BLOCK, head_dim, query.dtype),
            "scale_smem": plgpu.SMEM((count, _BLOCK), jnp.float32),
            "denominator_smem": plgpu.SMEM((count, _BLOCK), jnp.float32),
            "vector_smem": tensor_core.operand(
                (_VECTOR_STAGES, count), _BLOCK, layouts.COLUMNS, vector.dtype
            ),
            "scalar_smem": plgpu.SMEM(
                (stages, layouts.STEP * layout.per_stack, count * _BLOCK), scalars.dtype
            ),
            "state_smem": tensor_core.operand(
                (stages,), layouts.STEP * value_dim, layout.width, states.dtype
            ),
            "out_smem": tensor_core.operand((count,), _BLOCK, value_dim, value.dtype),
            "ready": plgpu.Barrier(num_arrivals=count + 3),
            "vector_full": plgpu.Barrier(num_arrivals=count, num_barriers=_VECTOR_STAGES),
            "vector_free": plgpu.Barrier(num_arrivals=count, num_barriers=_VECTOR_STAGES),
            "state_full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "state_free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
            **window_keys.scratch(operands, count, call),
        },
        grid=call.grid(heads, whole, count),
        warpgroups=count,
        name="power_state_quartic_query",
        interpret=call.interpret,
    )
    return *(output[name][:, :time] for name in means), output["total"]


def _copy_states(gmem, smem, tile, layout, count):
    """Copies each block of y, then the stacks that need it and their scalars.

    The last steps may not have been read yet when it returns.
    """
    rows, stages = layouts.STEP * layout.per_stack, smem["state_smem"].shape[0]

    def copy_block(block, slot):
        columns = pl.ds(block * layouts.COLUMNS, layouts.COLUMNS)
        for n in range(count):
            source = gmem["vector"].at[tile.head, tile.tokens_of(n), columns]
            plgpu.copy_gmem_to_smem(source, smem["vector_smem"].at[slot, n], smem["vector_full"].at[slot])
        stack, steps, before = (gmem["steps"][3 * block + n] for n in range(3))

        def copy(step, slot):
            index, full = step - before, smem["state_full"].at[slot]
            stacks = pl.ds((stack + index * layouts.STEP) * layout.value_dim, layouts.STEP * layout.value_dim)
            source = gmem["states"].at[tile.key_head, tile.chunk, stacks]
            plgpu.copy_gmem_to_smem(source, smem["state_smem"].at[slot], full)
            tokens = pl.ds(tile.token, count * _BLOCK)
            source = gmem["scalars"].at[tile.head, pl.ds(index * rows, rows), tokens]
            plgpu.copy_gmem_to_smem(source, smem["scalar_smem"].at[slot], full)

        @pl.loop(before, before + steps)
        def _step(step):
            ring.put(step, stages, smem["state_free"], copy)

    @pl.loop(jnp.int32(0), jnp.int32(layout.blocks))
    def _block(block):
        ring.put(block, _VECTOR_STAGES, smem["vector_free"], copy_block)


def _read_states(core, acc, steps, smem, warpgroup, layout):
    """Adds phi(q) S^T to acc, one block of y at a time."""
    value_dim, stages = acc.shape[1], smem["state_smem"].shape[0]
    own_rows = pl.ds(warpgroup * _BLOCK, _BLOCK)

    @pl.loop(jnp.int32(0), jnp.int32(layout.blocks))
    def _block(block):
        block_slot = ring.slot_of(block, _VECTOR_STAGES)
        plgpu.barrier_wait(smem["vector_full"].at[block_slot])
        vector = plgpu.load(smem["vector_smem"].at[block_slot, warpgroup], layout=plgpu.Layout.WGMMA)
        before = steps[3 * block + 2]

        @pl.loop(before, before + steps[3 * block + 1])
        def _step(step):
            slot = ring.slot_of(step, stages)
            plgpu.barrier_wait(smem["state_full"].at[slot])
            for stack in range(layouts.STEP):
                parts = []
                for n in range(stack * layout.per_stack, (stack + 1) * layout.per_stack):
                    scalar = plgpu.load(smem["scalar_smem"].at[slot, n, own_rows], layout=tensor_core.PER_ROW)
                    parts.append(vector * lax.broadcast_in_dim(scalar, vector.shape, [0]))
                state = smem["state_smem"].at[slot, stack * value_dim : (stack + 1) * value_dim]
                # Straight-line code: the operand of the product in flight keeps its registers.
                core.add(acc, jnp.concatenate(parts, 1), state.T, wait=1)
            core.wait()
            plgpu.barrier_arrive(smem["state_free"].at[slot])

        plgpu.barrier_arrive(smem["vector_free"].at[block_slot])
