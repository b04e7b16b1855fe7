"""Power attention in plain JAX: the chunked form, its context-parallel version, and the attention form.

It runs on any device. Products of float32 inputs use the highest precision, those of bfloat16 inputs are in float32 at
the device's default precision.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.ops import decay as decays
from sympow_jax.ops import layout, time_axis
from sympow_jax.ops import mean as means
from sympow_jax.ops import rows as rows_of
from sympow_jax.ops import state as power_state
from sympow_jax.ops.forms import chunked as chunked_core
from sympow_jax.ops.forms import context, features, quadratic

__all__ = [
    "attention",
    "chunked",
    "chunked_over_devices",
]


def chunked(plan, rows: rows_of.Rows):
    """Computes the chunked form; returns (out [B, X, N, E], kv, norm).

    With a chunk of 1 this is the recurrence.
    """
    length = rows.query.shape[1]
    plan, rows = _in_whole_chunks(plan, rows)
    out, final = _over_heads(plan, rows)
    out = out[:, :length]
    if not plan.return_state:
        return out, None, None
    return out, *features.to_kv_and_norm(final, rows.key.shape[-1], plan.power).values()


def chunked_over_devices(plan, rows: rows_of.Rows):
    """Computes the chunked form of a time shard with a halo; returns as `chunked` does, without a state."""
    length, kv_heads = rows.query.shape[1], rows.key.shape[2]
    decay = context.log_decay_over(rows.log_decay, rows.enters_state, kv_heads)
    undivided = dataclasses.replace(plan, division=means.Division.NONE)
    undivided, rows = _in_whole_chunks(undivided, rows)
    sums, final = _over_heads(undivided, rows)
    _, before = time_axis.exclusive_prefix(
        context.combined, (decay.astype(sums.dtype), final), plan.axis_name
    )
    add = functools.partial(context.sums_from_earlier_state, plan.power, plan.precision)
    axes = (0, 0, None if rows.log_decay is None else 0)
    log_decay = None if rows.log_decay is None else jnp.moveaxis(rows.log_decay, 1, 2)
    query = layout.time_last(rows.query, kv_heads)
    sums += layout.time_second(jax.vmap(jax.vmap(add, in_axes=axes), in_axes=axes)(before, query, log_decay))
    return means.of_sums(sums, -1, plan.division)[:, :length], None, None


def attention(plan, tokens, state):
    """Computes the attention form; returns the output and the state or None.

    There may be more keys than queries.
    """
    sequence = power_state.Sequence.join(plan, tokens, state)
    query = rows_of.masked_queries(plan, tokens.query, sequence)[:, -tokens.query.shape[1] :]
    out = layout.time_second(means.of_sums(_sums(plan, query, sequence, state), -2, plan.division))
    if plan.division is not means.Division.NONE:
        out = out.astype(tokens.value.dtype)
    if not plan.return_state:
        return out, None
    return out, rows_of.state_after(plan, sequence, *_updated_state(plan, sequence, state))


def _in_whole_chunks(plan, rows):
    """Pads rows to a multiple of the chunk, which is at most the length of the rows."""
    plan = dataclasses.replace(plan, chunk=min(plan.chunk, rows.query.shape[1]))
    return plan, rows_of.padded(rows, plan.chunk)


def _over_heads(plan, rows):
    """Runs the chunked form of every head; returns its results [B, X, N, L] and the state over plain monomials."""
    batch, time, kv_heads, head_dim = rows.key.shape
    if rows.kv is None:
        dtype = np.promote_types(rows.query.dtype, jnp.float32)
        state = features.zeros(
            rows.value, (batch, kv_heads), head_dim, rows.value.shape[-1] + 1, plan.power, dtype
        )
    else:
        state = features.from_kv_and_norm(rows.kv, rows.norm, head_dim, plan.power)
    heads = rows.query.shape[2]
    query = rows.query.reshape(batch, time, kv_heads, heads // kv_heads, head_dim)
    core = functools.partial(chunked_core.chunked, plan)
    decay = None if rows.log_decay is None else 1
    core = jax.vmap(core, in_axes=(1, 1, 1, decay, None, 0), out_axes=(1, 0))
    core = jax.vmap(core, in_axes=(0, 0, 0, None if decay is None else 0, 0, 0))
    out, final = core(query, rows.key, rows.value, rows.log_decay, rows.enters_state, state)
    return out.reshape(batch, time, heads, out.shape[-1]), final


def _sums(plan, query, sequence, state):
    """Returns weighted sums of values and, last, of weights for every query, [B, K, G, E+1, T]."""
    time, power, precision = query.shape[1], plan.power, plan.precision
    key, value, decay = _keys_time_last(sequence)
    query = layout.time_last(query, key.shape[1])
    if time == 1:
        sums = _sums_of_last(query[..., 0], sequence, decay, power, precision)
    else:
        block = min(plan.chunk, time)
        front = -(key.shape[-1] - time) % block
        back = -time % block
        first = (jnp.argmax(sequence.valid, axis=1).min() + front) // block
        core = functools.partial(quadratic.sums, dataclasses.replace(plan, chunk=block))
        sums = jax.vmap(jax.vmap(core, in_axes=(0, 0, 0, 0, None)), in_axes=(0, 0, 0, 0, None))(
            layout.pad_last(query, 0, back),
            layout.pad_last(key, front, back),
            layout.pad_last(value, front, back),
            layout.pad_last(decay, front, back),
            first.astype(jnp.int32),
        )[..., :time]
    if state is None:
        return sums
    from_state = functools.partial(context.sums_from_earlier_state, power, precision)
    groups = features.from_kv_and_norm(state.kv, state.norm, key.shape[2], power)
    return sums + jax.vmap(jax.vmap(from_state))(groups, query, decay)


def _sums_of_last(query, sequence, decay, power, precision):
    """Returns `_sums` for the queries [B, K, G, D] of the last position, as in decoding.

    One product covers all keys, without changing their layout.
    """
    query, key, value = (x.astype(decay.dtype) for x in (query, sequence.key, sequence.value))
    scores = jnp.einsum("bkgd,bxkd->bkgx", query, key, precision=precision)
    weights = decays.exp(_sums_from_edges(decay)[..., 1:])[:, :, None] * jax.lax.integer_pow(scores, power)
    values = jnp.einsum("bkgx,bxke->bkge", weights, value, precision=precision)
    return jnp.concatenate([values, weights.sum(-1, keepdims=True)], -1)[..., None]


def _updated_state(plan, sequence, state):
    """Returns kv and norm after all tokens of the sequence except its window."""
    power, precision = plan.power, plan.precision
    key, value, decay = _keys_time_last(sequence)
    enters_state = (sequence.after >= plan.exact_window)[:, None]
    folded_decay = jnp.where(enters_state, decay, 0)
    sums = _sums_from_edges(folded_decay)
    weight = jnp.where(enters_state, decays.exp(sums[..., 1:]), 0)
    fold = functools.partial(features.fold_all, power=power, precision=precision)
    final = jax.vmap(jax.vmap(fold))(value * weight[:, :, None], key)
    if state is not None:
        carry = decays.exp(sums[..., 0])[..., None, None]
        groups = features.from_kv_and_norm(state.kv, state.norm, key.shape[2], power)
        final = tuple(carry * s + n for s, n in zip(groups, final))
    return features.to_kv_and_norm(final, key.shape[2], power).values()


def _sums_from_edges(decay):
    """Returns the sum over the positions after each edge of a position: [B, K, X] -> [B, K, X + 1]."""
    return jnp.pad(jnp.cumsum(decay[..., ::-1], -1)[..., ::-1], [(0, 0), (0, 0), (0, 1)])


def _keys_time_last(sequence):
    """Returns keys [B, K, D, X], values with a row of ones [B, K, E+1, X] and decays [B, K, X]."""
    value = jnp.moveaxis(sequence.value, 1, 3)
    value = jnp.pad(value, [(0, 0), (0, 0), (0, 1), (0, 0)], constant_values=1)
    decay = decays.bounded(sequence.log_decay, sequence.start[..., None])
    return jnp.moveaxis(sequence.key, 1, 3), value, jnp.moveaxis(decay, 1, 2)
