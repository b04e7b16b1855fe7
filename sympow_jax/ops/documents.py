"""Where documents begin in a packed row, and how far into its document each token is.

A document starts wherever the segment id changes; ids may recur. A negative id is padding: it belongs to no
document and passes state through, so the same id before and after padding is one document.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Bool, Float, Int, Shaped

__all__ = [
    "NO_SEGMENT",
    "Boundaries",
    "PositionState",
    "before_document",
    "boundaries",
    "positions",
    "sums_to_end",
]

NO_SEGMENT = -1


class Boundaries(NamedTuple):
    """The documents of a row of tokens.

    starts: the first token of every document that begins in the row.
    valid: False for padding.
    last: the segment id of the document that the row ends in.
    """

    starts: Bool[Array, "B T"]
    valid: Bool[Array, "B T"]
    last: Int[Array, " B"]


def boundaries(segment_ids: Int[Array, "B T"], previous: Int[Array, " B"]) -> Boundaries:
    """The documents of a row that follows a token of segment `previous` (-1 where nothing precedes it)."""
    valid = segment_ids >= 0
    steps = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    newest = jax.lax.cummax(jnp.where(valid, steps, -1), axis=1)
    current = jnp.where(newest < 0, previous[:, None], jnp.take_along_axis(segment_ids, newest, axis=1))
    before = jnp.concatenate([previous[:, None], current[:, :-1]], axis=1)
    return Boundaries(valid & (segment_ids != before), valid, current[:, -1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PositionState:
    """How many tokens of the document have been seen, and its segment id, -1 before the first token."""

    position: Int[Array, " B"]
    segment: Int[Array, " B"]

    @classmethod
    def zeros(cls, batch: int) -> "PositionState":
        """The state before any token."""
        return cls(position=jnp.zeros(batch, jnp.int32), segment=jnp.full(batch, NO_SEGMENT, jnp.int32))


def positions(
    segment_ids: Int[Array, "B T"], state: PositionState
) -> tuple[Int[Array, "B T"], PositionState]:
    """The place of every token in its document, counted from 1; padding repeats the place before it."""
    starts, valid, last = boundaries(segment_ids, state.segment)
    count = state.position[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    place = count - before_document(count[..., None], starts, state.position[:, None])[..., 0]
    return place, PositionState(position=place[:, -1], segment=last)


def before_document(
    total: Shaped[Array, "B T K"], starts: Bool[Array, "B T"], initial: Shaped[Array, "B K"]
) -> Shaped[Array, "B T K"]:
    """What a running sum was before the document of each token, zero for a document older than the row.

    `initial` is what it was before the row.
    """
    earlier = jnp.concatenate([initial[:, None], total[:, :-1]], axis=1)
    steps = jnp.arange(total.shape[1], dtype=jnp.int32)
    start = jax.lax.cummax(jnp.where(starts, steps, -1), axis=1)[..., None]
    return jnp.where(start < 0, 0, jnp.take_along_axis(earlier, jnp.maximum(start, 0), axis=1))


def sums_to_end(x: Float[Array, "B T K"], starts: Bool[Array, "B T"]) -> Float[Array, "B T K"]:
    """The sum over the tokens of the same document from each token on."""
    ends = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    total = jnp.cumsum(x[:, ::-1], axis=1)
    return (total - before_document(total, ends[:, ::-1], jnp.zeros_like(x[:, 0])))[:, ::-1]
