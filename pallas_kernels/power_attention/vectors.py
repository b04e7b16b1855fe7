"""Vectors of each block of 64 queries and keys, as the gradient kernels multiply them: one launch."""

import enum

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import numerics
from pallas_kernels.power_attention import pairs, sequence

__all__ = ["WEIGHT_BITS", "KeyVector", "QueryVector", "prepare"]

# Fractions of the mean are scaled to 2^14: float16 ends below 2^16.
WEIGHT_BITS = 14


class QueryVector(enum.IntEnum):
    """Vectors of a block of queries, in the order of `rows`."""

    # f and g for keys of earlier blocks, and for keys of the same block.
    EARLIER_WEIGHT = 0
    EARLIER_SLOPE = 1
    DIAGONAL_WEIGHT = 2
    DIAGONAL_SLOPE = 3
    # The two parts of the decay from the block's start, and the decay over the block, repeated.
    COARSE = 4
    FINE = 5
    BETWEEN = 6
    # Position in the block.
    POSITION = 7
    # Two factors, whose product turns the sum into the gradient.
    UNIT = 8


class KeyVector(enum.IntEnum):
    """Vectors of a block of keys, in the order of `columns`."""

    # c for queries of later blocks, and for queries of the same block.
    LATER_FACTOR = 0
    DIAGONAL_FACTOR = 1
    # As for queries.
    COARSE = 2
    FINE = 3
    BETWEEN = 4
    POSITION = 5
    # Two factors each, whose product turns the sums into the gradients of the key and of the value.
    KEY_UNIT = 6
    VALUE_UNIT = 8


def prepare(
    *,
    log_decay: jax.Array,
    key_exponent: jax.Array,
    head: jax.Array,
    denominator: jax.Array,
    slope_exponent: jax.Array,
    query_exponent: jax.Array,
    power: int,
    interpret=None,
) -> tuple[jax.Array, jax.Array]:
    """Returns `rows` [B, N, n, 10, 64] and `columns` [B, K, n, 10, 64], float32, with n = S / 64.

    Args:
        log_decay: [B, K, S], at least `sequence.FORGET`.
        key_exponent: [B, K, S] of the keys' lengths.
        head: [B, K, 3], int32, exponents of a head: of its longest key, and of the units of the sums for keys, up to
            the length of each, and for values.
        denominator: [B, N, S], sums of weights in the operands' scale; where it is not a normal number, the query has
            no gradient.
        slope_exponent: [B, N, S], int32, of the scale of g.
        query_exponent: [B, N, S], int32, of the units of the sums for queries.
        power: p.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.
    """
    batch, heads, length = denominator.shape
    kv_heads = log_decay.shape[1]
    group, count, block = heads // kv_heads, length // pairs.BLOCK, pairs.BLOCK

    def body(log_decay, key_exponent, units, denominator, slope_exponent, query_exponent, rows, columns):
        batch_row, index, head = (lax.axis_index(name) for name in ("batch", "block", "head"))
        kv_head = lax.div(head, jnp.int32(group))
        tokens = pl.ds(index * block, block)

        def load(ref, head):
            return plgpu.load(ref.at[batch_row, head, tokens], layout=pairs.PER_ROW, optimized=False)

        def store(ref, head, vectors):
            for vector, x in vectors.items():
                pairs.store(ref.at[batch_row, head, index, vector], x)

        decay = log_decay.at[batch_row, kv_head, tokens]
        decay = pairs.by_column(plgpu.load(decay, layout=pairs.PER_COLUMN, optimized=False))
        token, column = (
            plgpu.broadcasted_iota(jnp.int32, (block, block), n, layout=pairs.LAYOUT) for n in (0, 1)
        )
        coarse = numerics.coarse(decay, block, -sequence.FORGET)
        coarse, fine = (jnp.where(column <= token, x, 0.0).sum(1) for x in (coarse, decay - coarse))
        between = sequence.exp(decay.sum(1))
        position = token.astype(jnp.float32).max(1)

        # A NaN is a weight too: its gradients are NaN, not zero.
        weight = load(denominator, head)
        none = weight < np.finfo(np.float32).tiny
        share = jnp.where(none, 0.0, 1 / jnp.where(none, 1.0, weight))
        first, second = numerics.factors(load(slope_exponent, head))
        slope, from_start = share * first * second, sequence.exp(coarse + fine)
        first, second = numerics.factors(-load(query_exponent, head))
        of_query = {
            QueryVector.EARLIER_WEIGHT: share * from_start,
            QueryVector.EARLIER_SLOPE: slope * from_start,
            QueryVector.DIAGONAL_WEIGHT: share,
            QueryVector.DIAGONAL_SLOPE: slope,
            QueryVector.COARSE: coarse,
            QueryVector.FINE: fine,
            QueryVector.BETWEEN: between,
            QueryVector.POSITION: position,
            QueryVector.UNIT: first,
            QueryVector.UNIT + 1: second,
        }
        store(rows, head, of_query)

        @pl.when(lax.rem(head, jnp.int32(group)) == 0)
        def _keys():
            longest, of_keys, of_values = (units[batch_row, kv_head, n] for n in range(3))
            exponent = load(key_exponent, kv_head)
            shorter = jnp.maximum(power * (exponent - longest), np.finfo(np.float32).minexp)
            factor = numerics.power_of_two(shorter) * 2.0**WEIGHT_BITS
            factor = jnp.where(exponent > sequence.NOTHING, factor, 0.0)
            after = jnp.where(column > token, decay, 0.0).sum(1)
            key_units = numerics.factors(-(of_keys + exponent))
            value_units = numerics.factors(
                plgpu.layout_cast(lax.broadcast(-of_values, (block,)), pairs.PER_ROW)
            )
            of_key = {
                KeyVector.LATER_FACTOR: factor * sequence.exp(after),
                KeyVector.DIAGONAL_FACTOR: factor,
                KeyVector.COARSE: coarse,
                KeyVector.FINE: fine,
                KeyVector.BETWEEN: between,
                KeyVector.POSITION: position,
                KeyVector.KEY_UNIT: key_units[0],
                KeyVector.KEY_UNIT + 1: key_units[1],
                KeyVector.VALUE_UNIT: value_units[0],
                KeyVector.VALUE_UNIT + 1: value_units[1],
            }
            store(columns, kv_head, of_key)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, count, QueryVector.UNIT + 2, block), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, count, KeyVector.VALUE_UNIT + 2, block), jnp.float32),
        ),
        grid=(batch, count, heads),
        grid_names=("batch", "block", "head"),
        kernel_name="power_attention_vectors",
        **({} if interpret is None else {"interpret": interpret}),
    )(log_decay, key_exponent, head, denominator, slope_exponent, query_exponent)
