"""The recurrent state of power attention with a decay for every value channel."""

import dataclasses

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops import documents, feature_maps
from sympow_jax.ops._power import costs

__all__ = ["ChannelGatedState", "require_memory"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChannelGatedState:
    """What `channel_gated_attention` remembers of the document so far; a pytree that the caller owns.

    As `PowerState`, with the normaliser and the decays of the window kept for every channel: about twice its size.

    Attributes:
        kv: S_fe <- gamma_e S_fe + phi(k)_f v_e up to and including the last folded token.
        norm: Z_fe <- gamma_e Z_fe + phi(k)_f.
        keys: those of the exact window, in order of time, 2W slots of which the first `length` are in use.
        values: theirs.
        log_decays: theirs.
        length: tokens held in the window.
        segment: segment id of the document, -1 before the first token.
    """

    kv: Float[Array, "B K F E"]
    norm: Float[Array, "B K F E"]
    keys: Float[Array, "B 2*W K D"]
    values: Float[Array, "B 2*W K E"]
    log_decays: Float[Array, "B 2*W K E"]
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
        window: int = 64,
        dtype=jnp.float32,
    ) -> "ChannelGatedState":
        """The state before any token. Raises ValueError where it would exceed the device's memory."""
        sizes = {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        require_memory(power=power, itemsize=jnp.dtype(dtype).itemsize, **sizes)
        folded = (batch, kv_heads, feature_maps.symmetric_power_dim(head_dim, power), value_dim)
        held = (batch, 2 * window, kv_heads)
        return cls(
            kv=jnp.zeros(folded, dtype),
            norm=jnp.zeros(folded, dtype),
            keys=jnp.zeros((*held, head_dim), dtype),
            values=jnp.zeros((*held, value_dim), dtype),
            log_decays=jnp.zeros((*held, value_dim), dtype),
            length=jnp.zeros(batch, jnp.int32),
            segment=jnp.full(batch, documents.NO_SEGMENT, jnp.int32),
        )

    @classmethod
    def layout(cls) -> "ChannelGatedState":
        """The axes of each array."""
        held = "B 2W K"
        folded = "B K F E"
        return cls(folded, folded, f"{held} D", f"{held} E", f"{held} E", "B", "B")  # type: ignore[arg-type]

    @property
    def window(self) -> int:
        """W: every query sees at least its last W keys exactly."""
        return self.keys.shape[1] // 2

    @property
    def nbytes(self) -> int:
        """Bytes stored, window included."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


def require_memory(*, value_dim: int, **sizes) -> None:
    """Raises ValueError where the state of these sizes exceeds the device's memory."""
    # A normaliser for every value.
    costs.require_memory(value_dim=2 * value_dim, **sizes)
