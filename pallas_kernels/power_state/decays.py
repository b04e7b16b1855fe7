"""Sums of log decays along each chunk, and the gradient of the decays: a launch each.

A thread block has one chunk of one head. It walks over blocks of 64 tokens: within one, sums up to each token are
masked sums of 64 x 64 terms, and a vector carries the sum of all blocks before or after.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, numerics, tensor_core
from pallas_kernels.power_state import configs

LOG2E = float(np.log2(np.e))
# Replaces log decays below `numerics.FLOOR`: exp of this is zero even where subnormal numbers are kept.
FORGET = -105
# Base-2 logarithm of zero, finite so that differences are finite.
NOTHING = -1e4

_BLOCK = configs.BLOCK
_SHAPE = _BLOCK, _BLOCK


class Decays(NamedTuple):
    """Decays of H heads and n chunks of C; in base-2 logarithms, NOTHING stands for zero."""

    # float32 [H, n, 3, (W + C) / 64, 64]: running sums over a chunk's keys, in two parts, and the decay from each key
    # to the last one of its block of 64.
    of_keys: jax.Array
    log2_from_start: jax.Array  # float32 [H, n, C], from the state before the chunk to each query
    # float32 [H, n, C], from each folded key, if it enters, to the state after the chunk
    log2_to_end: jax.Array
    log2_across: jax.Array  # float32 [H, n], from one state to the next


def or_nothing(log2_decay):
    """Returns a base-2 log decay, replaced by NOTHING where the decay counts as zero."""
    return jnp.where(log2_decay < numerics.FLOOR * LOG2E, NOTHING, log2_decay)


def chunk_decays(log2_decay, entering, *, call: configs.Call) -> Decays:
    """Returns the decays of each chunk and its window.

    log2_decay: float32 [H, W + X], of W positions before the first token and of all tokens. entering: int32 [B], the
    number of these positions that enter the state, the first ones; at others the state does not decay.
    """
    (heads, length), batch = log2_decay.shape, len(entering)
    chunk, exact_window = call.chunk, call.exact_window
    chunks, folded, window = (length - exact_window) // chunk, chunk // _BLOCK, exact_window // _BLOCK
    blocks = folded + window

    def body(log2_decay, entering, of_keys, from_start, to_end, across, log2_smem, full):
        head, index = lax.axis_index("head"), lax.axis_index("chunk")
        enter = entering[lax.div(head, jnp.int32(heads // batch))]
        plgpu.copy_gmem_to_smem(log2_decay.at[head, pl.ds(index * folded, blocks)], log2_smem, full)
        plgpu.barrier_wait(full)
        token, other = _tokens()
        zero = _per_row(0.0)

        def up_to(block, sums):
            x = _load(log2_smem.at[block])
            coarse = numerics.coarse(x, blocks * _BLOCK, -FORGET * LOG2E)
            parts = [_along_rows(part) for part in (coarse, x - coarse)]
            within = [jnp.where(other <= token, part, 0.0).sum(1) for part in parts]
            totals = [part.sum(1) for part in parts]
            here = [before + own for before, own in zip(sums, within)]
            to_last = jnp.exp2(sum(total - own for total, own in zip(totals, within)))
            for part, values in enumerate((*here, to_last)):
                launch.store(of_keys.at[head, index, part, block], values)

            @pl.when(block >= window)
            def _query():
                launch.store(from_start.at[head, index, block - window], or_nothing(here[0] + here[1]))

            return tuple(before + total for before, total in zip(sums, totals))

        lax.fori_loop(jnp.int32(0), jnp.int32(blocks), up_to, (zero, zero))

        def after(step, later):
            block = folded - 1 - step
            # Tokens of the block that enter the state; may be negative or above 64.
            count = enter - (index * folded + block) * _BLOCK
            x = jnp.where(other < count, _along_rows(_load(log2_smem.at[block])), 0.0)
            here = later + jnp.where(other > token, x, 0.0).sum(1)
            # The maximum of `token` is each row's own number, as a vector.
            launch.store(
                to_end.at[head, index, block], jnp.where(token.max(1) < count, or_nothing(here), NOTHING)
            )
            return later + x.sum(1)

        # All 64 entries of the total are equal.
        total = lax.fori_loop(jnp.int32(0), jnp.int32(folded), after, zero)
        across[head, index] = or_nothing(total).max()

    def vector(*shape):
        return jax.ShapeDtypeStruct((heads, chunks, *shape, _BLOCK), jnp.float32)

    of_keys, from_start, to_end, across = plgpu.kernel(
        body,
        out_type=(
            *(vector(3, blocks), vector(folded), vector(folded)),
            jax.ShapeDtypeStruct((heads, chunks), jnp.float32),
        ),
        scratch_types=[plgpu.SMEM((blocks, _BLOCK), jnp.float32), plgpu.Barrier()],
        grid=(chunks, heads),
        grid_names=("chunk", "head"),
        kernel_name="power_state_decays",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **launch.interpreted(call.interpret),
    )(log2_decay.reshape(heads, -1, _BLOCK), entering)
    shape = heads, chunks, chunk
    return Decays(of_keys, from_start.reshape(shape), to_end.reshape(shape), across)


class Sums(NamedTuple):
    """Sums of the gradients with respect to log w over exact pairs, then over states.

    There are Y positions of keys, whole chunks from W before the first token on, and W more of queries.
    """

    queries: jax.Array  # float32 [H, 2, Y + W]
    keys: jax.Array  # float32 [H, 2, Y]
    # float32 [H, n], <R, S> of the state before each chunk, decayed over it, and the gradient of the one after it
    inner: jax.Array
    entering: jax.Array  # int32 [B], the number of positions that enter a state, the first ones


def decay_gradient(sums: Sums, *, call: configs.Call) -> jax.Array:
    """Returns the gradient of log_decay, float32 [H, Y].

    The decay of position t is in w_ij of j < t <= i. Over exact pairs, the gradient is the sum over queries from t on
    minus the sum over keys from t on. For states, it is the sum over the queries from t on to the last of the chunk
    that folds t, which is W positions after its last key, and, if t enters the state, the inner product of the chunk
    and the sum over its keys before t.
    """
    queries, keys, inner, entering = sums
    heads, _, length = keys.shape
    folded, window = call.chunk // _BLOCK, call.exact_window // _BLOCK
    chunks = length // call.chunk
    totals = (queries[:, 0, :length] - keys[:, 0]).reshape(heads, chunks, -1).sum(-1)
    later = numerics.over_earlier(jnp.pad(totals[:, 1:], [(0, 0), (0, 1)]), jnp.sum, 0, reverse=True)
    with_states, batch = inner.shape[1], len(entering)

    def body(queries, keys, later, inner, entering, result, query_smem, key_smem, seen_smem, full):
        head, index = lax.axis_index("head"), lax.axis_index("chunk")
        enter = entering[lax.div(head, jnp.int32(heads // batch))]
        for source, target in ((queries, query_smem), (keys, key_smem)):
            for part in range(2):
                tokens = pl.ds(index * folded, target.shape[1])
                plgpu.copy_gmem_to_smem(source.at[head, part, tokens], target.at[part], full)
        plgpu.barrier_wait(full)
        token, other = _tokens()

        def over_queries(step, total):
            return total + _along_rows(_load(query_smem.at[1, folded + step])).sum(1)

        # Queries of the chunk, at positions of the next one.
        last = lax.fori_loop(jnp.int32(0), jnp.int32(window), over_queries, _per_row(later[head, index]))

        def after(step, total):
            block = folded - 1 - step
            exact, query = (_load(query_smem.at[part, block]) for part in range(2))
            x = _along_rows(exact - _load(key_smem.at[0, block]) + query)
            # Kept for the loop over keys, which runs the other way.
            seen_smem[block] = total + jnp.where(other >= token, x, 0.0).sum(1)
            return total + x.sum(1)

        lax.fori_loop(jnp.int32(0), jnp.int32(folded), after, last)
        plgpu.commit_smem()

        def before(block, total):
            count = enter - (index * folded + block) * _BLOCK
            x = _along_rows(_load(key_smem.at[1, block]))
            here = total + jnp.where(other < token, x, 0.0).sum(1)
            here = jnp.where(token.max(1) < count, here, 0.0)
            seen = plgpu.load(seen_smem.at[block], layout=tensor_core.PER_ROW)
            launch.store(result.at[head, index * folded + block], seen + here)
            return total + x.sum(1)

        # A last chunk of keys without queries has no state after it.
        inner_here = jnp.where(index < with_states, inner[head, jnp.minimum(index, with_states - 1)], 0.0)
        lax.fori_loop(jnp.int32(0), jnp.int32(folded), before, _per_row(inner_here))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((heads, length // _BLOCK, _BLOCK), jnp.float32),
        scratch_types=[
            plgpu.SMEM((2, folded + window, _BLOCK), jnp.float32),
            plgpu.SMEM((2, folded, _BLOCK), jnp.float32),
            plgpu.SMEM((folded, _BLOCK), jnp.float32),
            plgpu.Barrier(num_arrivals=4),
        ],
        grid=(chunks, heads),
        grid_names=("chunk", "head"),
        kernel_name="power_state_decays_vjp",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **launch.interpreted(call.interpret),
    )(*(x.reshape(heads, 2, -1, _BLOCK) for x in (queries, keys)), later, inner, entering).reshape(
        heads, length
    )


def _load(vector):
    """Loads a vector of 64 from shared memory, one number a column of a block."""
    return plgpu.load(vector, layout=tensor_core.PER_COLUMN)


def _along_rows(vector):
    return lax.broadcast_in_dim(vector, _SHAPE, [1])


def _tokens():
    """Returns the two tokens of each of 64 x 64 pairs."""
    return (plgpu.broadcasted_iota(jnp.int32, _SHAPE, n, layout=plgpu.Layout.WGMMA) for n in (0, 1))


def _per_row(number):
    """Returns a vector of 64 times the same number, as sums over the columns of a block have it."""
    return plgpu.layout_cast(lax.broadcast(jnp.float32(number), (_BLOCK,)), tensor_core.PER_ROW)
