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
from sympow_jax.ops import decay as decays
from sympow_jax.ops import mean as means
from sympow_jax.ops import rows as rows_of
from sympow_jax.ops.forms import features

__all__ = ["BLOCK", "chunked"]

# Tokens of a block, within which every pair has one exponential per channel.
BLOCK = 16


class _Tokens(NamedTuple):
    """Keys, values and decays of one head, time first."""

    key: Float[Array, "X D"]
    value: Float[Array, "X E"]
    log_decay: Float[Array, "X E"]
    enters_state: Bool[Array, " X"]


def chunked(plan, rows: rows_of.Rows):
    """Computes the chunked form with decays per value channel; returns (out [B, X, N, E], kv, norm).

    Chunks are rounded up to whole blocks.
    """
    length, kv_heads, head_dim = rows.query.shape[1], *rows.key.shape[2:]
    plan = dataclasses.replace(plan, chunk=-(-min(plan.chunk, length) // BLOCK) * BLOCK)
    rows = rows_of.padded(rows, plan.chunk)
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

    def row(enters_state, *by_head):
        def head(query, key, value, log_decay, state):
            return _head(plan, query, _Tokens(key, value, log_decay, enters_state), state)

        return jax.vmap(head)(*by_head)

    by_head = (jnp.moveaxis(x, 2, 1) for x in (rows.key, rows.value, log_decay))
    out, final = jax.vmap(row)(rows.enters_state, jnp.moveaxis(query, 1, 3), *by_head, state)
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
    tokens = jax.tree.map(lambda *parts: jnp.concatenate(parts), window_tokens, new)
    dtype = state[0].dtype
    exact = tokens._replace(key=tokens.key.astype(dtype), value=tokens.value.astype(dtype))
    query = query.astype(dtype)
    # Prefix sums in two parts, so that their differences are exact to rounding.
    prefix = tuple(x.T for x in decays.split(tokens.log_decay.T))
    sums = _before_block(plan, query, exact, prefix) + _own_block(plan, query, exact, prefix)
    sums += _from_state(plan, query, state, prefix)
    numerator, denominator = jnp.split(sums, 2, axis=-1)
    out = means.mean(numerator[..., None], denominator[..., None], -1)[..., 0]
    carried = jax.tree.map(lambda x: x[plan.chunk :], tokens)
    return (_updated_state(plan, state, exact), carried), out


def _before_block(plan, query, tokens, prefix):
    """Returns sums over the pairs of each query with the keys before its block, [G, C, 2E]."""
    chunk, exact_window = plan.chunk, plan.exact_window
    begins = exact_window + np.arange(0, chunk, BLOCK)
    # Up to the beginning of each block.
    at_begin = tuple(jnp.pad(x, [(1, 0), (0, 0)])[exact_window::BLOCK][: len(begins), None] for x in prefix)
    earlier = (np.arange(exact_window + chunk) < begins[:, None])[..., None]
    to_begin = _decay(at_begin, prefix, earlier)
    to_query = _decay(_in_blocks(prefix, exact_window), at_begin, True)
    scores = _scores(plan, "gid,xd->gix", query, tokens.key)
    scores = scores.reshape(len(query), len(begins), BLOCK, -1)
    columns = jnp.concatenate([to_begin * tokens.value, to_begin], -1)
    sums = jnp.einsum("gnix,nxe->gnie", scores, columns, precision=plan.precision)
    return (sums * _twice(to_query)).reshape(len(query), chunk, -1)


def _own_block(plan, query, tokens, prefix):
    """Returns sums over the pairs of each query with the keys of its block up to itself, [G, C, 2E]."""
    prefix = _in_blocks(prefix, plan.exact_window)
    queries, keys = (x[:, :, None] for x in prefix), (x[:, None] for x in prefix)
    decay = _decay(queries, keys, np.tri(BLOCK, dtype=bool)[..., None])
    query_blocks = query.reshape(len(query), -1, BLOCK, query.shape[-1])
    key, value = _in_blocks((tokens.key, tokens.value), plan.exact_window)
    scores = _scores(plan, "gnid,njd->gnij", query_blocks, key)[..., None]
    sums = [(scores * decay * value[:, None]).sum(3), (scores * decay).sum(3)]
    return jnp.concatenate(sums, -1).reshape(*query.shape[:2], -1)


def _from_state(plan, query, state, prefix):
    """Returns sums over the tokens in the state, [G, C, 2E]."""
    weights = features.weights(query.shape[-1], plan.power, query.dtype)
    weighted = features.weighted(state, weights)
    columns = query.reshape(-1, query.shape[-1]).T
    sums = features.query(weighted, columns, plan.power, plan.precision).T
    coarse, fine = prefix
    to_query = decays.exp((coarse + fine)[plan.exact_window :])
    return sums.reshape(*query.shape[:2], -1) * _twice(to_query)


def _updated_state(plan, state, tokens):
    """Returns the state updated with the oldest C tokens."""
    old = jax.tree.map(lambda x: x[: plan.chunk], tokens)
    log_decay = jnp.where(old.enters_state[:, None], old.log_decay, 0)
    to_state = decays.exp(decays.sums_after(log_decay.T).T)
    to_state = jnp.where(old.enters_state[:, None], to_state, 0)
    columns = jnp.concatenate([to_state * old.value, to_state], -1)
    new = features.fold(columns.T, old.key.T, plan.power, plan.precision)
    carry = _twice(decays.exp(log_decay.sum(0)))
    return tuple(carry * s + n for s, n in zip(state, new))


def _scores(plan, axes, query, key):
    scores = jnp.einsum(axes, query, key, precision=plan.precision)
    return jax.lax.integer_pow(scores, plan.power)


def _decay(later, earlier, where):
    """Returns exp of the difference of two prefix sums, and zero where the mask is False.

    Coarse and fine parts are subtracted separately.
    """
    (coarse, fine), (earlier_coarse, earlier_fine) = later, earlier
    between = (coarse - earlier_coarse) + (fine - earlier_fine)
    return decays.exp(jnp.where(where, between, -jnp.inf))


def _in_blocks(arrays, exact_window):
    """Reshapes each array from [W + C, ...] to [C / BLOCK, BLOCK, ...]."""
    return tuple(x[exact_window:].reshape(-1, BLOCK, *x.shape[1:]) for x in arrays)


def _twice(decay):
    """Repeats a decay: once for values and once for their normalizers."""
    return jnp.concatenate([decay, decay], -1)
