"""One decoding step: the exact window and the recurrent state in one pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sympow_jax.ops import (
    containment,
    decays,
    derivatives,
    documents,
    feature_maps,
    layout,
    means,
    preparation,
)
from sympow_jax.ops.forms import features


class StateOps(NamedTuple):
    """Operations of a step on the state; the rest of a step is the same for every implementation.

    Attributes:
        attend: (plan, query [B, K, G, D], token, slot, state) -> outputs [B, K, G, E], or sums [B, K, G, E + 1] without
            division, of the window and the recurrent state, and the fields of the window. These hold the token, whose
            fields have no axis of time, in this slot; a slot beyond the window is not written.
        fold: (plan, state, tokens, active) -> `kv` and `norm`, updated with the tokens of a window in the active
            rows of the batch.
        in_place: (f, active, state) -> f(active, state) if any row is active, otherwise the state.
    """

    attend: Callable
    fold: Callable
    in_place: Callable


def step(plan, tokens, state):
    """Runs `step_by` in plain JAX."""
    read_state, fold_state = (read_channels, fold_channels) if plan.per_channel else (read, fold)
    attend = functools.partial(_attend, read_state)
    tokens = containment.without_padding(tokens)
    return step_by(StateOps(attend, fold_state, _differentiable_in_place), plan, tokens, state)


def step_by(state_ops: StateOps, plan, tokens, state):
    """Appends a token of each row to the window and attends.

    Whenever the window holds 2W tokens, the state is updated with its oldest W.
    """
    query, key, value, log_decay, segment_ids = tokens
    exact_window = plan.exact_window
    batch, kv_heads, head_dim = key.shape
    if segment_ids is None:
        segment = documents.continued(state.segment)
        valid = jnp.ones_like(segment, bool)
        state = dataclasses.replace(state, segment=segment)
    else:
        # The state is reset in rows where the token starts a document, which most do not.
        valid = segment_ids >= 0
        start = valid & (segment_ids != state.segment)
        state = _differentiable_in_place(_emptied, start, state)
        state = _replaced(state, valid, segment=segment_ids)
    if log_decay is None:
        log_decay = jnp.zeros_like(value if plan.per_channel else key[..., 0])
    token = {"keys": key, "values": value, "log_decays": log_decay}
    # A state that is stored in a shorter dtype is widened where it is read, and rounded where it is updated.
    if exact_window == 0:
        state = dataclasses.replace(state, **state_ops.fold(plan, state, _as_window(plan, token), valid))
    slot = jnp.where(valid, state.length, 2 * exact_window)
    query = query.reshape(batch, kv_heads, -1, head_dim)
    out, window = state_ops.attend(plan, query, token, slot, state)
    out = jnp.where(valid[:, None, None, None], out, 0).reshape(batch, -1, out.shape[-1])
    if plan.division is not means.Division.NONE:
        out = out.astype(value.dtype)
    if exact_window:
        state = dataclasses.replace(state, **window, length=state.length + valid)
        # Read the state before it is updated: otherwise XLA keeps a copy to read from.
        out, state = jax.lax.optimization_barrier((out, state))
        state = state_ops.in_place(
            functools.partial(_fold_window, plan, state_ops.fold), state.length == 2 * exact_window, state
        )
    return out, state


def _as_window(plan, token):
    """Returns a token as the fields of a window of length 1."""
    # Bounded decays keep the sums over the window finite.
    log_decays = decays.bounded(token["log_decays"].astype(plan.dtype), False)
    return {name: x[:, None].astype(plan.dtype) for name, x in (token | {"log_decays": log_decays}).items()}


def _attend(read_state, plan, query, token, slot, state):
    """Computes `StateOps.attend` in plain JAX."""
    window = {}
    if plan.exact_window:
        # Written in place if the state is donated; writes to a slot beyond the window are dropped.
        put = jax.vmap(lambda slots, i, x: slots.at[i].set(x[0].astype(slots.dtype), mode="drop"))
        window = {name: put(getattr(state, name), slot, x) for name, x in _as_window(plan, token).items()}
    query = query.astype(plan.dtype)
    if plan.division is not means.Division.NONE:
        query = preparation.unit_scale(query)
    return read_state(plan, query, dataclasses.replace(state, **window).astype(plan.dtype)), window


def in_place(f, active, state):
    """Returns f(active, state) if any row is active, otherwise the state.

    This is a loop of at most one iteration, since XLA updates a loop's carry in place. A conditional would copy the
    state, whichever branch is taken.
    """

    def once(carried):
        return jnp.zeros_like(carried[0]), f(active, carried[1])

    return jax.lax.while_loop(lambda carried: carried[0], once, (active.any(), state))[1]


# A loop has no reverse-mode gradient, so the gradient is that of a conditional.
_differentiable_in_place = derivatives.custom_vjp(
    in_place,
    static=1,
    plain=lambda f, active, state: jax.lax.cond(active.any(), lambda x: f(active, x), lambda x: x, state),
)


def _emptied(active, state):
    """Returns the state with the active rows reset to before any token."""
    return jax.tree.map(lambda x: _where(active, jnp.zeros_like(x), x), state)


def read(plan, query, state):
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


def read_channels(plan, query, state):
    """Computes `read` with decays per value channel."""
    log_decay = jnp.moveaxis(state.log_decays, 1, 3)
    decay = decays.exp(decays.sums_after(log_decay))
    scores = jnp.einsum("bkgd,bwkd->bkgw", query, state.keys, precision=plan.precision)
    scores = jax.lax.integer_pow(scores, plan.power)
    phi = feature_maps.symmetric_power(query, plan.power)
    from_start = decays.exp(log_decay.sum(-1))[:, :, None]

    def sums(window, state_sums):
        from_window = jnp.einsum("bkgw,bkew->bkge", scores, window, precision=plan.precision)
        return from_window + from_start * jnp.einsum(
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


def fold(plan, state, tokens, active):
    """Returns kv and norm after S <- gamma S + phi(k) v^T for each of `tokens`, in the active rows.

    tokens: fields of a window.
    """
    log_decay = jnp.moveaxis(tokens["log_decays"], 1, 2)
    keys, values = jnp.moveaxis(tokens["keys"], 1, 3), jnp.moveaxis(tokens["values"], 1, 3)
    values = jnp.pad(values, [(0, 0), (0, 0), (0, 1), (0, 0)], constant_values=1)
    values *= decays.exp(decays.sums_after(log_decay))[:, :, None]
    by_head = functools.partial(features.fold, power=plan.power, precision=plan.precision)
    new = features.to_kv_and_norm(jax.vmap(jax.vmap(by_head))(values, keys), keys.shape[2], plan.power)
    across = decays.exp(log_decay.sum(-1))[..., None]
    kv, norm = across[..., None] * state.kv + new["kv"], across * state.norm + new["norm"]
    return {"kv": _where(active, kv, state.kv), "norm": _where(active, norm, state.norm)}


def fold_channels(plan, state, tokens, active):
    """Computes `fold` with decays per value channel."""
    keys, values, log_decay = (jnp.moveaxis(tokens[name], 1, 3) for name in ("keys", "values", "log_decays"))
    decay = decays.exp(decays.sums_after(log_decay))
    by_head = functools.partial(features.fold, power=plan.power, precision=plan.precision)
    new = jax.vmap(jax.vmap(by_head))(jnp.concatenate([decay * values, decay], 2), keys)
    new = jnp.split(features.to_canonical(new, keys.shape[2], plan.power), 2, axis=-1)
    across = decays.exp(log_decay.sum(-1))[:, :, None]
    return {
        name: _where(active, across * getattr(state, name) + added, getattr(state, name))
        for name, added in zip(("kv", "norm"), new)
    }


def _replaced(state, active, **fields):
    """Returns the state with new fields in the active rows."""
    return dataclasses.replace(state, **{n: _where(active, x, getattr(state, n)) for n, x in fields.items()})


def _where(chosen, new, old):
    """Selects between new and old by a mask of leading axes, in the dtype of the old."""
    return jnp.where(layout.with_rank(chosen, old.ndim), new.astype(old.dtype), old)
