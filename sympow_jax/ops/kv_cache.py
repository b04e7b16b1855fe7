"""KV cache: the decoding state of attention that stores every key and value."""

import dataclasses

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Bool, Float, Int
from sympow_jax.ops import documents
from sympow_jax.ops._shared import arguments, calls, layout

__all__ = ["KVCache"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of the last S positions, newest last; a pytree that the caller holds.

    Empty slots look like padding. Followed by T new positions (`append`), they are the S + T keys of
    `softmax_attention` or of the attention form of `power_attention`. Padding takes a slot too, until `without_gaps`.

    Attributes:
        key: key of each position, zero in empty slots.
        value: value of each position, zero in empty slots.
        log_decay: log decay of each position, zero in empty slots.
        segment_ids: segment id of each position, -1 in empty slots.
        segment: segment id of the document, -1 before the first token.
        complete: False if the document has outgrown the S positions.
    """

    key: Float[Array, "B S K D"]
    value: Float[Array, "B S K E"]
    log_decay: Float[Array, "B S K"]
    segment_ids: Int[Array, "B S"]
    segment: Int[Array, " B"]
    complete: Bool[Array, " B"]

    @classmethod
    def zeros(
        cls, batch: int, capacity: int, kv_heads: int, head_dim: int, value_dim: int, *, dtype=jnp.float32
    ) -> "KVCache":
        """Returns the state before any token, with room for `capacity` positions."""
        return cls(
            key=jnp.zeros((batch, capacity, kv_heads, head_dim), dtype),
            value=jnp.zeros((batch, capacity, kv_heads, value_dim), dtype),
            log_decay=jnp.zeros((batch, capacity, kv_heads), jnp.float32),
            segment_ids=jnp.full((batch, capacity), documents.NO_SEGMENT, jnp.int32),
            segment=jnp.full(batch, documents.NO_SEGMENT, jnp.int32),
            complete=jnp.ones(batch, bool),
        )

    @classmethod
    def layout(cls) -> "KVCache":
        """Returns the axes of each array."""
        return cls("B S K D", "B S K E", "B S K", "B S", "B", "B")  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """Number of bytes stored."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def append(
        self,
        key: Float[Array, "B T K D"],
        value: Float[Array, "B T K E"],
        log_decay: Float[Array, "B T K"] | None,
        segment_ids: Int[Array, "B T"] | None,
    ) -> tuple["KVCache", Bool[Array, "B T"]]:
        """Returns the S + T positions to attend to, and a mask of the new positions that miss keys.

        Without segment ids, the new positions continue the document of the last one.
        """
        key, value, log_decay, segment_ids = arguments.to_arrays(
            key=key, value=value, log_decay=log_decay, segment_ids=segment_ids
        )
        return _appended(None, state=self, key=key, value=value, log_decay=log_decay, segment_ids=segment_ids)

    def without_gaps(self) -> "KVCache":
        """Moves padding to the front, where its slots are the first to be dropped."""
        return _without_gaps(None, state=self, segment_ids=self.segment_ids, key=self.key)

    def newest(self, capacity: int) -> "KVCache":
        """Returns the last `capacity` positions; there must be at least that many."""
        return _newest(capacity, state=self, segment_ids=self.segment_ids, key=self.key)


_LAYOUTS = {"key": "B T K D", "value": "B T K E", "segment_ids": "B T"}


@calls.op(_LAYOUTS, lambda _: (KVCache.layout(), "B T"))
def _appended(_, state, key, value, log_decay, segment_ids):
    batch, time, kv_heads, _ = key.shape
    if log_decay is None:
        log_decay = jnp.zeros((batch, time, kv_heads))
    if segment_ids is None:
        segment_ids = jnp.broadcast_to(documents.continued(state.segment)[:, None], (batch, time))
    starts, valid, last = documents.boundaries(segment_ids, state.segment)
    continues = valid & (jnp.cumsum(starts, axis=1) == 0)
    old_and_new = {"key": key, "value": value, "log_decay": log_decay}
    joined = {
        name: jnp.concatenate([getattr(state, name), new.astype(getattr(state, name).dtype)], axis=1)
        for name, new in old_and_new.items()
    }
    # Use the wider dtype of the two: ids that wrapped around could be equal.
    joined["segment_ids"] = jnp.concatenate([state.segment_ids, segment_ids], axis=1)
    complete = state.complete | starts.any(axis=1)
    return KVCache(**joined, segment=last, complete=complete), continues & ~state.complete[:, None]


@calls.op(_LAYOUTS, lambda _: KVCache.layout())
def _without_gaps(_, state, key, segment_ids):
    order = jnp.argsort(segment_ids >= 0, axis=1, stable=True)

    def in_order(x):
        return jnp.take_along_axis(x, layout.with_rank(order, x.ndim), axis=1)

    return KVCache(
        key=in_order(key),
        value=in_order(state.value),
        log_decay=in_order(state.log_decay),
        segment_ids=in_order(segment_ids),
        segment=state.segment,
        complete=state.complete,
    )


@calls.op(_LAYOUTS, lambda capacity: KVCache.layout())
def _newest(capacity, state, key, segment_ids):
    nothing = jnp.full_like(state.segment, documents.NO_SEGMENT)
    starts, valid, _ = documents.boundaries(segment_ids, nothing)
    document = jnp.cumsum(starts, axis=1)
    dropped = segment_ids.shape[1] - capacity
    outgrown = (valid & (document == document[:, -1:]))[:, :dropped].any(axis=1)
    return KVCache(
        key=key[:, dropped:],
        value=state.value[:, dropped:],
        log_decay=state.log_decay[:, dropped:],
        segment_ids=segment_ids[:, dropped:],
        segment=state.segment,
        complete=state.complete & ~outgrown,
    )
