"""What the kernel multiplies: everything that is linear in T, done once in plain JAX before the kernel runs.

A weight is w_ij = exp(G_i - G_j) (q_i . k_j)^p. Queries and keys are brought to unit length by powers of two, which
is exact, so that no score exceeds a known bound and no running maximum is needed. Between a query and a key of an
earlier block the decay is exp(G_i - G_start) exp(G_start - G_end) exp(G_end - G_j), start and end those of the
query's and the key's block: one factor per query, one per block between, one per key, each at most 1. The factor of
the key and the p-th power of its length go into its value, in 16 bits, and into one float32 of its own for the
denominator. Only within the diagonal block does a pair need an exponential.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import numerics
from pallas_kernels.power_attention import config as configs

__all__ = ["FLOOR", "VALUE_BITS", "Exponents", "Operands", "prepare", "weight_bits"]

# Below this exp is no longer a normal float32 and counts as zero; a document starts by forgetting everything.
FLOOR = int(np.log(np.finfo(np.float32).tiny))
_FORGET = FLOOR - 1
# The largest weight and value are near 2^14 and 2^15: float16 ends just below 2^16.
_WEIGHT_BITS = 14
VALUE_BITS = 15
# Bits by which a block's values may be smaller than what was summed before it, without losing any.
_SLACK_BITS = 40
# An exponent for what is zero.
_NOTHING = -300


class Operands(NamedTuple):
    """Inputs of the kernel; T and S are whole blocks, n = S / C, D and E as in `Config`.

    query, key: of length at most 2^h and 1, h of `weight_bits`; 16 bits.
    far_value: values times their key's factor, in the unit of their block; float16.
    near_value: values as they are; float16.
    columns: per block of keys, a factor for each key's weight in the denominator, then two for the sums before it.
    near: for each key of the diagonal block, the two parts of its cumulative decay and the factor for its length.
    rows: for each query, the factors of the sums over earlier blocks: numerator, denominator.
    first: the first block of keys that any query of a block can see.
    """

    query: jax.Array  # [B, T, N, D]
    key: jax.Array  # [B, S, K, D]
    far_value: jax.Array  # [B, S, K, E]
    near_value: jax.Array  # [B, S, K, E]
    columns: jax.Array  # [B, K, n, C + 32]
    near: jax.Array  # [B, K, 3, S]
    rows: jax.Array  # [B, K, 2, T]
    first: jax.Array  # [B, K, T / C]


class Exponents(NamedTuple):
    """Powers of two taken out: true weights are the kernel's times 2^weight, true values times 2^value."""

    weight: jax.Array  # [B, T, N]
    value: jax.Array  # [B, K]


def weight_bits(power: int) -> int:
    """h, by which queries are lengthened so that weights use float16's range: scores up to 2^h, weights 2^(ph)."""
    return _WEIGHT_BITS // power


def prepare(
    query, key, value, *, power: int, log_decay, segment_ids, config: configs.Config
) -> tuple[Operands, Exponents]:
    """Queries, keys, values and decays as the kernel takes them; arguments as in `power_attention`."""
    time, length = query.shape[1], key.shape[1]
    dtype = query.dtype
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    if log_decay is None:
        log_decay = jnp.zeros(key.shape[:-1], jnp.float32)
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), _FORGET)
    if segment_ids is not None:
        start, valid = _boundaries(segment_ids)
        log_decay = jnp.where(start[..., None], _FORGET, jnp.where(valid[..., None], log_decay, 0))
        key, value = (jnp.where(valid[..., None, None], x, 0) for x in (key, value))
        query = jnp.where(valid[:, -time:, None, None], query, 0)

    block = config.block
    front, back = (time - length) % block, -time % block
    query = _pad(query, 0, back, config.head_dim)
    key = _pad(key, front, back, config.head_dim)
    value = _pad(value, front, back, config.value_dim)
    log_decay = jnp.moveaxis(jnp.pad(log_decay, [(0, 0), (front, back), (0, 0)]), 1, 2)

    query, query_exponent = _unit_length(query)
    key, key_exponent = _unit_length(key)
    some = jnp.moveaxis((key != 0).any(-1), 1, 2)
    key_exponent = jnp.where(some, jnp.moveaxis(key_exponent, 1, 2), _NOTHING)
    longest = key_exponent.max(-1)
    # The smallest is a normal number.
    shorter = jnp.maximum(power * (key_exponent - longest[..., None]), np.finfo(np.float32).minexp)
    length_factor = numerics.scaled(some.astype(jnp.float32), shorter)

    largest = jnp.abs(value).max((1, 3))
    value_exponent = numerics.exponent(largest)
    value = numerics.scaled(value, -value_exponent[:, None, :, None])

    decay = _Decay(log_decay.reshape(*log_decay.shape[:2], -1, block))
    columns = length_factor.reshape(decay.after.shape) * _exp(decay.after)
    far_value = value * jnp.moveaxis(columns.reshape(length_factor.shape), 2, 1)[..., None]
    unit = _units(far_value, decay, block)
    previous = jnp.concatenate([unit[..., :1], unit[..., :-1]], -1)
    far_value = numerics.scaled(
        far_value, VALUE_BITS - jnp.moveaxis(jnp.repeat(unit, block, -1), 2, 1)[..., None]
    )

    between = _exp(decay.total)
    sums = jnp.stack([numerics.scaled(between, previous - unit), between], -1)
    spare = configs.column_length(block) - block - 2
    columns = jnp.concatenate([columns, jnp.pad(sums, [(0, 0)] * 3 + [(0, spare)])], -1)

    blocks = query.shape[1] // block
    offset = decay.total.shape[-1] - blocks
    from_start = _exp(decay.coarse + decay.fine)
    rows = jnp.stack([numerics.scaled(from_start, previous[..., None] - VALUE_BITS), from_start], 2)
    bits = weight_bits(power)
    operands = Operands(
        query=numerics.scaled(query, bits).astype(dtype),
        key=key.astype(dtype),
        far_value=far_value.astype(jnp.float16),
        near_value=numerics.scaled(value, VALUE_BITS).astype(jnp.float16),
        columns=columns,
        near=jnp.stack([decay.coarse, decay.fine, length_factor.reshape(decay.fine.shape)], 2).reshape(
            *log_decay.shape[:2], 3, -1
        ),
        rows=rows[..., offset:, :].reshape(*log_decay.shape[:2], 2, -1),
        first=_first_blocks(log_decay, block)[..., offset:],
    )
    group = query.shape[2] // key.shape[2]
    exponent = query_exponent[:, :time] + jnp.repeat(longest, group, 1)[:, None] - bits
    return operands, Exponents(power * exponent, value_exponent)


def _boundaries(segment_ids):
    """True for the first token of each document; True for tokens that are no padding."""
    valid = segment_ids >= 0
    newest = jax.lax.cummax(jnp.where(valid, jnp.arange(valid.shape[1], dtype=jnp.int32), -1), axis=1)
    newest = jnp.pad(newest[:, :-1], [(0, 0), (1, 0)], constant_values=-1)
    before = jnp.take_along_axis(segment_ids, jnp.maximum(newest, 0), axis=1)
    return valid & ((newest < 0) | (segment_ids != before)), valid


class _Decay:
    """Sums of log_decay within each block of [B, K, n, C], none of them a difference of large numbers.

    after: over the keys behind each key. total: over the block.
    coarse + fine: up to and including each position, as `numerics.running_sums`.
    """

    def __init__(self, log_decay):
        behind = jnp.pad(log_decay[..., 1:], [(0, 0)] * 3 + [(0, 1)])
        self.after = jnp.cumsum(behind[..., ::-1], -1)[..., ::-1]
        self.total = log_decay.sum(-1)
        self.coarse, self.fine = numerics.running_sums(log_decay, -_FORGET)


def _units(far_value, decay, block):
    """[B, K, n]: the power of two in whose multiples a block's values and the sums up to it are held.

    That of the block's largest value, unless what was summed before is larger by more than the slack.
    """
    largest = jnp.abs(far_value).reshape(len(far_value), -1, block, *far_value.shape[2:]).max((2, 4))
    largest = jnp.moveaxis(largest, 1, 2)
    own = jnp.where(largest > 0, numerics.exponent(largest), _NOTHING)
    decayed = jnp.cumsum(decay.total, -1) / np.float32(np.log(2))
    before = jax.lax.cummax(own - decayed, axis=own.ndim - 1) + decayed
    return jnp.maximum(own, jnp.ceil(before).astype(jnp.int32) - _SLACK_BITS)


def _first_blocks(log_decay, block):
    """[B, K, n]: the block of the last position, up to the first of each block, that forgets what is before it."""
    steps = jnp.arange(log_decay.shape[-1], dtype=jnp.int32)
    forgets = jax.lax.cummax(jnp.where(log_decay < FLOOR, steps, 0), axis=log_decay.ndim - 1)
    return forgets[..., ::block] // block


def _exp(log_decay):
    return jnp.where(log_decay < FLOOR, 0, jnp.exp(jnp.maximum(log_decay, FLOOR)))


def _unit_length(x):
    """x times the power of two that brings its length into (1/4, 1), and the exponent taken out."""
    largest = numerics.exponent(jnp.abs(x).max(-1))
    x = numerics.scaled(x, -largest[..., None])
    exponent = numerics.exponent(jnp.sqrt((x * x).sum(-1)))
    return numerics.scaled(x, -exponent[..., None]), largest + exponent


def _pad(x, front, back, width):
    return jnp.pad(x, [(0, 0), (front, back), (0, 0), (0, width - x.shape[-1])])
