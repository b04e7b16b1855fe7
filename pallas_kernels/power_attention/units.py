"""Queries and keys in units of their length: one launch reads each row once and writes it in 16 bits."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, numerics, tensor_core
from pallas_kernels.power_attention import pairs, sequence

_LEAST = np.finfo(np.float32).minexp


def unit_lengths(query: jax.Array, key: jax.Array, bits: int, *, interpret=None):
    """Returns rows times the power of two that brings their length into [1/2, 1), and the exponents of that length.

    Exact except where float16 is not normal. Rows below float32's normal numbers count as zero.

    Args:
        query: [B, T, N, D], 16-bit, T a multiple of 64, D of 16.
        key: [B, S, K, D], with the same constraints.
        bits: the lengths of queries are 2^bits times as large.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
        Queries and keys, float16, and their e [B, N, T] and [B, K, S], int32: the row's length is in [2^(e - 1), 2^e),
        to rounding; e is sequence.NOTHING for zeros.
    """
    batch, _, heads, size = query.shape
    kv_heads = key.shape[2]
    blocks = [x.shape[1] // pairs.BLOCK for x in (query, key)]

    def body(query, key, unit_query, unit_key, query_exponent, key_exponent, source, target, full):
        row, block, head = (lax.axis_index(name) for name in ("batch", "block", "head"))
        tokens = pl.ds(block * pairs.BLOCK, pairs.BLOCK)

        def convert(x, unit, exponents, head, bits):
            plgpu.copy_gmem_to_smem(x.at[row, tokens, head], source, full)
            plgpu.barrier_wait(full)
            tile = plgpu.load(source, layout=pairs.LAYOUT).astype(jnp.float32)
            peak = numerics.normal_exponent(jnp.abs(tile).max(1))
            tile = pairs.scaled(tile, -peak)
            square = numerics.normal_exponent((tile * tile).sum(1))
            # The exponent of a square root is half of its argument's, rounded up.
            norm = (square + 1) >> 1
            target[...] = pairs.scaled(tile, bits - norm).astype(jnp.float16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(target, unit.at[row, tokens, head])
            exponent = jnp.where(peak > _LEAST, peak + norm, sequence.NOTHING)
            # A row with NaN or infinity must not outweigh others.
            exponent = jnp.where(square < numerics.INFINITE, exponent, 0)
            launch.store(exponents.at[row, head, tokens], exponent)
            plgpu.wait_smem_to_gmem(0)

        @pl.when((head < heads) & (block < blocks[0]))
        def _query():
            convert(query, unit_query, query_exponent, head, bits)

        @pl.when((head >= heads) & (block < blocks[1]))
        def _key():
            convert(key, unit_key, key_exponent, head - heads, 0)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(query.shape, jnp.float16),
            jax.ShapeDtypeStruct(key.shape, jnp.float16),
            jax.ShapeDtypeStruct((batch, heads, query.shape[1]), jnp.int32),
            jax.ShapeDtypeStruct((batch, kv_heads, key.shape[1]), jnp.int32),
        ),
        scratch_types=[
            tensor_core.operand((), pairs.BLOCK, size, query.dtype),
            tensor_core.operand((), pairs.BLOCK, size, jnp.float16),
            plgpu.Barrier(),
        ],
        grid=(batch, max(blocks), heads + kv_heads),
        grid_names=("batch", "block", "head"),
        kernel_name="power_attention_units",
        **launch.interpreted(interpret),
    )(query, key)
