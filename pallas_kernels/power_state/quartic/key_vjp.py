"""Gradients of keys and values at p = 4: from the gradient of the state after them, and from in-window queries.

A block has `key_vjp_blocks` warpgroups of 64 keys of one chunk. One pass over the gradient of the state after the chunk
computes both from-state contributions (`state_vjp`), of the key and the value divided by powers of two so that
they fit in 16 bits. `window_queries` adds those of in-window queries. The normalizer's contribution is added in plain
JAX, since the kernel has no room for its matrix.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, tensor_core
from pallas_kernels.power_state import configs, window_queries
from pallas_kernels.power_state.quartic import layouts, state_vjp

_BLOCK = configs.BLOCK
_POWER = 4


class Rows(NamedTuple):
    """Vectors of keys, in the order in which the kernel takes them.

    The largest entry of a value times 2^-a, and of a key times 2^-b, is in [1/2, 1). kappa is the decay from the key to
    the state after its chunk, times the factor that undoes the scale of the stored gradient; 0 if the key does not
    update the state.
    """

    narrow_value: jax.Array  # 2^-a
    state_key: jax.Array  # kappa 2^(a + 2 b)
    state_value: jax.Array  # kappa 2^(4 b)
    # Running sums of base-2 logarithms of decays in the frame of the key's own chunk.
    coarse: jax.Array
    fine: jax.Array
    # The same in the frame of the previous chunk, whose queries attend to the first keys of this one.
    coarse_before: jax.Array
    fine_before: jax.Array


class Operands(NamedTuple):
    """Arrays that the kernel reads; positions are those of keys with the window in front, Y = m C of them.

    m is the n chunks of queries or one more, whose keys are in no state. H, HN, X and n are as in `query.Operands`.
    """

    key: jax.Array  # bfloat16 [H, Y, D]
    vector: jax.Array  # float16 [H, Y, layout.rows], y of keys divided by powers of two, with zeros in front
    scalars: (
        jax.Array
    )  # float16 [H, layout.scalar_rows, Y], the products in the order of the scalars, time last
    value: jax.Array  # bfloat16 [H, Y, E]
    # float16 [H, n, U, E, P], the gradient of the state for the keys of chunk c at n - 1 - c, times its weights
    states: jax.Array
    query: jax.Array  # bfloat16 [HN, X, D]
    dout: jax.Array  # bfloat16 [B, at least T, N, E]
    rows: jax.Array  # float32 [H, Y / 64, 7, 64], in the order of `Rows`
    columns: jax.Array  # float32 [HN, X / 64, 5, 64], in the order of `window_queries.Columns`


def key_vjp(operands: Operands, *, call: configs.Call):
    """Returns float32 gradients of keys [H, Y, D] and values [H, Y, E], and sums [H, 2, Y].

    The gradients of keys lack the normalizer's contribution.

    The window is at most a chunk. The sums are those of the gradient with respect to the logarithms of weights: over
    in-window queries, and over queries that read the key from the state, without the normalizer's contribution.
    Accumulates in float32.
    """
    key, _, _, value, states, query, _, rows, _ = operands
    (heads, time, head_dim), value_dim, chunk = key.shape, value.shape[-1], call.chunk
    layout, count = layouts.Layout(head_dim, value_dim), call.config.key_vjp_blocks
    chunks, groups = states.shape[1], len(query) // heads

    def body(gmem, smem):
        head, index = lax.axis_index("head"), lax.axis_index("chunk")
        # The block of 64 padded positions of the first warpgroup.
        block = index * (chunk // _BLOCK) + lax.axis_index("rows") * count
        # Keys after the last query's chunk are in no state.
        blocks = jnp.where(index < chunks, layout.blocks, 0)
        vectors = state_vjp.Vectors(head, block * _BLOCK, head, jnp.maximum(chunks - 1 - index, 0), blocks)

        def span(warpgroup):
            return window_queries.Span.of_keys(index, block, warpgroup, chunks, call)

        def copy():
            # Inputs that every warpgroup needs from the start.
            ready = smem["ready"]
            for n in range(count):
                for name in ("key", "value"):
                    source = gmem[name].at[vectors.head, vectors.tokens_of(n)]
                    plgpu.copy_gmem_to_smem(source, smem[f"{name}_smem"].at[n], ready)
            source = gmem["rows"].at[vectors.head, pl.ds(block, count)]
            plgpu.copy_gmem_to_smem(source, smem["rows_smem"], ready)
            states = state_vjp.States(gmem, smem, vectors, layout)
            states.copy(count)
            # Queries are copied while the last gradients of states are still being read.
            window_queries.Queries(smem, span(0), groups).copy(gmem, vectors.head)
            states.drain()

        def compute(warpgroup, core):
            own = {name: smem[name].at[warpgroup] for name in ("key_smem", "value_smem")}
            rows_smem = smem["rows_smem"].at[warpgroup]
            own["decay_smem"] = rows_smem.at[pl.ds(Rows._fields.index("coarse"), 4)]
            row = Rows(*(rows_smem.at[n] for n in range(rows_smem.shape[0])))

            def sums(dkey, dvalue):
                plgpu.barrier_wait(smem["ready"])
                # The gradient of the state after the chunk.
                narrow = tensor_core.along_columns(row.narrow_value, dvalue.shape) * state_vjp.load(
                    own["value_smem"]
                )
                # The most scalars at a time that compile without register spills.
                together = 2 if value_dim == 32 and count == 1 else 3
                states = state_vjp.States(gmem, smem, vectors, layout)
                states.read(core, warpgroup, own["key_smem"], narrow, (dkey, dvalue), together)
                dkey[...] = dkey[...] * tensor_core.along_columns(row.state_key, dkey.shape) / _POWER
                dvalue[...] = dvalue[...] * tensor_core.along_columns(row.state_value, dvalue.shape)
                state_sum = (state_vjp.load(own["key_smem"]) * dkey[...]).sum(1)
                # The queries that attend to the keys in their window.
                queries = window_queries.Queries(smem, span(warpgroup), groups)
                window_sum = queries.read(core, dkey, dvalue, own, _POWER)
                tokens = vectors.tokens_of(warpgroup)
                for n, total in enumerate((window_sum, state_sum)):
                    gmem["sums"][vectors.head, n, tokens] = total
                gmem["dkey"][vectors.head, tokens] = dkey[...] * _POWER
                # Not through shared memory: there is no register left for the address of the value there.
                gmem["dvalue"][vectors.head, tokens] = dvalue[...]

            core.accumulators(sums, head_dim, value_dim)

        return copy, compute

    output = launch.launch(
        body,
        operands._asdict()
        | {"states": states.reshape(*states.shape[:2], -1, layout.width)}
        | state_vjp.tables(layout),
        {
            "dkey": jax.ShapeDtypeStruct(key.shape, jnp.float32),
            "dvalue": jax.ShapeDtypeStruct(value.shape, jnp.float32),
            "sums": jax.ShapeDtypeStruct((heads, 2, time), jnp.float32),
        },
        {
            "key_smem": tensor_core.operand((count,), _BLOCK, head_dim, key.dtype),
            "value_smem": tensor_core.operand((count,), _BLOCK, value_dim, value.dtype),
            "rows_smem": plgpu.SMEM((count, *rows.shape[2:]), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=2 * count + 1),
            **window_queries.scratch(head_dim, value_dim, query.dtype, count),
            **state_vjp.scratch(layout, count, call.config.key_vjp_stages),
        },
        grid=call.grid(heads, time, count),
        warpgroups=count,
        copying_registers=24,
        name="power_state_quartic_key_vjp",
        interpret=call.interpret,
    )
    return output["dkey"], output["dvalue"], output["sums"]
