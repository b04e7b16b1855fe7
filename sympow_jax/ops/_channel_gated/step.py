"""One token at a time: how the step of power attention reads and folds a state with decays a channel."""

import functools

import jax
import jax.numpy as jnp

from sympow_jax.ops import feature_maps
from sympow_jax.ops._power import decay as decays
from sympow_jax.ops._power import features
from sympow_jax.ops._power import mean as means
from sympow_jax.ops._power import step as power_step

__all__ = ["step"]


def step(query, key, value, log_decay, state, *, power, segment_ids):
    """Appends a token to the window and attends; W tokens are folded whenever 2W are held."""
    return power_step.step(
        query,
        key,
        value,
        state,
        power=power,
        log_decay=log_decay,
        segment_ids=segment_ids,
        read=_read,
        fold=_fold,
    )


def _read(query, state, power, precision):
    """One query per head, [B, K, G, D] -> [B, K, G, E], against the window and the folded state."""
    log_decay = jnp.moveaxis(state.log_decays, 1, 3)
    decay = decays.exp(decays.suffix_sums(log_decay))
    scores = jnp.einsum("bkgd,bwkd->bkgw", query, state.keys, precision=precision)
    scores = jax.lax.integer_pow(scores, power)
    phi = feature_maps.symmetric_power(query, power)
    to_query = decays.exp(log_decay.sum(-1))[:, :, None]

    def sums(window, folded):
        near = jnp.einsum("bkgw,bkew->bkge", scores, window, precision=precision)
        return near + to_query * jnp.einsum("bkgf,bkfe->bkge", phi, folded, precision=precision)

    numerator = sums(decay * jnp.moveaxis(state.values, 1, 3), state.kv)
    return means.mean(numerator[..., None], sums(decay, state.norm)[..., None], -1)[..., 0]


def _fold(state, tokens, rows, power, precision):
    """kv and norm after each of `tokens`, fields of a window, in the chosen rows."""
    keys, values, log_decay = (jnp.moveaxis(tokens[name], 1, 3) for name in ("keys", "values", "log_decays"))
    decay = decays.exp(decays.suffix_sums(log_decay))
    fold = functools.partial(features.fold, power=power, precision=precision)
    new = jax.vmap(jax.vmap(fold))(jnp.concatenate([decay * values, decay], 2), keys)
    new = jnp.split(features.to_canonical(new, keys.shape[2], power), 2, axis=-1)
    carry, rows = decays.exp(log_decay.sum(-1))[:, :, None], rows[:, None, None, None]
    return {
        name: jnp.where(rows, carry * getattr(state, name) + added, getattr(state, name))
        for name, added in zip(("kv", "norm"), new)
    }
