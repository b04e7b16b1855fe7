"""Containment of NaN and infinity: they reach only the tokens that may attend to them.

In sums over keys, masked keys have a weight of zero, but zero times NaN is NaN: one bad key would reach every token
whose block it shares. Ops therefore compute with finite keys and values. Afterwards they set to NaN the outputs and the
states that a bad token reaches. Padding reaches nothing, whatever it holds.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Bool, Float
from sympow_jax.ops import documents, layout
from sympow_jax.ops.tokens import Tokens

# Arrays of a state, by the axes of their heads: [B, K, ...] and [B, 2W, K, ...].
_SUMS = ("kv", "norm")
_WINDOW = ("keys", "values", "log_decays")


class Finite(NamedTuple):
    """Arguments without NaN in keys, values and decays, and the mask of outputs that the NaN reach.

    reached: outputs that may attend to one, by key head.
    """

    tokens: Tokens
    state: Any
    reached: Bool[Array, "B S K"]


def without_padding(tokens: Tokens) -> Tokens:
    """Returns the tokens, or one of each row, with zeros at padding, whose gradients are then zero."""
    if tokens.segment_ids is None:
        return tokens
    valid = tokens.segment_ids >= 0

    def masked(x):
        own = valid if valid.ndim == 1 else valid[:, valid.shape[1] - x.shape[1] :]
        return jnp.where(layout.with_rank(own, x.ndim), x, 0)

    return jax.tree.map(masked, tokens._replace(segment_ids=None))._replace(segment_ids=tokens.segment_ids)


def remove(tokens: Tokens, *, state: Any = None, causal: bool = True, window: int | None = None) -> Finite:
    """Returns the arguments with zeros in place of padding and of tokens that are not finite.

    Args:
        tokens: a token counts as bad for a head if any of its key, value or decay is NaN or infinite; minus infinity is
            a valid decay. Other queries than those of padding are unchanged, since they reach only their own output.
        state: a `PowerState` or `DeltaState` that precedes the tokens, or None.
        causal: a bad token reaches itself and later tokens of its document; otherwise, all of its document.
        window: number of tokens of its document, itself and later ones, that a bad token reaches if causal; None for
            all. Padding does not count.
    """
    query, key, value, log_decay, segment_ids = without_padding(tokens)
    bad = ~(jnp.isfinite(key).all(-1) & jnp.isfinite(value).all(-1))
    if log_decay is not None:
        bad_decay = ~(log_decay < jnp.inf)
        bad |= bad_decay if bad_decay.ndim == bad.ndim else bad_decay.any(-1)
    if segment_ids is None:
        position = jnp.arange(bad.shape[1])[:, None]
        first = jnp.where(bad, position, bad.shape[1]).min(1, keepdims=True)
        reached = position >= first if causal else jnp.broadcast_to(bad.any(1, keepdims=True), bad.shape)
        of_state = jnp.ones_like(bad)
    else:
        nothing = jnp.full_like(segment_ids[:, 0], documents.NO_SEGMENT)
        starts, _, _ = documents.boundaries(segment_ids, nothing if state is None else state.segment)
        # Documents are numbered in order, from 0 for that of the state, so the newest one with a bad token is the
        # largest so far.
        document = jnp.cumsum(starts, axis=1, dtype=jnp.int32)[..., None]
        reached = jax.lax.cummax(jnp.where(bad, document, -1), axis=1) == document
        if not causal:
            beyond = jnp.iinfo(document.dtype).max
            reached |= jax.lax.cummin(jnp.where(bad, document, beyond), axis=1, reverse=True) == document
        of_state = document == 0
    if window is not None:
        valid = jnp.ones_like(bad[..., 0]) if segment_ids is None else segment_ids >= 0
        count = jnp.cumsum(valid, axis=1, dtype=jnp.int32)[..., None]
        reached &= count - jax.lax.cummax(jnp.where(bad, count, -window), axis=1) < window
    key, value = (jnp.where(layout.with_rank(bad, x.ndim), 0, x) for x in (key, value))
    if log_decay is not None:
        log_decay = jnp.where(layout.with_rank(bad, log_decay.ndim), 0, log_decay)
    if state is not None:
        bad_state = _is_bad(state)
        reached |= bad_state[:, None] & of_state
        finite = {
            name: jnp.where(layout.with_rank(bad_state, x.ndim), 0, x) for name, x in _arrays(state, _SUMS)
        }
        finite |= {
            name: jnp.where(layout.with_rank(bad_state[:, None], x.ndim), 0, x)
            for name, x in _arrays(state, _WINDOW)
        }
        state = dataclasses.replace(state, **finite)
    return Finite(Tokens(query, key, value, log_decay, segment_ids), state, reached)


def restore(out: Float[Array, "B T N L"], finite: Finite) -> Float[Array, "B T N L"]:
    """Returns the output with NaN where it attends to a bad token.

    The output is multiplied by a factor, so that gradients are NaN there as well.
    """
    time, heads = out.shape[1:3]
    before = finite.reached.shape[1] - time
    reached = jnp.repeat(finite.reached[:, before:], heads // finite.reached.shape[2], axis=2)
    reached |= ~jnp.isfinite(finite.tokens.query).all(-1)
    if finite.tokens.segment_ids is not None:
        reached &= (finite.tokens.segment_ids >= 0)[:, before:, None]
    return out * jnp.where(reached, jnp.nan, 1).astype(out.dtype)[..., None]


def restore_state(state: Any, finite: Finite) -> Any:
    """Returns the state after the tokens, with NaN sums if they include a bad token of its document."""
    last = finite.reached[:, -1]
    sums = {name: jnp.where(layout.with_rank(last, x.ndim), jnp.nan, x) for name, x in _arrays(state, _SUMS)}
    return dataclasses.replace(state, **sums)


def _is_bad(state) -> Bool[Array, "B K"]:
    """Returns a mask of the heads whose state is not finite, without reading all of the state.

    A bad key makes some normalizer NaN, and a bad value its whole column of kv.
    """
    bad = ~jnp.isfinite(state.kv[:, :, :1]).all((2, 3))
    if hasattr(state, "norm"):
        bad |= ~jnp.isfinite(state.norm.reshape(*state.norm.shape[:2], -1)).all(-1)
    for _, x in _arrays(state, _WINDOW):
        bad |= ~jnp.isfinite(x).all(tuple(axis for axis in range(x.ndim) if axis not in (0, 2)))
    return bad


def _arrays(state, names: tuple[str, ...]) -> list[tuple[str, Array]]:
    """Returns the arrays of a state that have one of the names."""
    return [(name, getattr(state, name)) for name in names if hasattr(state, name)]
