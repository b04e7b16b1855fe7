"""Operands of the gradient kernels and final steps on their sums: all work that is linear in T, in plain JAX.

With a query's and a key's length taken out, s = q . k, a pair's fraction of the mean is P_ij = s^p c_j f_i. c_j is the
key's factor, of its length and its decay to the end of its block. f_i is the query's factor, of the decay from the
start of its block over the denominator. Decays over the blocks between multiply both. The gradient with respect to s is
p s^(p-1) c_j f_i (dP_ij - delta_i), with delta_i = dO_i . o_i. Since s^p c_j f_i <= 1 and |c_j f_i| <= 1 / denominator,
its magnitude is at most

    p denominator^(-1/p) 2 |dO_i| max_j |v_j|.

This bound gives every query a power-of-two scale that brings its pairs close to float16's largest number. The pass over
queries undoes the scale at the end. The pass over keys multiplies with queries Q' in which it is already undone.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper import numerics
from pallas_kernels.power_attention import config as configs
from pallas_kernels.power_attention import sequence

__all__ = ["KeyVector", "QueryVector", "Units", "VjpOperands", "corrected", "decay_gradient", "prepare"]


class QueryVector(enum.IntEnum):
    """Vectors of a block of queries, in the order of `VjpOperands.rows`."""

    # f and g for keys of earlier blocks, and for keys of the same block.
    EARLIER_WEIGHT = 0
    EARLIER_SLOPE = 1
    DIAGONAL_WEIGHT = 2
    DIAGONAL_SLOPE = 3
    DELTA = 4
    # The two parts of the decay from the block's start, and the decay over the block, repeated.
    COARSE = 5
    FINE = 6
    BETWEEN = 7
    # Position in the block.
    POSITION = 8
    # Two factors, whose product turns the sum into the gradient.
    UNIT = 9


class KeyVector(enum.IntEnum):
    """Vectors of a block of keys, in the order of `VjpOperands.columns`."""

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


# Fractions of the mean are scaled to 2^14, values, cotangents and slopes to 2^15 at most: float16 ends below 2^16.
_WEIGHT_BITS = 14
_OPERAND_BITS = 15
# Largest exponent of g, so that it stays finite.
_LARGEST_EXPONENT = 120
# Queries are scaled up as in the forward pass, so that scores are the same to the bit. From this power on, weights are
# at most 2^64, so that their products with gradients of weights stay finite.
_LONG_POWER = 8
_LONG_WEIGHT_BITS = 64
# Cotangents further below the largest are zero in float16.
_SMALLEST_EXPONENT = -24
# Exponent for queries that have no gradient, larger than that of any scale.
_NO_UNIT = 1000


class VjpOperands(NamedTuple):
    """Inputs of the kernels; S is whole blocks of 128, n = S / 64, and queries are padded in front to S.

    query, key: of unit length, but queries are scaled up. unit_query: Q', a query divided by its scale. All matrix
    operands are float16.
    rows, columns: per block of queries and of keys, vectors in the order of QueryVector and KeyVector.
    first, last: for two blocks of 64 queries, the first visible pair of blocks of keys; for two blocks of keys, the
    last pair of blocks of queries that attends to them.
    """

    query: jax.Array  # [B, S, N, D]
    unit_query: jax.Array  # [B, S, N, D]
    key: jax.Array  # [B, S, K, D]
    value: jax.Array  # [B, S, K, E]
    dout: jax.Array  # [B, S, N, E]
    rows: jax.Array  # [B, N, n, 11, 64]
    columns: jax.Array  # [B, K, n, 10, 64]
    first: jax.Array  # [B, K, n / 2]
    last: jax.Array  # [B, K, n / 2]


class Units(NamedTuple):
    """Exponents of the powers of two by which the kernels' sums for decays are larger than the true values.

    slope: of the gradient by the scores of the operands. pair: of a pair's fraction times the gradient of the mean.
    """

    slope: jax.Array  # [B, N, T]
    pair: jax.Array  # [B, K]


def prepare(
    query, key, value, dout, saved, *, power, log_decay, segment_ids, config
) -> tuple[VjpOperands, Units, slice]:
    """Returns the operands, exponents of scales, and the slice of the real keys after the front padding.

    Arguments as in `power_attention_vjp`.
    """
    length = key.shape[1]
    pair = config.block * config.compute_warpgroups
    arrays = {"log_decay": log_decay, "segment_ids": segment_ids}
    tokens = sequence.whole_blocks(query, key, value, **arrays, block=pair, config=config)
    # Queries and keys are those of the forward pass; from p = 8 on, queries are scaled up less.
    bits = _LONG_WEIGHT_BITS // power if power >= _LONG_POWER else configs.weight_bits(power)
    query, query_exponent = saved["unit_query"], saved["query_exponent"] - bits
    if bits != configs.weight_bits(power):
        query = numerics.scaled(query, bits - configs.weight_bits(power))
    key, key_exponent = saved["unit_key"], saved["key_exponent"]
    length_factor, longest = sequence.length_factors(key_exponent, power)
    # Convert from weights of the original queries and keys to weights of the operands, relative to the longest key.
    exponent = saved["weight_exponent"] - power * (query_exponent + _of_heads(longest, query)[..., None])
    denominator = numerics.scaled(saved["weight_sum"], exponent)
    # A NaN is a weight too: its gradients are NaN, not zero.
    some = ~(denominator < np.finfo(np.float32).tiny)
    seen = jnp.moveaxis(some, 1, 2)[..., None]

    # Pad results and cotangents to whole blocks.
    rows = query.shape[1]
    kv_heads, value_dim = key.shape[2], config.value_dim
    out, remainder, dout = (
        jnp.pad(x, [(0, 0), (0, rows - x.shape[1]), (0, 0), (0, value_dim - x.shape[3])]).astype(jnp.float32)
        for x in (saved["out"], saved["remainder"], dout)
    )
    value, value_unit = _large(tokens.value.astype(jnp.float32), kv_heads)
    dout, dout_unit = _large(jnp.where(seen, dout, 0), kv_heads)
    out = numerics.scaled(out + remainder, _of_heads(value_unit, query)[:, None, :, None])
    slope_unit = _slope_units(denominator, dout, value, power)
    least = jnp.where(some, slope_unit, _NO_UNIT).min(2).reshape(*longest.shape, -1).min(-1) - bits
    undone = _OPERAND_BITS + _of_heads(least, query)[..., None] - slope_unit
    unit_query = numerics.scaled(query.astype(jnp.float32), jnp.moveaxis(undone, 1, 2)[..., None])
    unit_query = jnp.where(seen, unit_query, 0)
    share = jnp.where(some, 1 / jnp.where(some, denominator, 1), 0)
    slope, delta = numerics.scaled(share, slope_unit), jnp.moveaxis((dout * out).sum(-1), 1, 2)

    decay = sequence.Decay(tokens.log_decay.reshape(*longest.shape, -1, config.block))
    # The powers of two by which the sums are larger than the gradients; those of queries and keys lack the factor p.
    pair_unit = value_unit + dout_unit + _WEIGHT_BITS
    by_query = slope_unit + _of_heads(pair_unit, query)[..., None] + query_exponent
    by_key = (pair_unit + least + _OPERAND_BITS)[..., None] + key_exponent
    by_value = jnp.broadcast_to((dout_unit + _WEIGHT_BITS)[..., None], key_exponent.shape)
    query_units, key_units, value_units = (numerics.factors(-x) for x in (by_query, by_key, by_value))

    # Pad queries in front to the positions of all keys.
    front = [(0, 0), (key.shape[1] - rows, 0), (0, 0), (0, 0)]
    of_queries = (jnp.pad(x, [(0, 0), (0, 0), front[1]]) for x in (share, slope, delta, *query_units))
    length_factor = numerics.scaled(length_factor, _WEIGHT_BITS)
    rows, columns = _vectors(of_queries, (*key_units, *value_units), length_factor, decay)
    query, unit_query, dout = (jnp.pad(x.astype(jnp.float16), front) for x in (query, unit_query, dout))
    value = value.astype(jnp.float16)
    first, last = sequence.visible_blocks(tokens.log_decay.reshape(*longest.shape, -1, pair), segment_ids)
    operands = VjpOperands(
        query=query,
        unit_query=unit_query,
        key=key,
        value=value,
        dout=dout,
        rows=rows,
        columns=columns,
        first=first,
        last=last,
    )
    return operands, Units(slope_unit, pair_unit), slice(tokens.front, tokens.front + length)


def corrected(operands: VjpOperands, units: Units, query_log) -> VjpOperands:
    """Returns the operands with delta corrected to match the weights, so that errors of the output do not affect it.

    query_log: dS S [B, N, T], which would be zero if delta were exact.
    """
    excess = numerics.scaled(query_log, -(units.slope + _WEIGHT_BITS))
    front = operands.query.shape[1] - excess.shape[2]
    excess = jnp.pad(excess, [(0, 0), (0, 0), (front, 0)])
    delta = operands.rows[..., QueryVector.DELTA, :]
    delta = delta + excess.reshape(delta.shape)
    return operands._replace(rows=operands.rows.at[..., QueryVector.DELTA, :].set(delta))


def decay_gradient(key_log, units: Units):
    """Returns the gradient of log_decay [B, S, K] from the kernels' sums over queries, P (dP - delta) [B, K, S].

    The decay at t multiplies the weights of all pairs of a query at or after t and a key before t. For each query the
    gradients of all log weights sum to zero, so the result is minus the sum over pairs with keys at or after t.
    """
    return -jnp.moveaxis(numerics.suffix_sums(numerics.scaled(key_log, -units.pair[..., None])), 1, 2)


def _of_heads(x, like):
    """Repeats [B, K] to [B, N]."""
    return jnp.repeat(x, like.shape[2] // x.shape[1], axis=1)


def _large(x, kv_heads):
    """Returns x times a power of two per key head that brings it below 2^15, and the exponent of that power."""
    largest = jnp.abs(x).max((1, 3)).reshape(len(x), kv_heads, -1).max(-1)
    unit = _OPERAND_BITS - numerics.exponent(largest)
    return numerics.scaled(x, _of_heads(unit, x)[:, None, :, None]), unit


def _slope_units(denominator, dout, value, power):
    """Returns exponents [B, N, T] that bring all gradients of a query's scores close to, but not above, 2^15."""
    exponent = numerics.exponent(denominator)
    lengths = (numerics.exponent(jnp.sqrt(jnp.moveaxis((x * x).sum(-1), 1, 2))) for x in (dout, value))
    dout_exponent, value_exponent = (jnp.maximum(x, _SMALLEST_EXPONENT) for x in lengths)
    # denominator^(-1/p) is at most 2 to minus `root`; the extra bit is for the difference.
    root = (exponent - 1) // power
    dweight = 1 + dout_exponent + _of_heads(value_exponent.max(2), dout)[..., None]
    return jnp.minimum(_OPERAND_BITS - _WEIGHT_BITS + root - dweight, _LARGEST_EXPONENT + exponent)


def _vectors(of_queries, of_keys, length_factor, decay):
    """Returns `rows` and `columns` of the operands; `of_queries` and `of_keys` are [B, N, S] and [B, K, S]."""
    share, slope, delta, *query_units, first, second, third, fourth = (
        x.reshape(*x.shape[:2], *decay.after.shape[2:]) for x in (*of_queries, *of_keys)
    )
    length_factor = length_factor.reshape(decay.after.shape)
    from_start = sequence.exp(decay.coarse + decay.fine)
    between = jnp.broadcast_to(sequence.exp(decay.total)[..., None], from_start.shape)
    position = jnp.broadcast_to(jnp.arange(from_start.shape[-1], dtype=jnp.float32), from_start.shape)
    decays = decay.coarse, decay.fine, between, position
    key_units = first, second, third, fourth
    columns = length_factor * sequence.exp(decay.after), length_factor, *decays, *key_units
    group = share.shape[1] // length_factor.shape[1]
    from_start, *decays = (jnp.repeat(x, group, 1) for x in (from_start, *decays))
    rows = share * from_start, slope * from_start, share, slope, delta, *decays, *query_units
    return jnp.stack(rows, 3), jnp.stack(columns, 3)
