"""One token at a time: the exact window and the folded state in one pass."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sympow_jax.ops import documents, feature_maps
from sympow_jax.ops._power import decay as decays
from sympow_jax.ops._power import features, xla
from sympow_jax.ops._power import mean as means

__all__ = ["step"]


def step(query, key, value, state, *, power, log_decay, segment_ids):
    """Appends a token to the window and attends; W tokens are folded whenever 2W are held."""
    dtype, window = state.kv.dtype, state.window
    batch, kv_heads, head_dim = key.shape
    precision = xla.precision_of(key.dtype)
    valid, state = _enter_document(state, segment_ids, batch)
    # Bounded decays keep the sums over the window finite.
    log_decay = jnp.zeros((batch, kv_heads), dtype) if log_decay is None else log_decay.astype(dtype)
    token = {"keys": key, "values": value, "log_decays": decays.bounded(log_decay, False)}
    token = {name: x[:, None].astype(dtype) for name, x in token.items()}
    if window == 0:
        state = _replaced(state, valid, **_folded(state, token, power, precision))
    else:
        slot = (jnp.arange(2 * window) == state.length[:, None]) & valid[:, None]
        window_fields = {name: _where(slot, x, getattr(state, name)) for name, x in token.items()}
        state = _replaced(state, valid, **window_fields, length=state.length + 1)

    query = xla.unit_scale(query.reshape(batch, kv_heads, -1, head_dim).astype(dtype))
    out = jnp.where(valid[:, None, None, None], _read(query, state, power, precision), 0)
    if window:
        full = state.length == 2 * window
        fold = functools.partial(_fold_window, full=full, power=power, precision=precision)
        state = jax.lax.cond(full.any(), fold, lambda held: held, state)
    return out.reshape(batch, -1, value.shape[-1]).astype(value.dtype), state


def _enter_document(state, segment_ids, batch):
    """Which rows have a token, and the state with the rows emptied where it starts a document."""
    if segment_ids is None:
        segment = jnp.where(state.segment == documents.NO_SEGMENT, 0, state.segment)
        return jnp.ones(batch, bool), _replaced(state, True, segment=segment)
    valid = segment_ids >= 0
    start = valid & (segment_ids != state.segment)
    # Under `cond`, states that go on are not copied at every token.
    state = jax.lax.cond(
        start.any(),
        lambda held: jax.tree.map(lambda x: _where(start, jnp.zeros_like(x), x), held),
        lambda held: held,
        state,
    )
    return valid, _replaced(state, valid, segment=segment_ids)


def _read(query, state, power, precision):
    """One query per head, [B, K, G, D] -> [B, K, G, E], against the window and the folded state."""
    log_decay = jnp.moveaxis(state.log_decays, 1, 2)
    scores = jnp.einsum("bkgd,bwkd->bkgw", query, state.keys, precision=precision)
    weights = jax.lax.integer_pow(scores, power) * decays.exp(decays.suffix_sums(log_decay))[:, :, None]
    phi = feature_maps.symmetric_power(query, power) * decays.exp(log_decay.sum(-1))[..., None, None]
    numerator = jnp.einsum("bkgw,bwke->bkge", weights, state.values, precision=precision)
    numerator += jnp.einsum("bkgf,bkfe->bkge", phi, state.kv, precision=precision)
    denominator = weights.sum(-1) + jnp.einsum("bkgf,bkf->bkg", phi, state.norm, precision=precision)
    return means.mean(numerator, denominator[..., None], -1)


def _fold_window(state, *, full, power, precision):
    """Folds the oldest W of 2W tokens in the rows that are full."""
    window = state.window
    names = ("keys", "values", "log_decays")
    oldest = {name: getattr(state, name)[:, :window] for name in names}
    newest = {name: getattr(state, name)[:, window:] for name in names}
    shifted = {name: jnp.concatenate([x, jnp.zeros_like(x)], 1) for name, x in newest.items()}
    folded = _folded(state, oldest, power, precision)
    return _replaced(state, full, **folded, **shifted, length=state.length - window)


def _folded(state, tokens, power, precision):
    """kv and norm after `tokens`, fields of a window in order of time: S <- gamma S + phi(k) v^T for each."""
    log_decay = jnp.moveaxis(tokens["log_decays"], 1, 2)
    keys, values = jnp.moveaxis(tokens["keys"], 1, 3), jnp.moveaxis(tokens["values"], 1, 3)
    values = jnp.concatenate([values, jnp.ones_like(values[..., :1, :])], 2)
    values *= decays.exp(decays.suffix_sums(log_decay))[:, :, None]
    fold = functools.partial(features.fold, power=power, precision=precision)
    new = xla.kv_and_norm(jax.vmap(jax.vmap(fold))(values, keys), keys.shape[2], power)
    carry = decays.exp(log_decay.sum(-1))[..., None]
    return {"kv": carry[..., None] * state.kv + new["kv"], "norm": carry * state.norm + new["norm"]}


def _replaced(state, rows, **fields):
    """The state with new fields in the chosen rows."""
    return dataclasses.replace(state, **{n: _where(rows, x, getattr(state, n)) for n, x in fields.items()})


def _where(chosen, new, old):
    """Chooses by leading axes."""
    if chosen is True:
        return new
    return jnp.where(chosen.reshape(chosen.shape + (1,) * (old.ndim - chosen.ndim)), new, old)
