"""KV cache: the decoding state of attention that stores every key and value."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Bool, Float, Int
from sympow_jax.ops import arguments, containment, cost, documents, fixed_point, sharding
from sympow_jax.ops.pytree import State
from sympow_jax.ops.tokens import Tokens


class KVCache(State):
    """Ring of the keys and values of the last S tokens of a document; a pytree that the caller holds.

    From slot `next` on, around the end of the ring, slots are in order of time, empty ones first. `step` attends with
    one token and writes it to slot `next`, in place if the cache is donated. `append` returns the S + T keys of T new
    tokens. Heads come before slots, so that a token's scores and output are matrix products of the arrays as they are.

    Attributes:
        key: key of each slot; NaN if the token's key, value or log decay is not finite.
        value: value of each slot; finite.
        log_decay: log decay of each slot; at most 0.
        segment_ids: segment id of each slot, -1 in slots that are empty or of an earlier document.
        next: slot of the next token.
        segment: segment id of the document, -1 before the first token.
        complete: False if the document has outgrown the S slots.
    """

    key: Float[Array, "B K S D"]
    value: Float[Array, "B K S E"]
    log_decay: Float[Array, "B K S"]
    segment_ids: Int[Array, "B S"]
    next: Int[Array, " B"]
    segment: Int[Array, " B"]
    complete: Bool[Array, " B"]

    @classmethod
    def zeros(
        cls, batch: int, capacity: int, kv_heads: int, head_dim: int, value_dim: int, *, dtype=jnp.float32
    ) -> "KVCache":
        """Returns the state before any token, with `capacity` slots.

        Raises:
            ValueError: a size is negative or no integer, or the cache would exceed the device's memory.
        """
        sizes = arguments.check_sizes(
            batch=batch, capacity=capacity, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim
        )
        batch, capacity, kv_heads, head_dim, value_dim = sizes.values()
        arguments.check_dtype("dtype", dtype)
        needed = batch * kv_heads * capacity * (head_dim + value_dim) * jnp.dtype(dtype).itemsize
        cost.require_bytes(needed, sizes, "fewer tokens or rows")
        return cls(
            key=jnp.zeros((batch, kv_heads, capacity, head_dim), dtype),
            value=jnp.zeros((batch, kv_heads, capacity, value_dim), dtype),
            log_decay=jnp.zeros((batch, kv_heads, capacity), jnp.float32),
            segment_ids=jnp.full((batch, capacity), documents.NO_SEGMENT, jnp.int32),
            next=jnp.zeros(batch, jnp.int32),
            segment=jnp.full(batch, documents.NO_SEGMENT, jnp.int32),
            complete=jnp.ones(batch, bool),
        )

    @classmethod
    def layout(cls) -> "KVCache":
        """Returns the axes of each array."""
        return cls("B K S D", "B K S E", "B K S", "B S", "B", "B", "B")  # type: ignore[arg-type]

    @property
    def capacity(self) -> int:
        """S, the number of slots."""
        return self.segment_ids.shape[-1]

    def tokens(self) -> dict[str, Array]:
        """Returns key [B, S, K, D], value, log_decay and segment_ids of all slots in order of time."""
        cache = _in_order(self)
        by_head = {name: getattr(cache, name) for name in ("key", "value", "log_decay")}
        return {name: jnp.swapaxes(x, 1, 2) for name, x in by_head.items()} | {
            "segment_ids": cache.segment_ids
        }

    def append(
        self,
        key: Float[Array, "B T K D"],
        value: Float[Array, "B T K E"],
        log_decay: Float[Array, "B T K"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> tuple["KVCache", Bool[Array, "B T"]]:
        """Returns a cache of the S + T tokens to attend to, and a mask of new tokens whose document has lost keys.

        Without segment ids, the new tokens continue the document of the last one. Padding takes a slot too, and tokens
        of earlier documents stay, until `newest`.
        """
        key, value, log_decay, segment_ids = arguments.to_arrays(
            key=key, value=value, log_decay=log_decay, segment_ids=segment_ids
        )
        arguments.check_attention(key, key, value, log_decay, segment_ids)
        self._check_sizes(key, value, segment_ids)
        return _appended(None, state=self, key=key, value=value, log_decay=log_decay, segment_ids=segment_ids)

    def _check_sizes(self, key, value, segment_ids) -> None:
        """Raises ValueError unless the tokens have the cache's sizes, and ids that fit in its dtype."""
        batch, kv_heads, _, head_dim = self.key.shape
        sizes = batch, kv_heads, head_dim, self.value.shape[-1]
        if sizes != (key.shape[0], *key.shape[-2:], value.shape[-1]):
            raise ValueError(
                f"key has shape {key.shape}, value {value.shape} and the cache {kv_heads} heads of {head_dim} and "
                f"{sizes[-1]} in {batch} rows; they must agree"
            )
        arguments.check_ids_fit(segment_ids, self)

    def without_gaps(self) -> "KVCache":
        """Moves padding before all tokens, where its slots are the first to be dropped."""
        return _without_gaps(None, state=self)

    def newest(self, capacity: int) -> "KVCache":
        """Returns a cache of the last `capacity` slots, which keeps only the current document.

        Raises:
            ValueError: there are fewer slots.
        """
        capacity = arguments.check_integer("capacity", capacity, 0)
        if capacity > self.capacity:
            raise ValueError(
                f"capacity is {capacity}; the cache has {self.capacity} slots; append tokens to it first"
            )
        return _newest(capacity, state=self)

    def step(
        self,
        query: Float[Array, "B N D"],
        key: Float[Array, "B K D"],
        value: Float[Array, "B K E"],
        log_decay: Float[Array, "B K"] | None,
        segment_ids: Int[Array, " B"] | None,
        *,
        weigh: Callable[..., Array],
    ) -> tuple[Float[Array, "B N E"], "KVCache", Bool[Array, " B"]]:
        """Attends with one token to the cached tokens and itself, then writes it to the oldest slot.

        Of keys, values and decays, only that slot is written, if the cache is donated. Padding is not written, and its
        output is zero.

        Args:
            query: N is a multiple of K.
            key: key of the token.
            value: value of the token.
            log_decay: logarithm of the token's decay, which discounts the cached tokens; None without decay.
            segment_ids: document of the token, negative for padding; None continues the document.
            weigh: maps scores [B, K, G, S + 1], G = N / K, and the logarithms of their decays [B, K or 1, 1, S + 1],
                minus infinity for masked keys, to weights in any scale. Hashable.

        Returns:
            The mean of values by weight, zero if all weights are; the cache after the token; and whether the token
            misses keys, because its document has outgrown the cache.
        """
        query, key, value, log_decay, segment_ids = arguments.to_arrays(
            query=query, key=key, value=value, log_decay=log_decay, segment_ids=segment_ids
        )
        arguments.check_attention(query, key, value, log_decay, segment_ids, step=True)
        self._check_sizes(key, value, segment_ids)
        token = {"key": key, "value": value, "log_decay": log_decay, "segment_ids": segment_ids}
        return _step(weigh, state=self, query=query, **token)


_STATE = {"state": KVCache.layout()}
_TOKENS = _STATE | {"key": "B T K D", "value": "B T K E"}


@sharding.op(_TOKENS, lambda _: (KVCache.layout(), "B T"))
def _appended(_, state, key, value, log_decay, segment_ids):
    batch, time, kv_heads, _ = key.shape
    if log_decay is None:
        log_decay = jnp.zeros((batch, time, kv_heads))
    if segment_ids is None:
        segment_ids = jnp.broadcast_to(documents.continued(state.segment)[:, None], (batch, time))
    starts, valid, last = documents.boundaries(segment_ids, state.segment)
    continues = valid & (jnp.cumsum(starts, axis=1) == 0)
    log_decay = jnp.where(valid[..., None], log_decay, 0)
    old = _in_order(state)
    new = _contained(old, *(jnp.swapaxes(x, 1, 2) for x in (key, value, log_decay)))
    joined = {name: jnp.concatenate([getattr(old, name), x], axis=2) for name, x in new.items()}
    joined["segment_ids"] = jnp.concatenate([old.segment_ids, segment_ids], axis=1)
    complete = state.complete | starts.any(axis=1)
    cache = KVCache(**joined, next=old.next, segment=last, complete=complete)
    return cache, continues & ~state.complete[:, None]


@sharding.op(_STATE, lambda _: KVCache.layout())
def _without_gaps(_, state):
    state = _in_order(state)
    order = jnp.argsort(state.segment_ids >= 0, axis=1, stable=True)
    by_head = order[:, None]
    return dataclasses.replace(
        state,
        key=jnp.take_along_axis(state.key, by_head[..., None], axis=2),
        value=jnp.take_along_axis(state.value, by_head[..., None], axis=2),
        log_decay=jnp.take_along_axis(state.log_decay, by_head, axis=2),
        segment_ids=jnp.take_along_axis(state.segment_ids, order, axis=1),
    )


@sharding.op(_STATE, lambda capacity: KVCache.layout())
def _newest(capacity, state):
    state = _in_order(state)
    nothing = jnp.full_like(state.segment, documents.NO_SEGMENT)
    starts, valid, _ = documents.boundaries(state.segment_ids, nothing)
    document = jnp.cumsum(starts, axis=1)
    current = valid & (document == document[:, -1:])
    dropped = state.capacity - capacity
    segment_ids = jnp.where(current, state.segment_ids, documents.NO_SEGMENT)
    return dataclasses.replace(
        state,
        key=state.key[:, :, dropped:],
        value=state.value[:, :, dropped:],
        log_decay=state.log_decay[:, :, dropped:],
        segment_ids=segment_ids[:, dropped:],
        complete=state.complete & ~current[:, :dropped].any(axis=1),
    )


@sharding.op(
    _STATE | {"query": "B N D", "key": "B K D", "value": "B K E"}, lambda _: ("B N E", KVCache.layout(), "B")
)
def _step(weigh, state, query, key, value, log_decay, segment_ids):
    tokens = Tokens(query, key, value, log_decay, segment_ids)
    query, key, value, log_decay, _ = containment.without_padding(tokens)
    if segment_ids is None:
        segment_ids = documents.continued(state.segment)
    valid = segment_ids >= 0
    starts = valid & (segment_ids != state.segment)
    old_ids = jnp.where(starts[:, None], documents.NO_SEGMENT, state.segment_ids)
    token = _contained(state, key, value, jnp.zeros(key.shape[:2]) if log_decay is None else log_decay)
    decay = (
        None
        if log_decay is None
        else _decays_to_end(state.log_decay, state.next) + token["log_decay"][..., None]
    )
    # Scores and their decays: cached slots first, then the token's own key.
    dtype = np.promote_types(state.key.dtype, jnp.float32)
    exact = {"precision": cost.precision_of(state.key.dtype), "preferred_element_type": dtype}
    cached = (old_ids >= 0)[:, None, None]
    query = query.astype(state.key.dtype).reshape(*key.shape[:2], -1, query.shape[-1])
    scores = jnp.einsum("bkgd,bksd->bkgs", query, state.key, **exact)
    own = jnp.einsum("bkgd,bkd->bkg", query, token["key"], **exact)[..., None]
    decay = jnp.zeros((), dtype) if decay is None else decay[:, :, None].astype(dtype)
    # Scores of empty slots may be NaN.
    scores = jnp.concatenate([jnp.where(cached, scores, 0), own], axis=-1)
    decay = jnp.where(cached, decay, -jnp.inf)
    decay = jnp.pad(decay, [(0, 0)] * 3 + [(0, 1)])
    weights = weigh(scores, decay)
    # The mean of the values by weight
    total = weights.sum(-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1, total)).astype(state.value.dtype)
    out = jnp.einsum("bkgs,bkse->bkge", weights[..., :-1], state.value, **exact)
    out += weights[..., -1:].astype(dtype) * token["value"][:, :, None]
    out = out.astype(state.value.dtype).reshape(out.shape[0], -1, out.shape[-1])
    out = jnp.where(valid[:, None, None], out, 0)
    # Read the cache before it is written: otherwise XLA keeps a copy to read from.
    out, token = jax.lax.optimization_barrier((out, token))
    overwritten = jnp.take_along_axis(old_ids, state.next[:, None], axis=1)[:, 0] >= 0
    complete = state.complete | starts
    # A write to a slot beyond the last is dropped.
    slot = jnp.where(valid, state.next, state.capacity)
    put = jax.vmap(lambda slots, slot, x: slots.at[:, slot].set(x, mode="drop"))
    put_id = jax.vmap(lambda ids, slot, x: ids.at[slot].set(x, mode="drop"))
    cache = KVCache(
        **{name: put(getattr(state, name), slot, x) for name, x in token.items()},
        segment_ids=put_id(old_ids, slot, segment_ids.astype(old_ids.dtype)),
        next=jnp.where(valid, (state.next + 1) % state.capacity, state.next),
        segment=jnp.where(valid, segment_ids, state.segment),
        complete=complete & ~(valid & overwritten),
    )
    return out, cache, valid & ~complete


def _in_order(state):
    """Returns the cache with slots in order of time, from slot 0 on."""

    def rolled(x, axis):
        return jax.vmap(lambda row, start: jnp.roll(row, -start, axis=axis))(x, state.next)

    return dataclasses.replace(
        state,
        key=rolled(state.key, 1),
        value=rolled(state.value, 1),
        log_decay=rolled(state.log_decay, 1),
        segment_ids=rolled(state.segment_ids, 0),
        next=jnp.zeros_like(state.next),
    )


def _contained(state, key, value, log_decay):
    """Casts new tokens [B, K, ...] to the cache's dtypes; those that are not finite get a NaN key and a zero value.

    A masked key is left out of the scores, but NaN times a weight of zero would be NaN in the sum of values.
    """
    key, value = key.astype(state.key.dtype), value.astype(state.value.dtype)
    # Minus infinity is a valid decay.
    bad = ~(jnp.isfinite(key).all(-1) & jnp.isfinite(value).all(-1) & (log_decay < jnp.inf))
    return {
        "key": jnp.where(bad[..., None], jnp.nan, key),
        "value": jnp.where(bad[..., None], 0, value),
        "log_decay": jnp.where(bad, 0, log_decay).astype(state.log_decay.dtype),
    }


def _decays_to_end(log_decay: Float[Array, "B K S"], start: Int[Array, " B"]) -> Float[Array, "B K S"]:
    """Returns the sum of the log decays after each slot, the order of time beginning at slot `start`.

    Sums are exact to 2^-32 per slot; log decays below 1 - 2^31 / S are clipped.
    """
    steps = -jnp.clip(jax.lax.stop_gradient(log_decay), 1 - 2.0**31 / log_decay.shape[-1], 0)
    flat = steps.reshape(-1, steps.shape[-1], 1)
    total = tuple(x.reshape(steps.shape) for x in fixed_point.running_sum(flat))
    newest, last = (tuple(_before(x, start)[..., None] for x in total), tuple(x[..., -1:] for x in total))
    newer = jnp.arange(steps.shape[-1]) < start[:, None, None]
    both = fixed_point.add(newest, last)
    end = tuple(jnp.where(newer, x, y) for x, y in zip(newest, both))
    whole, fraction = fixed_point.subtract(end, total)

    def change(dlog_decay, to_end, log_decay, start):
        total = jnp.cumsum(dlog_decay, axis=-1)
        newer = jnp.arange(total.shape[-1]) < start[:, None, None]
        return _before(total, start)[..., None] + jnp.where(newer, 0, total[..., -1:]) - total

    to_end = -(whole.astype(jnp.float32) + fraction.astype(jnp.float32) * 2.0**-32)
    return fixed_point.with_derivative(change, to_end, log_decay, start)


def _before(total: Array, start: Int[Array, " B"]) -> Array:
    """Returns the running sum [B, K] before slot `start`; 0 before the first."""
    index = jnp.maximum(start - 1, 0)[:, None, None]
    value = jnp.take_along_axis(total, index, axis=-1)[..., 0]
    return jnp.where(start[:, None] > 0, value, 0)
