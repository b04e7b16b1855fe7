"""Document boundaries in packed rows, and the position of each token in its document.

A document starts wherever the segment id changes; ids may recur. A negative id is padding: it belongs to no document
and leaves the state unchanged, so tokens with the same id before and after padding are one document.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Bool, Float, Int, Shaped
from sympow_jax.ops import arguments, sharding, time_axis
from sympow_jax.ops.pytree import State

NO_SEGMENT = -1


class Boundaries(NamedTuple):
    """Documents of a row of tokens.

    Attributes:
        starts: True for the first token of every document that begins in the row.
        valid: False for padding.
        last: segment id of the last token, ignoring padding.
    """

    starts: Bool[Array, "B T"]
    valid: Bool[Array, "B T"]
    last: Int[Array, " B"]


def boundaries(segment_ids: Int[Array, "B T"], previous: Int[Array, " B"]) -> Boundaries:
    """Returns the documents of a row that follows a token of segment `previous` (-1 if the row comes first)."""
    valid = segment_ids >= 0
    steps = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    newest = jax.lax.cummax(jnp.where(valid, steps, -1), axis=1)
    current = jnp.where(newest < 0, previous[:, None], jnp.take_along_axis(segment_ids, newest, axis=1))
    before = jnp.concatenate([previous[:, None], current[:, :-1]], axis=1)
    return Boundaries(valid & (segment_ids != before), valid, current[:, -1])


def numbered(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the number of each token's document, counted from 1 in a row without predecessor; -1 for padding."""
    nothing = jnp.full(segment_ids.shape[0], NO_SEGMENT, segment_ids.dtype)
    starts, valid, _ = boundaries(segment_ids, nothing)
    return jnp.where(valid, jnp.cumsum(starts, axis=1, dtype=jnp.int32), -1)


def continued(previous: Int[Array, " B"]) -> Int[Array, " B"]:
    """Returns the segment id of tokens without ids after a token of segment `previous`.

    They continue its document. The id is 0 before the first token. All states of a layer use this rule, so that they
    agree on where documents start.
    """
    return jnp.where(previous == NO_SEGMENT, 0, previous)


class PositionState(State):
    """Position in a document after a prefix of its tokens.

    Attributes:
        position: number of tokens of the document so far.
        segment: its segment id, -1 before the first token.
    """

    position: Int[Array, " B"]
    segment: Int[Array, " B"]

    @classmethod
    def zeros(cls, batch: int) -> "PositionState":
        """Returns the state before any token."""
        return cls(position=jnp.zeros(batch, jnp.int32), segment=jnp.full(batch, NO_SEGMENT, jnp.int32))

    @classmethod
    def layout(cls) -> "PositionState":
        """Returns the axes of each array."""
        return cls("B", "B")  # type: ignore[arg-type]


def segment_before(
    segment_ids: Int[Array, "B T"], previous: Int[Array, " B"], axis_name: str
) -> Int[Array, " B"]:
    """Returns the segment id of the last token before this device's, where `previous` comes before the first's."""
    last = boundaries(segment_ids, jnp.full_like(segment_ids[:, 0], NO_SEGMENT)).last
    previous = previous.astype(jnp.promote_types(previous.dtype, last.dtype))
    return time_axis.carried(lambda carry, own: jnp.where(own < 0, carry, own), previous, last, axis_name)


def positions(
    segment_ids: Int[Array, "B T"], state: PositionState, *, axis_name: str | None = None
) -> tuple[Int[Array, "B T"], PositionState]:
    """Returns each token's position in its document, counted from 1, and the state after the last token.

    Padding repeats the position before it. `axis_name` is a manual mesh axis over which time is sharded, in order. With
    it, `state` is the state before the first device's tokens, and the returned state is the one after this device's
    tokens.
    """
    segment_ids = arguments.to_array("segment_ids", segment_ids)
    arguments.check_axes("segment_ids", segment_ids, "[B, T]")
    arguments.check_segment_ids(segment_ids, (*state.segment.shape, segment_ids.shape[1]))
    arguments.check_ids_fit(segment_ids, state)
    if axis_name is not None:
        arguments.check_axis_name(axis_name)
    return _positions(axis_name, segment_ids=segment_ids, state=state)


@sharding.op({"segment_ids": "B T"}, lambda axis_name: ("B T", PositionState.layout()))
def _positions(axis_name, segment_ids, state):
    def count(state):
        starts, valid, last = boundaries(segment_ids, state.segment)
        count = state.position[:, None] + jnp.cumsum(valid, axis=1, dtype=jnp.int32)
        position = count - before_document(count[..., None], starts, state.position[:, None])[..., 0]
        return position, PositionState(position=position[:, -1], segment=last)

    def add(before, own):
        return PositionState(position=before.position + own.position, segment=own.segment)

    if axis_name is not None:
        state = state_before(lambda state: count(state)[1], add, segment_ids, state, axis_name)
    return count(state)


def state_before[State](
    count: Callable[[State], State],
    add: Callable[[State, State], State],
    segment_ids: Int[Array, "B T"],
    state: State,
    axis_name: str,
) -> State:
    """Returns the state before this device's time shard, given the `state` before the first shard.

    States have a `segment`. `count` maps a state before the shard to the one after it, restarting with every document.
    `add` combines a state before a document's tokens with one that counts only these tokens.
    """
    # The segment id of the first token, -1 if all are padding.
    index = jnp.argmax(segment_ids >= 0, axis=1)[:, None]
    first = jnp.maximum(jnp.take_along_axis(segment_ids, index, axis=1)[:, 0], NO_SEGMENT)
    own = count(dataclasses.replace(jax.tree.map(jnp.zeros_like, state), segment=first))
    restarts = boundaries(segment_ids, first).starts.any(axis=1)

    def step(before, share):
        own, first, restarts = share
        continues = ~restarts & ((first < 0) | (first == before.segment))
        total = jax.tree.map(
            lambda both, alone: jnp.where(continues.reshape(-1, *[1] * (alone.ndim - 1)), both, alone),
            add(before, own),
            own,
        )
        return dataclasses.replace(total, segment=jnp.where(first < 0, before.segment, own.segment))

    return time_axis.carried(step, state, (own, first, restarts), axis_name)


def before_document(
    total: Shaped[Array, "B T K"], starts: Bool[Array, "B T"], initial: Shaped[Array, "B K"]
) -> Shaped[Array, "B T K"]:
    """Returns the value of a running sum before the document of each token.

    It is zero if the document began before the row. `initial` is the value before the row.
    """
    earlier = jnp.concatenate([initial[:, None], total[:, :-1]], axis=1)
    steps = jnp.arange(total.shape[1], dtype=jnp.int32)
    start = jax.lax.cummax(jnp.where(starts, steps, -1), axis=1)[..., None]
    return jnp.where(start < 0, 0, jnp.take_along_axis(earlier, jnp.maximum(start, 0), axis=1))


def sums_to_end(
    x: Float[Array, "B T K"], starts: Bool[Array, "B T"], axis_name: str | None = None
) -> Float[Array, "B T K"]:
    """Returns, for each token, the sum over itself and the later tokens of its document.

    `axis_name` is as in `positions`.
    """
    if axis_name is not None:
        begun = jnp.cumsum(starts, axis=1)[..., None]
        share = jnp.where(begun == 0, x, 0).sum(1), begun[:, -1] > 0

        def step(following, share):
            before_start, starts = share
            return before_start + jnp.where(starts, 0, following)

        following = time_axis.carried(step, jnp.zeros_like(x[:, 0]), share, axis_name, reverse=True)
        x = x.at[:, -1].add(following)
    ends = jnp.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    total = jnp.cumsum(x[:, ::-1], axis=1)
    return (total - before_document(total, ends[:, ::-1], jnp.zeros_like(x[:, 0])))[:, ::-1]
