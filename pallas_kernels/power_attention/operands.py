"""Operands of the forward kernel: all preparation that is linear in T, in plain JAX.

A weight is w_ij = exp(G_i - G_j) (q_i . k_j)^p. Queries and keys are scaled to unit length by powers of two, which is
exact. No score then exceeds a known bound, and no running maximum is needed. Between a query and a key of an earlier
block the decay is exp(G_i - G_start) exp(G_start - G_end) exp(G_end - G_j), with start that of the query's block and
end that of the key's. These are one factor per query, one per block between and one per key, each at most 1. The factor
of the key and the p-th power of its length multiply its value, in 16 bits, and a separate float32 factor for the
denominator. Only within the diagonal block does a pair need an exponential.

At high powers the weights of a row vary too much for that: the bound, computed from lengths, is far above the largest
weight, and keys whose lengths differ by less than 2 have factors that differ by 2^p. Weights are then multiplied by the
key's factor before they are rounded, and each row has a scale that follows its largest weight so far.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper import numerics
from pallas_kernels.power_attention import config as configs
from pallas_kernels.power_attention import sequence

__all__ = ["VALUE_BITS", "Operands", "prepare", "scaled_by_row", "weight_bits"]

# The largest weight and value are near 2^14 and 2^15: float16 ends just below 2^16.
_WEIGHT_BITS = 14
VALUE_BITS = 15
# From this power on most weights of a row are below float16's range with any scale that is known in advance.
_SCALED_POWER = 8
# Bits of weights that are scaled by row: their sums must fit in float32.
_SCALED_WEIGHT_BITS = 96
# Bits by which a block's values may be smaller than the earlier sums without losing precision.
_SLACK_BITS = 40
# Exponent that stands for zero.
_NOTHING = -300


class Operands(NamedTuple):
    """Inputs of the kernel; T and S are whole blocks, n = S / C, D and E as in `Config`.

    query, key: of length at most 2^h and 1, h of `weight_bits`; float16, as in the backward pass, whose scores must be
    the same to the bit: a weight that is alone in its sum is 1 in both passes, however small its score.
    decayed_value: values times their key's factor, in the scale of their block; float16. Equal to `plain_value` if
    weights are scaled by row, since these then include the factor.
    plain_value: values without decay; float16.
    columns: per block of keys, a factor for each key's weight in the denominator, then two factors for the sums before
    it.
    diagonal: for each key of the diagonal block, the two parts of its cumulative decay and the factor for its length.
    rows: for each query, the factors of the sums over earlier blocks: numerator, denominator.
    first: the first block of keys that is visible to any query of a block.
    unit: two factors, whose product is the power of two by which true values are larger.
    """

    query: jax.Array  # [B, T, N, D]
    key: jax.Array  # [B, S, K, D]
    decayed_value: jax.Array  # [B, S, K, E]
    plain_value: jax.Array  # [B, S, K, E]
    columns: jax.Array  # [B, K, n, C + 32]
    diagonal: jax.Array  # [B, K, 3, S]
    rows: jax.Array  # [B, K, 2, T]
    first: jax.Array  # [B, K, T / C]
    unit: jax.Array  # [B, K, 2]


def scaled_by_row(power: int) -> bool:
    """Returns True if weights are rounded to float16 relative to the largest of their row so far.

    The diagonal block always uses such a scale.
    """
    return power >= _SCALED_POWER


def weight_bits(power: int) -> int:
    """Returns h: queries are scaled by 2^h, so that weights use the available range.

    Scores are then at most 2^h, and weights at most 2^(ph).
    """
    return (_SCALED_WEIGHT_BITS if scaled_by_row(power) else _WEIGHT_BITS) // power


def prepare(
    query, key, value, *, power: int, log_decay, segment_ids, config: configs.Config
) -> tuple[Operands, jax.Array]:
    """Returns the kernel's operands and the exponents [B, T, N] by which true weights are larger.

    Arguments as in `power_attention`.
    """
    time, block = query.shape[1], config.block
    arrays = {"log_decay": log_decay, "segment_ids": segment_ids}
    query, key, value, log_decay, *_ = sequence.whole_blocks(
        query, key, value, **arrays, block=block, config=config
    )
    query, query_exponent = sequence.unit_length(query)
    key, key_exponent = sequence.unit_length(key)
    length_factor, longest = sequence.length_factors(key, key_exponent, power)

    peaks = jnp.abs(value).max(-1)  # [B, S, K]
    value_exponent = numerics.exponent(peaks.max(1))
    value = numerics.scaled(value, -value_exponent[:, None, :, None])
    peaks = jnp.moveaxis(numerics.scaled(peaks, -value_exponent[:, None]), 1, 2)

    blocks_of_decay = log_decay.reshape(*log_decay.shape[:2], -1, block)
    decay = sequence.Decay(blocks_of_decay)
    columns = length_factor.reshape(decay.after.shape) * sequence.exp(decay.after)
    if scaled_by_row(power):
        decayed_value, unit = value, jnp.zeros(decay.total.shape, jnp.int32)
    else:
        decayed_value = value * jnp.moveaxis(columns.reshape(length_factor.shape), 2, 1)[..., None]
        unit = _units((peaks.reshape(columns.shape) * columns).max(-1), decay.total)
    previous = jnp.concatenate([unit[..., :1], unit[..., :-1]], -1)
    decayed_value = numerics.scaled(
        decayed_value, VALUE_BITS - jnp.moveaxis(jnp.repeat(unit, block, -1), 2, 1)[..., None]
    )

    between = sequence.exp(decay.total)
    sums = jnp.stack([numerics.scaled(between, previous - unit), between], -1)
    spare = configs.column_length(block) - block - 2
    columns = jnp.concatenate([columns, jnp.pad(sums, [(0, 0)] * 3 + [(0, spare)])], -1)

    blocks = query.shape[1] // block
    offset = decay.total.shape[-1] - blocks
    from_start = sequence.exp(decay.coarse + decay.fine)
    rows = jnp.stack([numerics.scaled(from_start, previous[..., None] - VALUE_BITS), from_start], 2)
    bits = weight_bits(power)
    operands = Operands(
        query=numerics.scaled(query, bits).astype(jnp.float16),
        key=key.astype(jnp.float16),
        decayed_value=decayed_value.astype(jnp.float16),
        plain_value=numerics.scaled(value, VALUE_BITS).astype(jnp.float16),
        columns=columns,
        diagonal=jnp.stack([decay.coarse, decay.fine, length_factor.reshape(decay.fine.shape)], 2).reshape(
            *log_decay.shape[:2], 3, -1
        ),
        rows=rows[..., offset:, :].reshape(*log_decay.shape[:2], 2, -1),
        first=sequence.first_blocks(blocks_of_decay)[..., offset:],
        unit=jnp.stack(numerics.factors(value_exponent), -1),
    )
    group = query.shape[2] // key.shape[2]
    exponent = query_exponent[:, :time] + jnp.repeat(longest, group, 1)[:, None] - bits
    return operands, power * exponent


def _units(largest, log_decay):
    """Returns the exponents, [B, K, n], of the scales of each block's values and of the sums up to it.

    It is the exponent of the block's largest value, unless the earlier sums are larger by more than the slack.
    """
    own = jnp.where(largest > 0, numerics.exponent(largest), _NOTHING)
    decayed = numerics.over_earlier(log_decay, jnp.sum, 0) / np.float32(np.log(2))
    before = numerics.over_earlier(own - decayed, jnp.max, -jnp.inf) + decayed
    return jnp.maximum(own, jnp.ceil(before).astype(jnp.int32) - _SLACK_BITS)
