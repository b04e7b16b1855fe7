"""One decoding step: the exact window and the recurrent state in one pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sympow_jax.ops import decay as decays
from sympow_jax.ops import derivatives, documents, feature_maps, layout
from sympow_jax.ops import mean as means
from sympow_jax.ops import rows as rows_of
from sympow_jax.ops.forms import features

__all__ = ["StateOps", "in_place", "step", "step_by"]


class StateOps(NamedTuple):
    """Operations of a step on the recurrent state; the rest of a step is the same for every implementation.

    Attributes:
        read: (plan, query [B, K, G, D], state) -> outputs [B, K, G, E], of the window and the recurrent state.
        fold: (plan, state, tokens, active) -> `kv` and `norm`, updated with the tokens of a window in the active
            rows of the batch.
        in_place: (f, active, state) -> f(active, state) if any row is active, otherwise the state.
    """

    read: Callable
    fold: Callable
    in_place: Callable


def step(plan, tokens, state):
    """Runs `step_by` in plain JAX."""
    read, fold = (_read_channels, _fold_channels) if plan.per_channel else (_read, _fold)
    return step_by(StateOps(read, fold, _differentiable_in_place), plan, tokens, state)


def step_by(state_ops: StateOps, plan, tokens, state):
    """Appends a token of each row to the window and attends.

    Whenever the window holds 2W tokens, the state is updated with its oldest W.
    """
    query, key, value, log_decay, segment_ids = tokens
    dtype, exact_window = plan.dtype, plan.exact_window
    batch, kv_heads, head_dim = key.shape
    valid, state = _enter_document(state, segment_ids)
    # Bounded decays keep the sums over the window finite.
    if log_decay is None:
        log_decay = jnp.zeros_like(value if plan.per_channel else key[..., 0])
    token = {"keys": key, "values": value, "log_decays": decays.bounded(log_decay.astype(dtype), False)}
    token = {name: x[:, None].astype(dtype) for name, x in token.items()}
    # A state that is stored in a shorter dtype is widened where it is read, and rounded where it is updated.
    if exact_window == 0:
        state = dataclasses.replace(state, **state_ops.fold(plan, state, token, valid))
    else:
        state = _appended(state, token, valid)

    query = query.reshape(batch, kv_heads, -1, head_dim).astype(dtype)
    if plan.division is not means.Division.NONE:
        query = rows_of.unit_scale(query)
    out = jnp.where(valid[:, None, None, None], state_ops.read(plan, query, state.astype(dtype)), 0)
    if exact_window:
        # Read the state before it is updated: otherwise XLA keeps a copy to read from.
        out, state = jax.lax.optimization_barrier((out, state))
        state = state_ops.in_place(
            functools.partial(_fold_window, plan, state_ops.fold), state.length == 2 * exact_window, state
        )
    out = out.reshape(batch, -1, out.shape[-1])
    return out if plan.division is means.Division.NONE else out.astype(value.dtype), state


def _enter_document(state, segment_ids):
    """Returns a mask of the rows with a token, and the state.

    The state is reset in rows where the token starts a document.
    """
    if segment_ids is None:
        segment = documents.continued(state.segment)
        return jnp.ones_like(segment, bool), _replaced(state, True, segment=segment)
    valid = segment_ids >= 0
    start = valid & (segment_ids != state.segment)
    # Most tokens do not start a document.
    state = _differentiable_in_place(_emptied, start, state)
    return valid, _replaced(state, valid, segment=segment_ids)


def _appended(state, token, active):
    """Returns the state with a token in the next slot of the window, in the active rows."""
    # Written in place if the state is donated; writes to a slot beyond the window are dropped.
    slot = jnp.where(active, state.length, 2 * state.exact_window)
    put = jax.vmap(lambda slots, i, x: slots.at[i].set(x[0].astype(slots.dtype), mode="drop"))
    fields = {name: put(getattr(state, name), slot, x) for name, x in token.items()}
    return dataclasses.replace(state, **fields, length=state.length + active)


def in_place(f, active, state):
    """Returns f(active, state) if any row is active, otherwise the state.

    This is a loop of at most one iteration, since XLA updates a loop's carry in place. A conditional would copy the
    state, whichever branch is taken.
    """

    def once(carried):
        return jnp.zeros_like(carried[0]), f(active, carried[1])

    return jax.lax.while_loop(lambda carried: carried[0], once, (active.any(), state))[1]


def _conditional(f, active, state):
    return jax.lax.cond(active.any(), functools.partial(f, active), lambda unchanged: unchanged, state)


# A loop has no reverse-mode gradient, so the gradient is that of the conditional.
_differentiable_in_place = derivatives.custom_vjp(in_place, static=1, plain=_conditional)


def _emptied(active, state):
    """Returns the state with the active rows reset to before any token."""
    return jax.tree.map(lambda x: _where(active, jnp.zeros_like(x), x), state)


def _read(plan, query, state):
    """Attends to the window and the recurrent state with one query per head: [B, K, G, D] -> [B, K, G, E]."""
    log_decay = jnp.moveaxis(state.log_decays, 1, 2)
    scores = jnp.einsum("bkgd,bwkd->bkgw", query, state.keys, precision=plan.precision)
    weights = jax.lax.integer_pow(scores, plan.power) * decays.exp(decays.sums_after(log_decay))[:, :, None]
    phi = feature_maps.symmetric_power(query, plan.power) * decays.exp(log_decay.sum(-1))[..., None, None]
    numerator = jnp.einsum("bkgw,bwke->bkge", weights, state.values, precision=plan.precision)
    numerator += jnp.einsum("bkgf,bkfe->bkge", phi, state.kv, precision=plan.precision)
    denominator = weights.sum(-1) + jnp.einsum("bkgf,bkf->bkg", phi, state.norm, precision=plan.precision)
    if plan.division is means.Division.NONE:
        return jnp.concatenate([numerator, denominator[..., None]], -1)
    return means.mean(numerator, denominator[..., None], -1, plan.division)


def _read_channels(plan, query, state):
    """Computes `_read` with decays per value channel."""
    log_decay = jnp.moveaxis(state.log_decays, 1, 3)
    decay = decays.exp(decays.sums_after(log_decay))
    scores = jnp.einsum("bkgd,bwkd->bkgw", query, state.keys, precision=plan.precision)
    scores = jax.lax.integer_pow(scores, plan.power)
    phi = feature_maps.symmetric_power(query, plan.power)
    to_query = decays.exp(log_decay.sum(-1))[:, :, None]

    def sums(window, state_sums):
        from_window = jnp.einsum("bkgw,bkew->bkge", scores, window, precision=plan.precision)
        return from_window + to_query * jnp.einsum(
            "bkgf,bkfe->bkge", phi, state_sums, precision=plan.precision
        )

    numerator = sums(decay * jnp.moveaxis(state.values, 1, 3), state.kv)
    return means.mean(numerator[..., None], sums(decay, state.norm)[..., None], -1)[..., 0]


def _fold_window(plan, fold, full, state):
    """Updates the state with the oldest W of 2W tokens in the rows that are full."""
    exact_window = plan.exact_window
    names = ("keys", "values", "log_decays")
    oldest = {name: getattr(state, name)[:, :exact_window].astype(plan.dtype) for name in names}
    newest = {name: getattr(state, name)[:, exact_window:] for name in names}
    shifted = {name: jnp.concatenate([x, jnp.zeros_like(x)], 1) for name, x in newest.items()}
    updated = fold(plan, state, oldest, full)
    state = _replaced(state, full, **shifted, length=state.length - exact_window)
    return dataclasses.replace(state, **updated)


def _fold(plan, state, tokens, active):
    """Returns kv and norm after S <- gamma S + phi(k) v^T for each of `tokens`, in the active rows.

    tokens: fields of a window.
    """
    log_decay = jnp.moveaxis(tokens["log_decays"], 1, 2)
    keys, values = jnp.moveaxis(tokens["keys"], 1, 3), jnp.moveaxis(tokens["values"], 1, 3)
    values = jnp.pad(values, [(0, 0), (0, 0), (0, 1), (0, 0)], constant_values=1)
    values *= decays.exp(decays.sums_after(log_decay))[:, :, None]
    fold = functools.partial(features.fold, power=plan.power, precision=plan.precision)
    new = features.to_kv_and_norm(jax.vmap(jax.vmap(fold))(values, keys), keys.shape[2], plan.power)
    carry = decays.exp(log_decay.sum(-1))[..., None]
    kv, norm = carry[..., None] * state.kv + new["kv"], carry * state.norm + new["norm"]
    return {"kv": _where(active, kv, state.kv), "norm": _where(active, norm, state.norm)}


def _fold_channels(plan, state, tokens, active):
    """Computes `_fold` with decays per value channel."""
    keys, values, log_decay = (jnp.moveaxis(tokens[name], 1, 3) for name in ("keys", "values", "log_decays"))
    decay = decays.exp(decays.sums_after(log_decay))
    fold = functools.partial(features.fold, power=plan.power, precision=plan.precision)
    new = jax.vmap(jax.vmap(fold))(jnp.concatenate([decay * values, decay], 2), keys)
    new = jnp.split(features.to_canonical(new, keys.shape[2], plan.power), 2, axis=-1)
    carry = decays.exp(log_decay.sum(-1))[:, :, None]
    return {
        name: _where(active, carry * getattr(state, name) + added, getattr(state, name))
        for name, added in zip(("kv", "norm"), new)
    }


def _replaced(state, active, **fields):
    """Returns the state with new fields in the active rows."""
    return dataclasses.replace(state, **{n: _where(active, x, getattr(state, n)) for n, x in fields.items()})


def _where(chosen, new, old):
    """Selects between new and old by a mask of leading axes, in the dtype of the old."""
    if chosen is True:
        return new
    return jnp.where(layout.with_rank(chosen, old.ndim), new.astype(old.dtype), old)
