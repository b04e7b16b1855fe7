"""Fused query at p = 4: the state before the window, the keys from the window on, and the division.

A block has one chunk's rows in `query_blocks` warpgroups of 64. For each block of y (layout.py), row i holds
its 48 entries y_i in registers and loops over the scalars s that need them:

    scale_i * sum_s (s_i * y_i) S_s^T,   S_s [E, 48] the state of one scalar and one block.

The scalars of a stack are in one product, with their S_s side by side. As at p = 2, (q_i . k)^4 2^(g_i - g_k) v is then
added over the keys k from the window's first one to i itself, and the result is divided by the same sums without states
and values. The state's contribution to the divisor, y_i^T Z y_i, is an argument.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import products, results, ring
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import near, queries
from pallas_kernels.power_state.quartic import layout as layouts

__all__ = ["query_states"]

_BLOCK = configs.BLOCK
_ROWS = plgpu.Layout.WGMMA.reduce(1)
# Blocks of y in flight: each is used until all its scalars are processed.
_VECTOR_STAGES = 2


def query_states(
    query,
    vector,
    scalars,
    states,
    denominator,
    key,
    value,
    decay,
    scale,
    *,
    layout,
    config,
    chunk,
    exact_window,
    batch_time,
    interpret=None,
):
    """Returns the weighted means of values, bfloat16 [B, T, N, E], and their sums of weights, float32 [HN, X].

    batch_time: B and T; HN = B N, and X is T in whole chunks.

    query: bfloat16 [HN, X, D], HN a multiple of H. vector: 16-bit [HN, X, layout.rows], y of the queries with zeros in
    front. scalars: 16-bit [HN, layout.scalar_rows, X], the same products in the order of the scalars, time last.
    states: 16-bit [H, n, U, E, P], the state that chunk c's queries read at c, times its weights.
    denominator: float32 [HN, X / 64, 64], the state's contribution to the sum of weights.
    key: bfloat16 [H, W + X, D]; value: bfloat16 [H, W + X, E]; the first W are the window before the first chunk.
    decay: float32 [H, n, 2, (W + C) / 64, 64], running sums of base-2 logarithms over a chunk and its window, coarse
    and fine. scale: float32 [H, X / 64, 64], from the state to each query.

    If all weights of a row are zero, its output is zero. Accumulates in float32.
    """
    states = states.reshape(*states.shape[:2], -1, layout.width)
    steps = jnp.asarray(layout.steps.ravel())
    scratch = _scratch(query, vector, scalars, states, key, value, decay, layout, config)
    body = functools.partial(_body, layout=layout)
    arrays = query, vector, scalars, states, denominator, key, value, decay, scale, steps
    options = {"config": config, "chunk": chunk, "exact_window": exact_window}
    options |= {"batch_time": batch_time, "interpret": interpret}
    name = "power_state_quartic_query"
    return queries.launch(body, arrays, scratch, key=key, value=value, name=name, **options)


def _scratch(query, vector, scalars, states, key, value, decay, layout, config):
    """Returns the shared memory of a block, by name."""
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    count, stages = config.query_blocks, config.state_stages
    return {
        "query_smem": products.operand((count,), _BLOCK, head_dim, query.dtype),
        "decay_smem": plgpu.SMEM(decay.shape[2:], jnp.float32),
        "scale_smem": plgpu.SMEM((count, _BLOCK), jnp.float32),
        "denominator_smem": plgpu.SMEM((count, _BLOCK), jnp.float32),
        "vector_smem": products.operand((_VECTOR_STAGES, count), _BLOCK, layouts.COLUMNS, vector.dtype),
        "scalar_smem": plgpu.SMEM((stages, layouts.STEP * layout.per_stack, count * _BLOCK), scalars.dtype),
        "state_smem": products.operand((stages,), layouts.STEP * value_dim, layout.width, states.dtype),
        "key_smem": products.operand((config.key_stages,), _BLOCK, head_dim, key.dtype),
        "value_smem": products.operand((config.key_stages,), _BLOCK, value_dim, value.dtype),
        "out_smem": products.operand((count,), _BLOCK, value_dim, value.dtype),
        "ready": plgpu.Barrier(num_arrivals=count + 3),
        "vector_full": plgpu.Barrier(num_arrivals=count, num_barriers=_VECTOR_STAGES),
        "vector_free": plgpu.Barrier(num_arrivals=count, num_barriers=_VECTOR_STAGES),
        "state_full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "state_free": plgpu.Barrier(num_arrivals=count, num_barriers=stages),
        "key_full": plgpu.Barrier(num_arrivals=2, num_barriers=config.key_stages),
        "key_free": plgpu.Barrier(num_arrivals=count, num_barriers=config.key_stages),
    }


def _body(*refs, layout, config, chunk, exact_window, groups, interpreted=None, **smem):
    inputs = (
        "query",
        "vector",
        "scalars",
        "states",
        "denominator",
        "key",
        "value",
        "decay",
        "scale",
        "steps",
    )
    gmem = dict(zip((*inputs, "out", "total"), refs, strict=True))
    warpgroup = lax.axis_index("warpgroup")
    place = {
        "head": lax.axis_index("head"),
        "key_head": lax.div(lax.axis_index("head"), jnp.int32(groups)),
        "chunk": lax.axis_index("chunk"),
        # The block of 64 rows of the first warpgroup, counted in the chunk.
        "block": lax.axis_index("rows") * config.query_blocks,
    }

    @pl.when(warpgroup == config.query_blocks)
    def _produce():
        if config.query_blocks > 1:
            plgpu.set_max_registers(24, action="decrease")
        _copy_inputs(gmem, smem, place, config, chunk)
        _copy_states(gmem, smem, place, layout, config, chunk)
        # Keys are copied while the last states are still being read.
        near.copy_keys(gmem, smem, place, config, chunk, exact_window)
        ring.drain(jnp.int32(layout.blocks), _VECTOR_STAGES, smem["vector_free"])
        ring.drain(jnp.int32(layout.steps[:, 1].sum()), config.state_stages, smem["state_free"])

    @pl.when(warpgroup < config.query_blocks)
    def _consume():
        if config.query_blocks > 1:
            plgpu.set_max_registers({2: 232, 3: 160}[config.query_blocks], action="increase")
        own = {name: smem[name].at[warpgroup] for name in ("query_smem", "out_smem")}
        held = None if interpreted is None else [ref.at[warpgroup] for ref in interpreted]
        block = place["block"] + warpgroup
        end = place["block"] + config.query_blocks - 1

        def rows(acc):
            plgpu.barrier_wait(smem["ready"])
            _read_states(acc, gmem["steps"], smem, warpgroup, layout, config, held)
            scale = plgpu.load(smem["scale_smem"].at[warpgroup], layout=_ROWS)
            acc[...] = acc[...] * lax.broadcast_in_dim(scale, acc.shape, [0])
            total = plgpu.load(smem["denominator_smem"].at[warpgroup], layout=_ROWS)
            total = queries.read_keys(
                acc, own, smem, total, block, end, config, exact_window, held and held[1:], power=4
            )
            begin = place["chunk"] * chunk + block * _BLOCK
            gmem["total"][place["head"], pl.ds(begin, _BLOCK)] = total
            queries.store_mean(acc, total, own["out_smem"], results.block(gmem["out"], place["head"], begin))

        products.with_accumulators(rows, [own["out_smem"].shape], held and held[:1])


def _copy_inputs(gmem, smem, place, config, chunk):
    """Copies the inputs that every warpgroup needs from the start."""
    head, key_head, ready = place["head"], place["key_head"], smem["ready"]
    begin = place["chunk"] * chunk + place["block"] * _BLOCK
    for n in range(config.query_blocks):
        time = pl.ds(begin + n * _BLOCK, _BLOCK)
        plgpu.copy_gmem_to_smem(gmem["query"].at[head, time], smem["query_smem"].at[n], ready)
    plgpu.copy_gmem_to_smem(gmem["decay"].at[key_head, place["chunk"]], smem["decay_smem"], ready)
    rows = pl.ds(place["chunk"] * (chunk // _BLOCK) + place["block"], config.query_blocks)
    plgpu.copy_gmem_to_smem(gmem["scale"].at[key_head, rows], smem["scale_smem"], ready)
    plgpu.copy_gmem_to_smem(gmem["denominator"].at[head, rows], smem["denominator_smem"], ready)


def _copy_states(gmem, smem, place, layout, config, chunk):
    """Copies each block of y, then the stacks that need it and their scalars.

    The last steps may not have been read yet when it returns.
    """
    head, begin = place["head"], place["chunk"] * chunk + place["block"] * _BLOCK
    rows = layouts.STEP * layout.per_stack
    stages = config.state_stages

    def copy_block(block, slot):
        columns = pl.ds(block * layouts.COLUMNS, layouts.COLUMNS)
        for n in range(config.query_blocks):
            source = gmem["vector"].at[head, pl.ds(begin + n * _BLOCK, _BLOCK), columns]
            plgpu.copy_gmem_to_smem(source, smem["vector_smem"].at[slot, n], smem["vector_full"].at[slot])
        stack, count, before = (gmem["steps"][3 * block + n] for n in range(3))

        def copy(step, slot):
            index, full = step - before, smem["state_full"].at[slot]
            stacks = pl.ds((stack + index * layouts.STEP) * layout.value_dim, layouts.STEP * layout.value_dim)
            source = gmem["states"].at[place["key_head"], place["chunk"], stacks]
            plgpu.copy_gmem_to_smem(source, smem["state_smem"].at[slot], full)
            time = pl.ds(begin, config.query_blocks * _BLOCK)
            source = gmem["scalars"].at[head, pl.ds(index * rows, rows), time]
            plgpu.copy_gmem_to_smem(source, smem["scalar_smem"].at[slot], full)

        @pl.loop(before, before + count)
        def _step(step):
            ring.put(step, stages, smem["state_free"], copy)

    @pl.loop(jnp.int32(0), jnp.int32(layout.blocks))
    def _block(block):
        ring.put(block, _VECTOR_STAGES, smem["vector_free"], copy_block)


def _read_states(acc, steps, smem, warpgroup, layout, config, interpreted):
    """Adds phi(q) S^T to acc, one block of y at a time."""
    value_dim = acc.shape[1]
    own_rows = pl.ds(warpgroup * _BLOCK, _BLOCK)

    @pl.loop(jnp.int32(0), jnp.int32(layout.blocks))
    def _block(block):
        block_slot = ring.slot_of(block, _VECTOR_STAGES)
        plgpu.barrier_wait(smem["vector_full"].at[block_slot])
        vector = plgpu.load(smem["vector_smem"].at[block_slot, warpgroup], layout=plgpu.Layout.WGMMA)
        before = steps[3 * block + 2]

        @pl.loop(before, before + steps[3 * block + 1])
        def _step(step):
            slot = ring.slot_of(step, config.state_stages)
            plgpu.barrier_wait(smem["state_full"].at[slot])
            for stack in range(layouts.STEP):
                parts = []
                for n in range(stack * layout.per_stack, (stack + 1) * layout.per_stack):
                    scalar = plgpu.load(smem["scalar_smem"].at[slot, n, own_rows], layout=_ROWS)
                    parts.append(vector * lax.broadcast_in_dim(scalar, vector.shape, [0]))
                state = smem["state_smem"].at[slot, stack * value_dim : (stack + 1) * value_dim]
                # Straight-line code: the operand of the product in flight keeps its registers.
                products.accumulate(acc, jnp.concatenate(parts, 1), state.T, interpreted, wait=1)
            if interpreted is None:
                plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(smem["state_free"].at[slot])

        plgpu.barrier_arrive(smem["vector_free"].at[block_slot])
