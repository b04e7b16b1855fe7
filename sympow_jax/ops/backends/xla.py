"""Power attention in plain JAX: the chunked form, its context-parallel version, and the attention form.

It runs on any device. Products of float32 inputs use the highest precision, those of bfloat16 inputs are in float32 at
the device's default precision.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.ops import decays, layout, means, power_state, preparation, time_axis
from sympow_jax.ops.forms import chunked as chunked_core
from sympow_jax.ops.forms import context, features, quadratic


def chunked(plan, rows: preparation.Rows):
    """Computes the chunked form; returns (out [B, X, N, E], kv, norm).

    With a chunk of 1 this is the recurrence. The rows of a time shard begin with a halo.
    """
    batch, length, kv_heads, head_dim = rows.key.shape
    axis_name, division = plan.axis_name, plan.division
    if axis_name is not None:
        # What earlier devices contribute is added to sums.
        plan = dataclasses.replace(plan, division=means.Division.NONE)
        decay = context.log_decay_over(rows.log_decay, rows.enters_state, kv_heads)
    # Chunks are at most as long as the rows, which are padded to whole chunks.
    plan = dataclasses.replace(plan, chunk=min(plan.chunk, length))
    rows = preparation.padded(rows, plan.chunk)
    if rows.kv is None or rows.norm is None:
        dtype = np.promote_types(rows.query.dtype, jnp.float32)
        state = features.zeros(
            rows.value, (batch, kv_heads), head_dim, rows.value.shape[-1] + 1, plan.power, dtype
        )
    else:
        state = features.from_kv_and_norm(rows.kv, rows.norm, head_dim, plan.power)

    _, time, heads, _ = rows.query.shape
    query = rows.query.reshape(batch, time, kv_heads, heads // kv_heads, head_dim)
    decay_axis = None if rows.log_decay is None else 1
    core = functools.partial(chunked_core.chunked, plan)
    core = jax.vmap(core, in_axes=(1, 1, 1, decay_axis, None, 0), out_axes=(1, 0))
    core = jax.vmap(core, in_axes=(0, 0, 0, None if decay_axis is None else 0, 0, 0))
    out, final = core(query, rows.key, rows.value, rows.log_decay, rows.enters_state, state)
    out = out.reshape(batch, time, heads, out.shape[-1])

    if axis_name is not None:
        own = decay.astype(out.dtype), final
        earlier = time_axis.exclusive_prefix(context.combined, own, axis_name)
        before, final = earlier[1], context.combined(earlier, own)[1]
        add = functools.partial(context.sums_from_earlier_state, plan.power, plan.precision)
        axes = (0, 0, None if rows.log_decay is None else 0)
        log_decay = None if rows.log_decay is None else jnp.moveaxis(rows.log_decay, 1, 2)
        query = layout.time_last(rows.query, kv_heads)
        add = jax.vmap(jax.vmap(add, in_axes=axes), in_axes=axes)
        out = means.of_sums(out + layout.time_second(add(before, query, log_decay)), -1, division)
    out = out[:, :length]
    if not plan.return_state:
        return out, None, None
    return out, *features.to_kv_and_norm(final, head_dim, plan.power).values()


def attention(plan, tokens, state):
    """Computes the attention form; returns the output and the state or None.

    There may be more keys than queries.
    """
    sequence = power_state.Sequence.join(plan, tokens, state)
    time, power, precision = tokens.query.shape[1], plan.power, plan.precision
    query = preparation.masked_queries(plan, tokens.query, sequence)[:, -time:]
    # Keys [B, K, D, X], values with a row of ones [B, K, E+1, X] and decays [B, K, X].
    key = jnp.moveaxis(sequence.key, 1, 3)
    value = jnp.moveaxis(sequence.value, 1, 3)
    value = jnp.pad(value, [(0, 0), (0, 0), (0, 1), (0, 0)], constant_values=1)
    decay = jnp.moveaxis(decays.bounded(sequence.log_decay, sequence.start[..., None]), 1, 2)
    query = layout.time_last(query, key.shape[1])
    # Sums of weighted values and, last, of weights for every query, [B, K, G, E+1, T].
    if time == 1:
        # As in decoding: one product covers all keys, without changing their layout.
        one, keys, values = (x.astype(decay.dtype) for x in (query[..., 0], sequence.key, sequence.value))
        scores = jnp.einsum("bkgd,bxkd->bkgx", one, keys, precision=precision)
        weights = decays.exp(_sums_from_edges(decay)[..., 1:])[:, :, None] * jax.lax.integer_pow(
            scores, power
        )
        weighted = jnp.einsum("bkgx,bxke->bkge", weights, values, precision=precision)
        sums = jnp.concatenate([weighted, weights.sum(-1, keepdims=True)], -1)[..., None]
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
    if state is not None:
        from_state = functools.partial(context.sums_from_earlier_state, power, precision)
        groups = features.from_kv_and_norm(state.kv, state.norm, key.shape[2], power)
        sums += jax.vmap(jax.vmap(from_state))(groups, query, decay)
    out = layout.time_second(means.of_sums(sums, -2, plan.division))
    if plan.division is not means.Division.NONE:
        out = out.astype(tokens.value.dtype)
    if not plan.return_state:
        return out, None

    # The state after all tokens of the sequence except its window.
    enters_state = (sequence.after >= plan.exact_window)[:, None]
    from_edges = _sums_from_edges(jnp.where(enters_state, decay, 0))
    to_end = jnp.where(enters_state, decays.exp(from_edges[..., 1:]), 0)
    fold = functools.partial(features.fold_all, power=power, precision=precision)
    final = jax.vmap(jax.vmap(fold))(value * to_end[:, :, None], key)
    if state is not None:
        across = decays.exp(from_edges[..., 0])[..., None, None]
        final = tuple(across * s + n for s, n in zip(groups, final))
    sums = features.to_kv_and_norm(final, key.shape[2], power)
    return out, preparation.state_after(plan, sequence, **sums)


def _sums_from_edges(decay):
    """Returns the sum over the positions after each edge of a position: [B, K, X] -> [B, K, X + 1]."""
    return jnp.pad(jnp.cumsum(decay[..., ::-1], -1)[..., ::-1], [(0, 0), (0, 0), (0, 1)])
