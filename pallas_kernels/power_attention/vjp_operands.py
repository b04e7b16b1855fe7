"""Arguments of the gradient kernels, and the gradient of the decays from their sums.

Padding, scales and bounds are plain JAX; `vectors` is a kernel.

With a query's and a key's length taken out, s = q . k, a pair's fraction of the mean is P_ij = s^p c_j f_i. c_j is the
key's factor, of its length and its decay to the end of its block. f_i is the query's factor, of the decay from the
start of its block over the denominator. Decays over the blocks between multiply both. The gradient with respect to s is
p s^(p-1) c_j f_i (dP_ij - delta_i), with delta_i = dO_i . o_i. Since s^p c_j f_i <= 1 and |c_j f_i| <= 1 / denominator,
its magnitude is at most

    p denominator^(-1/p) 2 |dO_i| max_j |v_j|.

This bound gives every query a power-of-two scale that brings its pairs close to float16's largest number. The pass over
queries undoes the scale at the end. The pass over keys multiplies with queries Q' in which it is already undone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper import numerics, tensor_core
from pallas_kernels.power_attention import configs, sequence, vectors
from pallas_kernels.power_attention.vectors import WEIGHT_BITS

# Values, cotangents and slopes are scaled to 2^15 at most: float16 ends below 2^16.
_OPERAND_BITS = 15
# Largest exponent of g, so that it stays finite.
_LARGEST_EXPONENT = 120
# Where weights are scaled by row, they are at most 2^64 here, so that their products with gradients of weights stay
# finite. Otherwise queries are scaled up as in the forward pass.
_HIGH_WEIGHT_BITS = 64
# Least exponent of the length of a scaled row: smaller entries are zero in float16.
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
    rows: jax.Array  # [B, N, n, 10, 64]
    columns: jax.Array  # [B, K, n, 10, 64]
    delta: jax.Array  # [B, N, n, 64]
    first: jax.Array  # [B, K, n / 2]
    last: jax.Array  # [B, K, n / 2]


class Units(NamedTuple):
    """Exponents of the powers of two by which the kernels' sums for decays are larger than the true values.

    slope: of the gradient by the scores of the operands. pair: of a pair's fraction times the gradient of the mean.
    """

    slope: jax.Array  # [B, N, T]
    pair: jax.Array  # [B, K]


def prepare(
    tokens: sequence.Tokens, dout, saved, segment_ids, call: configs.Call[configs.VjpConfig]
) -> tuple[VjpOperands, Units]:
    """Returns the operands and the exponents of scales.

    tokens: in blocks of two times 64. Other arguments as in `power_attention_vjp`.
    """
    power, config = call.power, call.config
    pair = config.block * config.compute_warpgroups
    # Queries and keys are those of the forward pass; from p = 8 on, queries are scaled up less. Those of `tokens` are
    # not used.
    bits = _HIGH_WEIGHT_BITS // power if configs.scaled_by_row(power) else configs.query_bits(power)
    query, query_exponent = saved["unit_query"], saved["query_exponent"] - bits
    if bits != configs.query_bits(power):
        query = numerics.scaled(query, bits - configs.query_bits(power))
    key, key_exponent = saved["unit_key"], saved["key_exponent"]
    longest = key_exponent.max(-1)
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
    value, value_unit = _to_operand_range(tokens.value.astype(jnp.float32), kv_heads)
    dout, dout_unit = _to_operand_range(jnp.where(seen, dout, 0), kv_heads)
    out = numerics.scaled(out + remainder, _of_heads(value_unit, query)[:, None, :, None])
    # Bring all gradients of a query's scores close to, but not above, 2^15. denominator^(-1/p) is at most 2 to minus
    # `root`; the extra bit is for the difference.
    exponent = numerics.exponent(denominator)
    lengths = (numerics.exponent(jnp.sqrt(jnp.moveaxis((x * x).sum(-1), 1, 2))) for x in (dout, value))
    dout_exponent, value_exponent = (jnp.maximum(x, _SMALLEST_EXPONENT) for x in lengths)
    root = (exponent - 1) // power
    dweight = 1 + dout_exponent + _of_heads(value_exponent.max(2), query)[..., None]
    slope_unit = jnp.minimum(_OPERAND_BITS - WEIGHT_BITS + root - dweight, _LARGEST_EXPONENT + exponent)
    least = jnp.where(some, slope_unit, _NO_UNIT).min(2).reshape(*longest.shape, -1).min(-1) - bits
    undone = _OPERAND_BITS + _of_heads(least, query)[..., None] - slope_unit
    unit_query = numerics.scaled(query.astype(jnp.float32), jnp.moveaxis(undone, 1, 2)[..., None])
    unit_query = jnp.where(seen, unit_query, 0)
    delta = jnp.moveaxis((dout * out).sum(-1), 1, 2)

    # Exponents of the units of the sums; those of queries and keys lack the factor p.
    pair_unit = value_unit + dout_unit + WEIGHT_BITS
    by_query = slope_unit + _of_heads(pair_unit, query)[..., None] + query_exponent
    head_exponents = jnp.stack([longest, pair_unit + least + _OPERAND_BITS, dout_unit + WEIGHT_BITS], -1)

    # Pad queries in front to the positions of all keys.
    front = [(0, 0), (key.shape[1] - rows, 0), (0, 0), (0, 0)]
    denominator, slope_exponent, delta, by_query = (
        jnp.pad(x, [(0, 0), (0, 0), front[1]]) for x in (denominator, slope_unit, delta, by_query)
    )
    arrays = vectors.Operands(
        tokens.log_decay, key_exponent, head_exponents, denominator, slope_exponent, by_query
    )
    rows, columns = vectors.prepare(arrays, power=power, interpret=call.interpret)
    query, unit_query, dout = (jnp.pad(x.astype(jnp.float16), front) for x in (query, unit_query, dout))
    value = value.astype(jnp.float16)
    first, last = sequence.visible_blocks(tokens.log_decay.reshape(*longest.shape, -1, pair), segment_ids)
    delta = delta.reshape(*rows.shape[:3], config.block)
    operands = VjpOperands(query, unit_query, key, value, dout, rows, columns, delta, first, last)
    return operands, Units(slope_unit, pair_unit)


def corrected(operands: VjpOperands, units: Units, query_log) -> VjpOperands:
    """Returns the operands with delta corrected to match the weights, so that errors of the output do not affect it.

    query_log: dS S [B, N, T], which would be zero if delta were exact.
    """
    excess = numerics.scaled(query_log, -(units.slope + WEIGHT_BITS))
    front = operands.query.shape[1] - excess.shape[2]
    excess = jnp.pad(excess, [(0, 0), (0, 0), (front, 0)]).reshape(operands.delta.shape)
    return operands._replace(delta=operands.delta + excess)


def decay_gradient(key_log, units: Units):
    """Returns the gradient of log_decay [B, S, K] from the kernels' sums over queries, P (dP - delta) [B, K, S].

    The decay at t multiplies the weights of all pairs of a query at or after t and a key before t. For each query the
    gradients of all log weights sum to zero, so the result is minus the sum over pairs with keys at or after t.
    """
    terms = numerics.scaled(key_log, -units.pair[..., None])
    # In blocks, then over blocks: a scan takes twice as many launches.
    blocks = terms.reshape(*terms.shape[:2], -1, tensor_core.ROWS)
    within = numerics.over_earlier(blocks, jnp.sum, 0, reverse=True)
    after = numerics.over_earlier(
        jnp.pad(blocks.sum(-1)[..., 1:], [(0, 0), (0, 0), (0, 1)]), jnp.sum, 0, reverse=True
    )
    return -jnp.moveaxis((within + after[..., None]).reshape(terms.shape), 1, 2)


def _of_heads(x, like):
    """Repeats [B, K] to [B, N]."""
    return jnp.repeat(x, like.shape[2] // x.shape[1], axis=1)


def _to_operand_range(x, kv_heads):
    """Returns x times a power of two per key head that brings it below 2^15, and the exponent of that power."""
    largest = jnp.abs(x).max((1, 3)).reshape(len(x), kv_heads, -1).max(-1)
    unit = _OPERAND_BITS - numerics.exponent(largest)
    return numerics.scaled(x, _of_heads(unit, x)[:, None, :, None]), unit
