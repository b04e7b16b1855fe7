"""Queries and keys in units of their largest entries, also with time last, and the sizes of values: one launch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, numerics, results, tensor_core
from pallas_kernels.power_state import configs

# Exponent of a key of zeros, below those of all others: it has no part in the scales of states.
OF_ZEROS = -300

_BLOCK = configs.BLOCK


class Units(NamedTuple):
    """Rows divided by the power of two that brings their largest entry into [1/2, 1), and sizes of values.

    T and S = W + T are in whole blocks. W zeros are before the first key and value. Rows with infinity are not divided.
    """

    query: jax.Array  # bfloat16 [HN, T, D]
    query_by_entry: jax.Array  # float16 [HN, D, T]
    query_exponent: jax.Array  # int32 [HN, T], of the divisor; 0 for zeros
    key_by_entry: jax.Array  # float16 [B K, D, S]
    key_exponent: jax.Array  # int32 [B K, S], of the divisor; OF_ZEROS for zeros
    value_size: jax.Array  # float32 [B K, S], the largest entry


def in_units(query, key, value, *, call: configs.Call) -> Units:
    """Returns Units of query [B, T, N, D], key [B, T, K, D] and value [B, T, K, E], bfloat16, in whole blocks.

    Float16 holds the entries of a row that are above 2^-14 of its largest one.
    """
    batch, time, heads, head_dim = query.shape
    kv_heads, window = key.shape[2], call.exact_window // _BLOCK
    count = time // _BLOCK

    def body(query, key, value, *refs):
        of_queries, of_keys, (value_size,) = refs[:3], refs[3:5], refs[5:6]
        vector_smem, value_smem, unit_smem, by_entry_smem, full = refs[6:]
        row, block, head = (lax.axis_index(name) for name in ("batch", "block", "head"))

        def load(source, target, head, block):
            plgpu.copy_gmem_to_smem(
                results.block(source, row * source.shape[2] + head, block * _BLOCK), target, full
            )
            plgpu.barrier_wait(full)
            return plgpu.load(target, layout=plgpu.Layout.WGMMA).astype(jnp.float32)

        def convert(source, head, unit, by_entry, exponents, first, of_zeros):
            """Writes a block of rows. The first token is in block `first`; `of_zeros` is the exponent of zeros."""
            x = load(source, vector_smem, head, block - first)
            size = jnp.abs(x).max(1)
            exponent = jnp.where(size > 0, numerics.normal_exponent(size), of_zeros)
            # A row with infinity must not outweigh others.
            exponent = jnp.where(exponent < numerics.INFINITE, exponent, 0)
            for factor in numerics.factors(-exponent):
                x = x * lax.broadcast_in_dim(factor, x.shape, [0])
            head, tokens = row * source.shape[2] + head, pl.ds(block * _BLOCK, _BLOCK)
            by_entry_smem.T[...] = x.astype(jnp.float16)
            if unit is not None:
                unit_smem[...] = x.astype(unit.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(by_entry_smem, by_entry.at[head, :, tokens])
            if unit is not None:
                plgpu.copy_smem_to_gmem(unit_smem, unit.at[head, tokens])
            launch.store(exponents.at[head, tokens], exponent)
            plgpu.wait_smem_to_gmem(0)

        @pl.when((head < heads) & (block < count))
        def _query():
            convert(query, head, *of_queries, first=0, of_zeros=0)

        @pl.when((head >= heads) & (head < heads + kv_heads))
        def _key():
            convert(key, head - heads, None, *of_keys, first=window, of_zeros=OF_ZEROS)

        @pl.when(head >= heads + kv_heads)
        def _value():
            own = head - heads - kv_heads
            x = load(value, value_smem, own, block - window)
            tokens = pl.ds(block * _BLOCK, _BLOCK)
            launch.store(value_size.at[row * kv_heads + own, tokens], jnp.abs(x).max(1))

    length = time + call.exact_window
    types = dict(
        query=jax.ShapeDtypeStruct((batch * heads, time, head_dim), query.dtype),
        query_by_entry=jax.ShapeDtypeStruct((batch * heads, head_dim, time), jnp.float16),
        query_exponent=jax.ShapeDtypeStruct((batch * heads, time), jnp.int32),
        key_by_entry=jax.ShapeDtypeStruct((batch * kv_heads, head_dim, length), jnp.float16),
        key_exponent=jax.ShapeDtypeStruct((batch * kv_heads, length), jnp.int32),
        value_size=jax.ShapeDtypeStruct((batch * kv_heads, length), jnp.float32),
    )
    return Units(
        *plgpu.kernel(
            body,
            out_type=tuple(types.values()),
            scratch_types=[
                tensor_core.operand((), _BLOCK, head_dim, query.dtype),
                tensor_core.operand((), _BLOCK, value.shape[3], value.dtype),
                tensor_core.operand((), _BLOCK, head_dim, query.dtype),
                tensor_core.operand((), head_dim, _BLOCK, jnp.float16),
                plgpu.Barrier(),
            ],
            grid=(batch, window + count, heads + 2 * kv_heads),
            grid_names=("batch", "block", "head"),
            kernel_name="power_state_units",
            **launch.interpreted(call.interpret),
        )(query, key, value)
    )
