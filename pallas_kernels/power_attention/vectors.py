"""Vectors of each block of 64 queries and keys, as the gradient kernels multiply them: one launch.

With scores s of scaled queries and keys, a pair's fraction of the mean is s^p c f, and the gradient with respect to s
is s^(p-1) c g (dP - delta), up to the factor p. c is the key's factor, f the query's, g is f with a scale of its own.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, numerics, tensor_core
from pallas_kernels.power_attention import pairs, sequence

# Fractions of the mean are scaled to 2^14: float16 ends below 2^16.
WEIGHT_BITS = 14


class QueryVector(enum.IntEnum):
    """Vectors of a block of queries, in the order of `rows`."""

    # f and g for keys of earlier blocks, and for keys of the same block.
    EARLIER_WEIGHT = 0
    EARLIER_SLOPE = 1
    DIAGONAL_WEIGHT = 2
    DIAGONAL_SLOPE = 3
    # The sum of log decays from the block's start, in two parts (`numerics.coarse`), and the decay over the
    # block, repeated.
    COARSE = 4
    FINE = 5
    BLOCK_DECAY = 6
    # Position in the block: comparing numbers takes fewer registers than comparing indices.
    POSITION = 7
    # Two factors, whose product turns the sum into the gradient, up to the factor p.
    UNIT = 8
    SECOND_UNIT = 9


class KeyVector(enum.IntEnum):
    """Vectors of a block of keys, in the order of `columns`."""

    # c for queries of later blocks, and for queries of the same block.
    LATER_FACTOR = 0
    DIAGONAL_FACTOR = 1
    # As for queries.
    COARSE = 2
    FINE = 3
    BLOCK_DECAY = 4
    POSITION = 5
    # Two factors each, whose product turns the sums into the gradients of the key, up to the factor p, and of the
    # value.
    KEY_UNIT = 6
    SECOND_KEY_UNIT = 7
    VALUE_UNIT = 8
    SECOND_VALUE_UNIT = 9


class Operands(NamedTuple):
    """Arrays that the kernel reads; exponents are int32."""

    log_decay: jax.Array  # [B, K, S], at least `sequence.FORGET`
    key_exponent: jax.Array  # [B, K, S] of the keys' lengths
    # [B, K, 3], of the head's longest key, and of the units of the sums for keys, not counting each key's length, and
    # for values
    head_exponents: jax.Array
    # [B, N, S], sums of weights in the operands' scale; where it is not a normal number, the query has no gradient
    denominator: jax.Array
    slope_exponent: jax.Array  # [B, N, S], of the scale of g
    sum_exponent: jax.Array  # [B, N, S], of the units of the sums for queries


def prepare(operands: Operands, *, power: int, interpret=None) -> tuple[jax.Array, jax.Array]:
    """Returns `rows` [B, N, n, 10, 64] and `columns` [B, K, n, 10, 64], float32, with n = S / 64."""
    batch, heads, length = operands.denominator.shape
    kv_heads = operands.log_decay.shape[1]
    group, count, block = heads // kv_heads, length // pairs.BLOCK, pairs.BLOCK

    def body(*refs):
        *inputs, rows, columns = refs
        log_decay, key_exponent, head_exponents, denominator, slope_exponent, sum_exponent = inputs
        batch_row, index, head = (lax.axis_index(name) for name in ("batch", "block", "head"))
        kv_head = lax.div(head, jnp.int32(group))
        tokens = pl.ds(index * block, block)

        def load(ref, head):
            return plgpu.load(ref.at[batch_row, head, tokens], layout=tensor_core.PER_ROW, optimized=False)

        def store(ref, head, vectors):
            for vector, x in vectors.items():
                launch.store(ref.at[batch_row, head, index, vector], x)

        decay = log_decay.at[batch_row, kv_head, tokens]
        decay = pairs.by_column(plgpu.load(decay, layout=tensor_core.PER_COLUMN, optimized=False))
        token, column = (
            plgpu.broadcasted_iota(jnp.int32, (block, block), n, layout=pairs.LAYOUT) for n in (0, 1)
        )
        coarse = numerics.coarse(decay, block, -sequence.FORGET)
        coarse, fine = (jnp.where(column <= token, x, 0.0).sum(1) for x in (coarse, decay - coarse))
        block_decay = numerics.decay(decay.sum(1))
        position = token.astype(jnp.float32).max(1)

        # A NaN is a weight too: its gradients are NaN, not zero.
        weight = load(denominator, head)
        none = weight < np.finfo(np.float32).tiny
        share = jnp.where(none, 0.0, 1 / jnp.where(none, 1.0, weight))
        first, second = numerics.factors(load(slope_exponent, head))
        slope, from_start = share * first * second, numerics.decay(coarse + fine)
        first, second = numerics.factors(-load(sum_exponent, head))
        of_query = {
            QueryVector.EARLIER_WEIGHT: share * from_start,
            QueryVector.EARLIER_SLOPE: slope * from_start,
            QueryVector.DIAGONAL_WEIGHT: share,
            QueryVector.DIAGONAL_SLOPE: slope,
            QueryVector.COARSE: coarse,
            QueryVector.FINE: fine,
            QueryVector.BLOCK_DECAY: block_decay,
            QueryVector.POSITION: position,
            QueryVector.UNIT: first,
            QueryVector.SECOND_UNIT: second,
        }
        store(rows, head, of_query)

        @pl.when(lax.rem(head, jnp.int32(group)) == 0)
        def _keys():
            longest, of_keys, of_values = (head_exponents[batch_row, kv_head, n] for n in range(3))
            exponent = load(key_exponent, kv_head)
            factor = pairs.length_factor(exponent, power * (exponent - longest)) * 2.0**WEIGHT_BITS
            after = jnp.where(column > token, decay, 0.0).sum(1)
            key_units = numerics.factors(-(of_keys + exponent))
            value_units = numerics.factors(
                plgpu.layout_cast(lax.broadcast(-of_values, (block,)), tensor_core.PER_ROW)
            )
            of_key = {
                KeyVector.LATER_FACTOR: factor * numerics.decay(after),
                KeyVector.DIAGONAL_FACTOR: factor,
                KeyVector.COARSE: coarse,
                KeyVector.FINE: fine,
                KeyVector.BLOCK_DECAY: block_decay,
                KeyVector.POSITION: position,
                KeyVector.KEY_UNIT: key_units[0],
                KeyVector.SECOND_KEY_UNIT: key_units[1],
                KeyVector.VALUE_UNIT: value_units[0],
                KeyVector.SECOND_VALUE_UNIT: value_units[1],
            }
            store(columns, kv_head, of_key)

    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, heads, count, len(QueryVector), block), jnp.float32),
            jax.ShapeDtypeStruct((batch, kv_heads, count, len(KeyVector), block), jnp.float32),
        ),
        grid=(batch, count, heads),
        grid_names=("batch", "block", "head"),
        kernel_name="power_attention_vectors",
        **launch.interpreted(interpret),
    )(*operands)
