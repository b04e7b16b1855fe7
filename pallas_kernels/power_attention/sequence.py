"""Tokens of a call as whole blocks: documents, padding, decays, and lengths as powers of two, in plain JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper import numerics

__all__ = [
    "FLOOR",
    "Decay",
    "Tokens",
    "exp",
    "first_blocks",
    "last_blocks",
    "length_factors",
    "unit_length",
    "whole_blocks",
    "within_documents",
]

# Below this exp is not a normal float32 and counts as zero; the first token of a document has a lower log decay.
FLOOR = int(np.log(np.finfo(np.float32).tiny))
_FORGET = FLOOR - 1
# Exponent that stands for zero.
_NOTHING = -300


class Tokens(NamedTuple):
    """Arguments in float32, zero at padding, with T and S padded to whole blocks with zeros.

    The queries are the last positions.

    front: number of positions added before the first key.
    """

    query: jax.Array  # [B, T, N, D]
    key: jax.Array  # [B, S, K, D]
    value: jax.Array  # [B, S, K, E]
    log_decay: jax.Array  # [B, K, S]
    front: int


def whole_blocks(query, key, value, *, log_decay, segment_ids, block, config) -> Tokens:
    """Pads time to whole blocks, and head and value sizes to the config's; arguments as in `power_attention`."""
    time, length = query.shape[1], key.shape[1]
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    if log_decay is None:
        log_decay = jnp.zeros(key.shape[:-1], jnp.float32)
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), _FORGET)
    if segment_ids is not None:
        start, valid = _boundaries(segment_ids)
        log_decay = jnp.where(start[..., None], _FORGET, jnp.where(valid[..., None], log_decay, 0))
        key, value = (jnp.where(valid[..., None, None], x, 0) for x in (key, value))
        query = jnp.where(valid[:, -time:, None, None], query, 0)
    front, back = (time - length) % block, -time % block
    return Tokens(
        _fill(query, 0, back, config.head_dim),
        _fill(key, front, back, config.head_dim),
        _fill(value, front, back, config.value_dim),
        jnp.moveaxis(jnp.pad(log_decay, [(0, 0), (front, back), (0, 0)]), 1, 2),
        front,
    )


def _boundaries(segment_ids):
    """Returns masks of the first token of each document, and of tokens that are not padding."""
    valid = segment_ids >= 0
    newest = jax.lax.cummax(jnp.where(valid, jnp.arange(valid.shape[1], dtype=jnp.int32), -1), axis=1)
    newest = jnp.pad(newest[:, :-1], [(0, 0), (1, 0)], constant_values=-1)
    before = jnp.take_along_axis(segment_ids, jnp.maximum(newest, 0), axis=1)
    return valid & ((newest < 0) | (segment_ids != before)), valid


def within_documents(segment_ids):
    """Returns a mask [B, S] of the positions whose decay counts, excluding padding and first tokens of documents."""
    start, valid = _boundaries(segment_ids)
    return valid & ~start


def _fill(x, front, back, width):
    return jnp.pad(x, [(0, 0), (front, back), (0, 0), (0, width - x.shape[-1])])


class Decay:
    """Sums of log_decay within each block of [B, K, n, C], none of them a difference of large numbers.

    after: over the keys after each key. total: over the block. coarse + fine: up to and including each position, as in
    `numerics.running_sums`.
    """

    def __init__(self, log_decay):
        later = jnp.pad(log_decay[..., 1:], [(0, 0)] * 3 + [(0, 1)])
        self.after = numerics.over_earlier(later, jnp.sum, 0, reverse=True)
        self.total = log_decay.sum(-1)
        self.coarse, self.fine = numerics.running_sums(log_decay, -_FORGET)


def exp(log_decay):
    """Returns the decay, zero below FLOOR."""
    return jnp.where(log_decay < FLOOR, 0, jnp.exp(jnp.maximum(log_decay, FLOOR)))


def first_blocks(log_decay):
    """Returns, per block of [B, K, n, C], the index of the first block that is visible from its first position.

    This is the block of the last position, up to and including that one, whose decay counts as zero.
    """
    forgets = log_decay < FLOOR
    blocks = jnp.arange(log_decay.shape[2], dtype=jnp.int32)
    newest = numerics.over_earlier(jnp.where(forgets.any(-1), blocks, 0), jnp.max, 0)
    before = jnp.pad(newest[..., :-1], [(0, 0), (0, 0), (1, 0)])
    return jnp.where(forgets[..., 0], blocks, before)


def last_blocks(log_decay):
    """Returns, per block of [B, K, n, C], the index of the last block that attends to any of its positions.

    This is the block of the position before the first one, after the block, whose decay counts as zero.
    """
    forgets = log_decay < FLOOR
    count = log_decay.shape[2]
    blocks = jnp.arange(count, dtype=jnp.int32)
    last = jnp.where(forgets.any(-1), blocks - forgets[..., 0], count - 1)
    nearest = numerics.over_earlier(last, jnp.min, count - 1, reverse=True)
    return jnp.pad(nearest[..., 1:], [(0, 0), (0, 0), (0, 1)], constant_values=count - 1)


def unit_length(x):
    """Returns x times the power of two that brings its length into [1/2, 1), to rounding, and the removed exponent."""
    exponent = numerics.length_exponent(x)
    return numerics.scaled(x, -exponent[..., None]), exponent


def length_factors(key, exponent, power):
    """Returns p-th powers of key lengths over the longest, [B, K, S], and the exponent of the longest, [B, K].

    Key lengths are 2^exponent, with exponent [B, S, K].
    """
    some = jnp.moveaxis((key != 0).any(-1), 1, 2)
    exponent = jnp.where(some, jnp.moveaxis(exponent, 1, 2), _NOTHING)
    longest = exponent.max(-1)
    # Clip so that the smallest factor is a normal number.
    shorter = jnp.maximum(power * (exponent - longest[..., None]), np.finfo(np.float32).minexp)
    return numerics.scaled(some.astype(jnp.float32), shorter), longest
