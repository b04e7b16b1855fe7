"""Gradient of queries at p = 4: through the state, and through the keys from the window on.

A block has one chunk's rows in `query_vjp_blocks` warpgroups of 64. `state_vjp` computes the from-state contribution,
of the query and its output's cotangent divided by a power of two so that they fit in 16 bits. `window_keys` adds
that of the in-window keys. The normalizer's contribution is added in plain JAX, since the kernel has no room for its
matrix.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, results, tensor_core
from pallas_kernels.power_state import configs, query_tile, window_keys
from pallas_kernels.power_state.quartic import layouts, state_vjp

_BLOCK = configs.BLOCK
_POWER = 4
# Number of scalars of a state per step.
_TOGETHER = 3


class Rows(NamedTuple):
    """Factors of each query, in the order in which the kernel takes them."""

    narrow: jax.Array  # 2^-a, scales the largest entry of its dout into [1/2, 1)
    state: jax.Array  # 2^a times the factor from the stored state to the query
    delta: jax.Array  # dout . out
    inverse: jax.Array  # 1 / the sum of weights, 0 where that is 0


class Operands(NamedTuple):
    """Arrays that the kernel reads, with those of `query.Operands`."""

    query: jax.Array
    vector: jax.Array
    scalars: jax.Array
    dout: jax.Array  # bfloat16 [B, at least T, N, E], the cotangent of the weighted mean
    states: jax.Array
    key: jax.Array
    value: jax.Array
    decay: jax.Array
    rows: jax.Array  # float32 [HN, X / 64, 4, 64], in the order of `Rows`


def query_vjp(operands: Operands, *, call: configs.Call):
    """Returns the gradient of every query, float32 [HN, X, D], and float32 sums [HN, 2, X].

    The gradient lacks the normalizer's contribution.

    The sums are those of the gradient with respect to the logarithms of weights: over the in-window keys, and over the
    keys in the state, without the normalizer's contribution. Accumulates in float32.
    """
    query, _, _, dout, states, _, value, _, rows = operands
    (heads, time, head_dim), value_dim, chunk = query.shape, value.shape[-1], call.chunk
    layout, count = layouts.Layout(head_dim, value_dim), call.config.query_vjp_blocks

    def body(gmem, smem):
        tile = query_tile.QueryTile.of_thread_block(heads // len(states), chunk, count)
        vectors = state_vjp.Vectors(
            tile.head, tile.token, tile.key_head, tile.chunk, jnp.int32(layout.blocks)
        )
        keys = window_keys.Keys(gmem, smem, tile, count, call)

        def copy():
            # Inputs that every warpgroup needs from the start.
            ready = smem["ready"]
            for n in range(count):
                query = gmem["query"].at[tile.head, tile.tokens_of(n)]
                dout = results.block(gmem["dout"], tile.head, tile.token + n * _BLOCK)
                plgpu.copy_gmem_to_smem(query, smem["query_smem"].at[n], ready)
                plgpu.copy_gmem_to_smem(dout, smem["dout_smem"].at[n], ready)
            keys.copy_decays(ready)
            blocks = tile.blocks_of(chunk, count)
            plgpu.copy_gmem_to_smem(gmem["rows"].at[tile.head, blocks], smem["rows_smem"], ready)
            states = state_vjp.States(gmem, smem, vectors, layout)
            states.copy(count)
            # Keys are copied while the last states are still being read.
            keys.copy()
            states.drain()

        def compute(warpgroup, core):
            query_smem, dout_smem = (smem[name].at[warpgroup] for name in ("query_smem", "dout_smem"))
            rows_smem = smem["rows_smem"].at[warpgroup]
            row = Rows(*(rows_smem.at[n] for n in range(rows_smem.shape[0])))

            def attend(gradient):
                plgpu.barrier_wait(smem["ready"])
                # The state before the window.
                dout = tensor_core.along_columns(row.narrow, dout_smem.shape) * state_vjp.load(dout_smem)
                states = state_vjp.States(gmem, smem, vectors, layout)
                states.read(core, warpgroup, query_smem, dout, (gradient, None), _TOGETHER)
                gradient[...] = gradient[...] * tensor_core.along_columns(row.state, gradient.shape) / _POWER
                state_sum = (state_vjp.load(query_smem) * gradient[...]).sum(1)
                # The keys from the window on.
                own_rows = (lambda: query_smem), dout_smem, plgpu.load(row.delta, layout=tensor_core.PER_ROW)
                window_sum = keys.add_gradient(core, gradient, own_rows, warpgroup, _POWER)
                # The division.
                tokens = tile.tokens_of(warpgroup)
                inverse = plgpu.load(row.inverse, layout=tensor_core.PER_ROW)
                for n, total in enumerate((window_sum, state_sum)):
                    gmem["sums"][tile.head, n, tokens] = inverse * total
                factor = lax.broadcast_in_dim(_POWER * inverse, gradient.shape, [0])
                gmem["dquery"][tile.head, tokens] = gradient[...] * factor

            core.accumulators(attend, head_dim)

        return copy, compute

    output = launch.launch(
        body,
        operands._asdict()
        | {"states": states.reshape(*states.shape[:2], -1, layout.width)}
        | state_vjp.tables(layout),
        {
            "dquery": jax.ShapeDtypeStruct(query.shape, jnp.float32),
            "sums": jax.ShapeDtypeStruct((heads, 2, time), jnp.float32),
        },
        {
            "query_smem": tensor_core.operand((count,), _BLOCK, head_dim, query.dtype),
            "dout_smem": tensor_core.operand((count,), _BLOCK, value_dim, dout.dtype),
            "rows_smem": plgpu.SMEM((count, *rows.shape[2:]), jnp.float32),
            "ready": plgpu.Barrier(num_arrivals=2 * count + 2),
            **window_keys.scratch(operands, count, call),
            **state_vjp.scratch(layout, count, call.config.query_vjp_stages),
        },
        grid=call.grid(heads, time, count),
        warpgroups=count,
        name="power_state_quartic_query_vjp",
        interpret=call.interpret,
    )
    return output["dquery"], output["sums"]
