"""Recurrent state of power attention, and the window and tokens that every implementation builds from it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Bool, Float, Int
from sympow_jax.ops import arguments, cost, decays, documents, feature_maps, layout
from sympow_jax.ops.pytree import State


class PowerState(State):
    """State of power attention after a prefix of a document; a pytree that the caller holds.

    Old tokens are in the feature state, updated as S <- gamma S + phi(k) v^T. The most recent tokens are stored
    exactly, because a sum in feature space cancels if few keys carry weight. Running a, then b from a's state, equals
    running a and b in one call, wherever the sequence is split.

    A state may be stored in bfloat16. Ops then compute in float32 and return the state in bfloat16: `kv`, `keys` and
    `values`, which take most of its memory. `norm` and `log_decays` are float32, so that rounding changes no decay.

    Ops raise an error for a state of another power, which has another number of features. D = 1 is the exception: every
    power has one feature, and the power is not stored.

    Attributes:
        kv: S, decayed up to and including the last token in it. The F features are those of
            `feature_maps.symmetric_power`: non-decreasing indices in lexicographic order, for every implementation.
        norm: the same sum without the values. With one decay per value channel it has one sum per value channel.
        keys: keys of the exact window, in order of time, in 2W slots of which the first `length` are in use.
        values: values of the window, in the same slots.
        log_decays: log decays of the window, in the same slots.
        length: number of tokens in the window.
        segment: segment id of the document, -1 before the first token.
    """

    kv: Float[Array, "B K F E"]
    norm: Float[Array, "B K F *E"]
    keys: Float[Array, "B 2*W K D"]
    values: Float[Array, "B 2*W K E"]
    log_decays: Float[Array, "B 2*W K *E"]
    length: Int[Array, " B"]
    segment: Int[Array, " B"]

    @classmethod
    def zeros(
        cls,
        batch: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        *,
        power: int,
        exact_window: int = 64,
        per_channel: bool = False,
        dtype=jnp.float32,
    ) -> "PowerState":
        """Returns the state before any token.

        per_channel: decays are one per value channel, [B, T, K, E], instead of one per key head; the state is twice as
            large.

        Raises:
            ValueError: the power is not positive and even, the window or a size is negative, or the state would exceed
                the device's memory.
        """
        power = arguments.check_power(power)
        exact_window = arguments.check_integer("exact_window", exact_window, 0)
        sizes = arguments.check_sizes(batch=batch, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
        per_channel = arguments.check_flag("per_channel", per_channel)
        arguments.check_dtype("dtype", dtype)
        sizes |= {"power": power, "exact_window": exact_window}
        normalizers = sizes["value_dim"] if per_channel else 1
        cost.require_memory(**sizes, normalizers=normalizers, itemsize=jnp.dtype(dtype).itemsize)
        return zeros(**sizes, per_channel=per_channel, dtype=dtype)

    @classmethod
    def layout(cls, *, per_channel: bool = False) -> "PowerState":
        """Returns the axes of each array."""
        slots, channels = "B 2W K", " E" if per_channel else ""
        decays = slots + channels
        return cls("B K F E", "B K F" + channels, slots + " D", slots + " E", decays, "B", "B")  # type: ignore[arg-type]

    @property
    def exact_window(self) -> int:
        """Window size W: every query attends exactly to at least its last W keys."""
        return self.keys.shape[1] // 2

    @property
    def per_channel(self) -> bool:
        """True if decays are one per value channel."""
        return self.norm.ndim == self.kv.ndim

    def astype(self, dtype) -> "PowerState":
        """Returns the state with `kv`, `keys` and `values` in this dtype."""
        arguments.check_dtype("dtype", dtype)
        stored = {name: getattr(self, name).astype(dtype) for name in ("kv", "keys", "values")}
        return dataclasses.replace(self, **stored)


def zeros(
    batch: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    *,
    power: int,
    exact_window: int,
    per_channel: bool = False,
    dtype=jnp.float32,
) -> PowerState:
    """Returns the state before any token, of any power and size.

    Linear attention has states of odd powers, and shapes alone need no memory.
    """
    features = feature_maps.symmetric_power_dim(head_dim, power)
    slots = 2 * exact_window
    channels = (value_dim,) if per_channel else ()
    exact = np.promote_types(dtype, jnp.float32)
    return PowerState(
        kv=jnp.zeros((batch, kv_heads, features, value_dim), dtype),
        norm=jnp.zeros((batch, kv_heads, features, *channels), exact),
        keys=jnp.zeros((batch, slots, kv_heads, head_dim), dtype),
        values=jnp.zeros((batch, slots, kv_heads, value_dim), dtype),
        log_decays=jnp.zeros((batch, slots, kv_heads, *channels), exact),
        length=jnp.zeros(batch, jnp.int32),
        segment=jnp.full(batch, documents.NO_SEGMENT, jnp.int32),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequence:
    """Window of the incoming state followed by the new tokens, as one sequence of X = 2W + T positions.

    Under context parallelism, W positions for the tokens before the shard come first.

    `valid` is False for empty slots of the window and for padding; their keys and decays are zero. `start` is True for
    the first token of a document that begins among the new tokens. `log_decay` is one per head, or one for each of its
    channels. `segment` is the id of the sequence's last document.
    """

    key: Float[Array, "B X K D"]
    value: Float[Array, "B X K E"]
    log_decay: Float[Array, "B X K *channels"]
    valid: Bool[Array, "B X"]
    start: Bool[Array, "B X"]
    segment: Int[Array, " B"]

    @classmethod
    def join(cls, plan, tokens, state: PowerState | None):
        """Concatenates the window of `state`, if any, and the new tokens; decays are returned in the plan's dtype.

        Under context parallelism, a document may have begun on another device.
        """
        _, key, value, log_decay, segment_ids = tokens
        batch, time, kv_heads, _ = key.shape
        if log_decay is None:
            channels = value.shape[3:] if plan.per_channel else ()
            log_decay = jnp.zeros_like(key, plan.dtype, shape=(batch, time, kv_heads, *channels))
        log_decay = log_decay.astype(plan.dtype)
        if state is None:
            window = {"keys": key[:, :0], "values": value[:, :0], "log_decays": log_decay[:, :0]}
            length, previous = jnp.zeros(batch, jnp.int32), jnp.full(batch, documents.NO_SEGMENT, jnp.int32)
        else:
            window = {name: getattr(state, name) for name in ("keys", "values", "log_decays")}
            length, previous = state.length, state.segment
        if segment_ids is None:
            segment = documents.continued(previous)
            valid, start = jnp.ones((batch, time), bool), jnp.zeros((batch, time), bool)
        else:
            if plan.axis_name is not None:
                previous = documents.segment_before(segment_ids, previous, plan.axis_name)
            start, valid, segment = documents.boundaries(segment_ids, previous)
        in_use = jnp.arange(window["keys"].shape[1]) < length[:, None]
        valid = jnp.concatenate([in_use, valid], 1)
        start = jnp.concatenate([jnp.zeros_like(in_use), start], 1)

        def joined(window, new):
            both = jnp.concatenate([window.astype(np.promote_types(window.dtype, new.dtype)), new], 1)
            return jnp.where(layout.with_rank(valid, new.ndim), both, 0)

        return cls(
            key=joined(window["keys"], key),
            value=joined(window["values"], value),
            log_decay=joined(window["log_decays"], log_decay),
            valid=valid,
            start=start,
            segment=segment,
        )

    @property
    def document(self) -> Int[Array, "B X"]:
        """Number of each position's document; 0 is the document of the incoming state."""
        return jnp.cumsum(self.start, 1, dtype=jnp.int32)

    @property
    def after(self) -> Int[Array, "B X"]:
        """Number of later tokens of the last document; the largest int32 for tokens of earlier documents."""
        document = self.document
        last = self.valid & (document == document[:, -1:])
        following = jnp.cumsum(last[:, ::-1], 1, dtype=jnp.int32)[:, ::-1] - 1
        return jnp.where(last, following, jnp.iinfo(jnp.int32).max)


def window_of(sequence: Sequence, exact_window: int, dtype) -> dict[str, Array]:
    """Returns the window fields of the state after `sequence`: its last min(W, length of the document) tokens."""
    in_window = sequence.after < exact_window
    # A stable sort brings the held tokens to the front in order of time; slots beyond them are zeroed.
    order = jnp.argsort(~in_window, axis=1, stable=True)[:, : 2 * exact_window]
    length = in_window.sum(1, dtype=jnp.int32)
    in_use = jnp.arange(2 * exact_window) < length[:, None]

    def slots(x):
        x = layout.reordered(x, order)
        x = jnp.pad(x, [(0, 0), (0, 2 * exact_window - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        return jnp.where(layout.with_rank(in_use, x.ndim), x, 0).astype(dtype)

    return {
        "keys": slots(sequence.key),
        "values": slots(sequence.value),
        # Bounded, as those of a step: a decay of minus infinity is valid in a token, and no sign of a damaged state.
        "log_decays": slots(decays.bounded(sequence.log_decay, False)),
        "length": length,
        "segment": sequence.segment,
    }
