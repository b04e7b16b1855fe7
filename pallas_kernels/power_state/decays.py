"""Sums of log decays along each chunk, and the gradient of the decays: a launch each.

A thread block has one chunk of one head. It walks over blocks of 64 tokens: within one, sums up to each token are
masked sums of 64 x 64 terms, and a vector carries the sum of all blocks before.
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
    """Base-2 logarithms of the decays of H heads and n chunks of C; NOTHING stands for zero."""

    # float32 [H, n, 3, (W + C) / 64, 64]: running sums over a chunk's keys, in two parts, and the decay from each key
    # to the last one of its block of 64.
    blocks: jax.Array
    log2_from_start: jax.Array  # float32 [H, n, C], from the state before the chunk to each query
    log2_to_end: jax.Array  # float32 [H, n, C], from each old key to the state after the chunk
    log2_across: jax.Array  # float32 [H, n], from one state to the next


def log2(log2_decay):
    """Returns a base-2 log decay, replaced by NOTHING where the decay counts as zero."""
    return jnp.where(log2_decay < numerics.FLOOR * LOG2E, NOTHING, log2_decay)


def chunk_decays(log2_decay, enters, *, call: configs.Call) -> Decays:
    """Returns the decays of each chunk and its window.

    log2_decay: float32 [H, W + X], of the window before the first token and all tokens. enters: float32 [H, W + X], 1
    where a token enters the state, else 0: the state does not decay there.
    """
    heads, length = log2_decay.shape
    chunk, exact_window = call.chunk, call.exact_window
    chunks, folded, window = (length - exact_window) // chunk, chunk // _BLOCK, exact_window // _BLOCK
    blocks = folded + window

    def body(log2_decay, enters, decay, from_start, to_end, across, decay_smem, enters_smem, full):
        head, index = lax.axis_index("head"), lax.axis_index("chunk")
        begin = index * folded
        plgpu.copy_gmem_to_smem(log2_decay.at[head, pl.ds(begin, blocks)], decay_smem, full)
        plgpu.copy_gmem_to_smem(enters.at[head, pl.ds(begin, folded)], enters_smem, full)
        plgpu.barrier_wait(full)
        token, other = _tokens()
        zero = _per_row(0.0)

        def up_to(block, sums):
            x = tensor_core.along_rows(decay_smem.at[block], _SHAPE)
            coarse = numerics.coarse(x, blocks * _BLOCK, -FORGET * LOG2E)
            parts = coarse, x - coarse
            here = [before + jnp.where(other <= token, part, 0.0).sum(1) for before, part in zip(sums, parts)]
            to_last = jnp.exp2(jnp.where(other > token, x, 0.0).sum(1))
            for part, values in enumerate((*here, to_last)):
                launch.store(decay.at[head, index, part, block], values)

            @pl.when(block >= window)
            def _query():
                launch.store(from_start.at[head, index, block - window], log2(here[0] + here[1]))

            return tuple(before + part.sum(1) for before, part in zip(sums, parts))

        lax.fori_loop(jnp.int32(0), jnp.int32(blocks), up_to, (zero, zero))

        def after(step, later):
            block = folded - 1 - step
            x, entering = (
                tensor_core.along_rows(smem.at[block], _SHAPE) for smem in (decay_smem, enters_smem)
            )
            x = jnp.where(entering > 0, x, 0.0)
            mine = plgpu.load(enters_smem.at[block], layout=tensor_core.PER_ROW)
            here = later + jnp.where(other > token, x, 0.0).sum(1)
            launch.store(to_end.at[head, index, block], log2(jnp.where(mine > 0, here, NOTHING)))
            return later + x.sum(1)

        total = lax.fori_loop(jnp.int32(0), jnp.int32(folded), after, zero)
        launch.store(across.at[head, index], log2(total))

    def vector(*shape):
        return jax.ShapeDtypeStruct((heads, chunks, *shape, _BLOCK), jnp.float32)

    decay, from_start, to_end, across = plgpu.kernel(
        body,
        out_type=(vector(3, blocks), vector(folded), vector(folded), vector()),
        scratch_types=[
            plgpu.SMEM((blocks, _BLOCK), jnp.float32),
            plgpu.SMEM((folded, _BLOCK), jnp.float32),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(chunks, heads),
        grid_names=("chunk", "head"),
        kernel_name="power_state_decays",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **launch.interpreted(call.interpret),
    )(*(x.reshape(heads, -1, _BLOCK) for x in (log2_decay, enters)))
    shape = heads, chunks, chunk
    return Decays(decay, from_start.reshape(shape), to_end.reshape(shape), across[..., 0])


class Sums(NamedTuple):
    """Sums of the gradients with respect to log w over Y positions, whole chunks from W before the first token on.

    At position t is the key t, and the query W before it.
    """

    window: jax.Array  # float32 [H, Y], over in-window pairs: those of the query minus those of the key
    queries: jax.Array  # float32 [H, Y + W], those of the query over keys in the state
    keys: jax.Array  # float32 [H, Y], those of the key over queries that read it in a state
    enters: jax.Array  # float32 [H, Y], 1 where the key enters the state
    inner: jax.Array  # float32 [H, n], inner product of the state before each chunk with its gradient


def decay_gradient(sums: Sums, *, call: configs.Call) -> jax.Array:
    """Returns the gradient of log_decay, float32 [H, Y].

    The decay of position t is in w_ij of j < t <= i. Over exact pairs, the gradient is the sum over queries from t on
    minus the sum over keys from t on. For states, it is the sum over the queries from t on to the end of the chunk that
    folds t and, if t enters the state, the sum over the chunk's keys before t.
    """
    heads, length = sums.window.shape
    folded, window = call.chunk // _BLOCK, call.exact_window // _BLOCK
    chunks = length // call.chunk
    totals = sums.window.reshape(heads, chunks, -1).sum(-1)
    after = jnp.pad(totals[:, 1:], [(0, 0), (0, 1)])
    later = numerics.over_earlier(after, jnp.sum, 0, reverse=True)
    inner = jnp.pad(sums.inner, [(0, 0), (0, chunks - sums.inner.shape[1])])

    def body(*refs):
        *gmem, later, inner, result, window_smem, query_smem, key_smem, enters_smem, full = refs
        head, index = lax.axis_index("head"), lax.axis_index("chunk")
        for source, target in zip(gmem, (window_smem, query_smem, key_smem, enters_smem), strict=True):
            tokens = pl.ds(index * folded, target.shape[0])
            plgpu.copy_gmem_to_smem(source.at[head, tokens], target, full)
        plgpu.barrier_wait(full)
        token, other = _tokens()

        def over_queries(step, total):
            return total + tensor_core.along_rows(query_smem.at[folded + step], _SHAPE).sum(1)

        # Queries of the chunk, at positions of the next one.
        last = lax.fori_loop(jnp.int32(0), jnp.int32(window), over_queries, _per_row(later[head, index]))

        def after(step, total):
            block = folded - 1 - step
            x = tensor_core.along_rows(window_smem.at[block], _SHAPE) + tensor_core.along_rows(
                query_smem.at[block], _SHAPE
            )
            # A block is read before it is written, and by all warps of the warpgroup.
            here = total + jnp.where(other >= token, x, 0.0).sum(1)
            plgpu.commit_smem()
            window_smem[block] = here
            return total + x.sum(1)

        lax.fori_loop(jnp.int32(0), jnp.int32(folded), after, last)
        plgpu.commit_smem()

        def before(block, total):
            x = tensor_core.along_rows(key_smem.at[block], _SHAPE)
            here = total + jnp.where(other < token, x, 0.0).sum(1)
            enters, seen = (
                plgpu.load(smem.at[block], layout=tensor_core.PER_ROW) for smem in (enters_smem, window_smem)
            )
            launch.store(result.at[head, index * folded + block], seen + jnp.where(enters > 0, here, 0.0))
            return total + x.sum(1)

        lax.fori_loop(jnp.int32(0), jnp.int32(folded), before, _per_row(inner[head, index]))

    arrays = sums.window, sums.queries, sums.keys, sums.enters
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((heads, length // _BLOCK, _BLOCK), jnp.float32),
        scratch_types=[
            *(plgpu.SMEM((folded + more, _BLOCK), jnp.float32) for more in (0, window, 0, 0)),
            plgpu.Barrier(num_arrivals=4),
        ],
        grid=(chunks, heads),
        grid_names=("chunk", "head"),
        kernel_name="power_state_decays_vjp",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **launch.interpreted(call.interpret),
    )(*(x.reshape(heads, -1, _BLOCK) for x in arrays), later, inner).reshape(heads, length)


def _tokens():
    """Returns the two tokens of each of 64 x 64 pairs."""
    return (plgpu.broadcasted_iota(jnp.int32, _SHAPE, n, layout=plgpu.Layout.WGMMA) for n in (0, 1))


def _per_row(number):
    """Returns a vector of 64 times the same number, as sums over the columns of a block have it."""
    return plgpu.layout_cast(lax.broadcast(jnp.float32(number), (_BLOCK,)), tensor_core.PER_ROW)
