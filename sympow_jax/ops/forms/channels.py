"""The chunked form with one decay per value channel, differentiated by JAX.

A chunk's queries attend exactly to the W keys before the chunk and to those in it, and to older ones through features.
Every exponential is of a number that is at most 0. Within a block of a few tokens, there is one exponential per pair
and channel. Between a block and earlier keys, the decay is a product of one factor per query and one per key, so that
these pairs are one matrix product with the values concatenated with the ones of the normalizer.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Bool, Float
from sympow_jax.ops import decays, means, preparation
from sympow_jax.ops.forms import features

# Tokens of a block, within which every pair has one exponential per channel.
BLOCK = 16


class _Tokens(NamedTuple):
    """Keys, values and decays of one head, time first."""

    key: Float[Array, "X D"]
    value: Float[Array, "X E"]
    log_decay: Float[Array, "X E"]
    enters_state: Bool[Array, " X"]


def chunked(plan, rows: preparation.Rows):
    """Computes the chunked form with decays per value channel; returns (out [B, X, N, E], kv, norm).

    Chunks are rounded up to whole blocks.
    """
    length, kv_heads, head_dim = rows.query.shape[1], *rows.key.shape[2:]
    plan = dataclasses.replace(plan, chunk=-(-min(plan.chunk, length) // BLOCK) * BLOCK)
    rows = preparation.padded(rows, plan.chunk)
    log_decay = rows.log_decay
    if log_decay is None:
        log_decay = jnp.zeros_like(rows.value, plan.dtype)
    batch, _, heads, _ = rows.query.shape
    if rows.kv is None or rows.norm is None:
        columns = 2 * rows.value.shape[-1]
        state = features.zeros(rows.value, (batch, kv_heads), head_dim, columns, plan.power, plan.dtype)
    else:
        both = jnp.concatenate([rows.kv, rows.norm], -1)
        state = features.from_canonical(both, head_dim, plan.power)
    query = rows.query.reshape(batch, -1, kv_heads, heads // kv_heads, head_dim)
    key, value, log_decay = (jnp.moveaxis(x, 2, 1) for x in (rows.key, rows.value, log_decay))
    tokens = _Tokens(key, value, log_decay, rows.enters_state)  # type: ignore[arg-type]
    # All heads of a row have its `enters_state`.
    head = jax.vmap(functools.partial(_head, plan), (0, _Tokens(0, 0, 0, None), 0))  # type: ignore[arg-type]
    out, final = jax.vmap(head)(jnp.moveaxis(query, 1, 3), tokens, state)
    out = jnp.moveaxis(out, 3, 1).reshape(batch, -1, heads, out.shape[-1])[:, :length]
    if not plan.return_state:
        return out, None, None
    return out, *jnp.split(features.to_canonical(final, head_dim, plan.power), 2, axis=-1)


def _head(plan, query: Float[Array, "G X D"], tokens: _Tokens, state: features.Groups):
    """Returns the outputs [G, X, E] of one key head and the state after its last update.

    The columns of the state are the values, then the normalizers.
    """
    chunks = query.shape[1] // plan.chunk

    def cut(x):
        return x.reshape(chunks, plan.chunk, *x.shape[1:])

    # Saved for the backward pass: the state and the window before each chunk.
    step = jax.checkpoint(functools.partial(_step, plan), prevent_cse=False)
    empty = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(plan.exact_window, *x.shape[1:])), tokens)
    by_chunk = jnp.moveaxis(query.reshape(len(query), chunks, plan.chunk, -1), 1, 0)
    (state, _), out = jax.lax.scan(step, (state, empty), (by_chunk, jax.tree.map(cut, tokens)))
    return jnp.moveaxis(out, 0, 1).reshape(*query.shape[:2], -1), state


def _step(plan, carry, inputs):
    """Processes one chunk: returns the updated state, the last W tokens, and the outputs [G, C, E]."""
    state, window_tokens = carry
    query, new = inputs
    chunk, exact_window, power, precision = plan.chunk, plan.exact_window, plan.power, plan.precision
    tokens = jax.tree.map(lambda *parts: jnp.concatenate(parts), window_tokens, new)
    dtype = state[0].dtype
    key, value, query = tokens.key.astype(dtype), tokens.value.astype(dtype), query.astype(dtype)
    group, _, head_dim = query.shape
    # Prefix sums in two parts, so that their differences are exact to rounding.
    prefix = tuple(x.T for x in decays.split(tokens.log_decay.T))
    prefix_blocks = _in_blocks(prefix, exact_window)

    # Sums [G, C, 2E], first over the pairs of each query with the keys before its block. The decay is a product of that
    # from the key to the beginning of the block, and that from there to the query.
    begins = exact_window + np.arange(0, chunk, BLOCK)
    at_begin = tuple(jnp.pad(x, [(1, 0), (0, 0)])[exact_window::BLOCK][: len(begins), None] for x in prefix)
    earlier = (np.arange(exact_window + chunk) < begins[:, None])[..., None]
    to_begin = decays.within(at_begin, prefix, earlier)
    from_begin = decays.within(prefix_blocks, at_begin, True)
    scores = jnp.einsum("gid,xd->gix", query, key, precision=precision)
    scores = jax.lax.integer_pow(scores, power).reshape(group, len(begins), BLOCK, -1)
    columns = jnp.concatenate([to_begin * value, to_begin], -1)
    sums = jnp.einsum("gnix,nxe->gnie", scores, columns, precision=precision)
    sums = (sums * _twice(from_begin)).reshape(group, chunk, -1)

    # Over the pairs with the keys of its block up to itself, one decay each.
    queries, keys = (x[:, :, None] for x in prefix_blocks), (x[:, None] for x in prefix_blocks)
    within = decays.within(queries, keys, np.tri(BLOCK, dtype=bool)[..., None])
    key_blocks, value_blocks = _in_blocks((key, value), exact_window)
    query_blocks = query.reshape(group, -1, BLOCK, head_dim)
    scores = jnp.einsum("gnid,njd->gnij", query_blocks, key_blocks, precision=precision)
    scores = jax.lax.integer_pow(scores, power)[..., None]
    own_block = [(scores * within * value_blocks[:, None]).sum(3), (scores * within).sum(3)]
    sums += jnp.concatenate(own_block, -1).reshape(group, chunk, -1)

    # Over the tokens in the state.
    weighted = features.weighted(state, features.weights(head_dim, power, dtype))
    from_state = features.query(weighted, query.reshape(-1, head_dim).T, power, precision).T
    coarse, fine = prefix
    from_start = decays.exp((coarse + fine)[exact_window:])
    sums += from_state.reshape(group, chunk, -1) * _twice(from_start)
    numerator, denominator = jnp.split(sums, 2, axis=-1)
    out = means.mean(numerator[..., None], denominator[..., None], -1)[..., 0]

    # Update the state with the oldest C tokens.
    enters_state = tokens.enters_state[:chunk, None]
    log_decay = jnp.where(enters_state, tokens.log_decay[:chunk], 0)
    to_end = jnp.where(enters_state, decays.exp(decays.sums_after(log_decay.T).T), 0)
    columns = jnp.concatenate([to_end * value[:chunk], to_end], -1)
    folded = features.fold(columns.T, key[:chunk].T, power, precision)
    across = _twice(decays.exp(log_decay.sum(0)))
    state = tuple(across * s + n for s, n in zip(state, folded))
    return (state, jax.tree.map(lambda x: x[chunk:], tokens)), out


def _in_blocks(arrays, exact_window):
    """Reshapes each array from [W + C, ...] to [C / BLOCK, BLOCK, ...]."""
    return tuple(x[exact_window:].reshape(-1, BLOCK, *x.shape[1:]) for x in arrays)


def _twice(decay):
    """Repeats a decay: once for values and once for their normalizers."""
    return jnp.concatenate([decay, decay], -1)
