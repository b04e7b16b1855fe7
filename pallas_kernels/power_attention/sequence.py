"""Tokens of a call as whole blocks: documents, padding and decays, in plain JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import numerics
from pallas_kernels.power_attention import configs

# Log decay of the first token of a document.
FORGET = numerics.FLOOR - 1
# Exponent of a length of zero, below those of all others.
NOTHING = -300


class Tokens(NamedTuple):
    """Arguments, zero at padding, with T and S padded to whole blocks with zeros.

    The queries are the last positions.

    front: number of positions added before the first key.
    """

    query: jax.Array  # [B, T, N, D]
    key: jax.Array  # [B, S, K, D]
    value: jax.Array  # [B, S, K, E]
    log_decay: jax.Array  # [B, K, S], float32
    front: int


def whole_blocks(query, key, value, *, log_decay, segment_ids, config) -> Tokens:
    """Pads time to whole blocks, and head and value sizes to the config's; arguments as in `power_attention`."""
    time, length = query.shape[1], key.shape[1]
    if log_decay is None:
        log_decay = jnp.zeros(key.shape[:-1], jnp.float32)
    log_decay = jnp.maximum(log_decay.astype(jnp.float32), FORGET)
    if segment_ids is not None:
        start, valid = _boundaries(segment_ids)
        log_decay = jnp.where(start[..., None], FORGET, jnp.where(valid[..., None], log_decay, 0))
        key, value = (jnp.where(valid[..., None, None], x, 0) for x in (key, value))
        query = jnp.where(valid[:, -time:, None, None], query, 0)
    front, back = (time - length) % configs.BLOCK, -time % configs.BLOCK
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


def visible_blocks(log_decay):
    """Returns, per block of [B, K, S], the first block that its queries see and the last one that sees its keys.

    Both are int32 [B, K, S / BLOCK]. Blocks of other documents are not seen. They are determined by positions whose
    decay counts as zero: the last one before a block's second position, and the first one after the block.
    """
    log_decay = log_decay.reshape(*log_decay.shape[:2], -1, configs.BLOCK)
    count = log_decay.shape[2]
    blocks = jnp.arange(count, dtype=jnp.int32)
    forgets = log_decay < numerics.FLOOR
    newest = numerics.over_earlier(jnp.where(forgets.any(-1), blocks, 0), jnp.max, 0)
    before = jnp.pad(newest[..., :-1], [(0, 0), (0, 0), (1, 0)])
    first = jnp.where(forgets[..., 0], blocks, before)
    reset = jnp.where(forgets.any(-1), blocks - forgets[..., 0], count - 1)
    nearest = numerics.over_earlier(reset, jnp.min, count - 1, reverse=True)
    last = jnp.pad(nearest[..., 1:], [(0, 0), (0, 0), (0, 1)], constant_values=count - 1)
    return first, last
