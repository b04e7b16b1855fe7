"""Addition of a state of earlier positions to the states before each chunk: an initial one, or another device's.

Each call updates an empty state with its own positions. Over devices, the final states are combined and the incoming
state is added afterwards, so no position is processed twice. The gradients of states in the backward pass, which come
from later positions, are handled in the same way.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.power_state import configs, degrees, preparation, recurrence, reshaping


def add_incoming(
    saved: preparation.Saved,
    final: tuple[jax.Array, jax.Array],
    incoming: tuple[jax.Array, jax.Array],
    arguments: preparation.Arguments,
    *,
    call: configs.Call,
    reverse: bool = False,
) -> tuple[preparation.Saved, tuple[jax.Array, jax.Array]]:
    """Returns `saved` and `final` of a fold from an empty state, as after the state `incoming` (kv, norm).

    reverse: the same for gradients of states, with `incoming` as the gradient of the final state.
    """
    log2_across = preparation.log2_across(arguments, call)
    log2_across = jnp.flip(log2_across, 1) if reverse else log2_across
    # From the incoming state to that before each chunk, and to the last one.
    log2_since = jnp.cumsum(jnp.pad(log2_across, [(0, 0), (1, 0)]), 1)
    incoming_kv, incoming_norm = degrees.degree(call.power).forward.stored(
        incoming, arguments.sizes, call.config
    )
    states, norms, shifts = saved.by_head()

    # A scale for both that keeps entries of the sum below 2^HEADROOM: that of the incoming state, where none was saved.
    # Only finite entries count: infinity and NaN must not affect their neighbors.
    of_kv, of_norm = (
        jnp.where(jnp.isfinite(x), jnp.abs(x), 0).reshape(len(x), -1).max(1)
        for x in (incoming_kv, incoming_norm)
    )
    size = jnp.maximum(of_kv, of_norm * preparation.LEAST_VALUE)
    size = jnp.log2(jnp.maximum(size, jnp.finfo(jnp.float32).tiny))[:, None]
    bound = jnp.logaddexp2(shifts + float(recurrence.HEADROOM), log2_since[:, :-1] + size)
    scale = jnp.ceil(bound).astype(jnp.int32) - recurrence.HEADROOM
    kept = jnp.exp2((shifts - scale).astype(jnp.float32))
    # Multiplied twice, since root^2 may overflow where the saved state is tiny and the incoming one is zero.
    root = jnp.exp2((log2_since[:, :-1] - scale) / 2)

    def joined(saved, incoming):
        of_saved, of_incoming = (x.reshape(*x.shape, *[1] * (saved.ndim - 2)) for x in (kept, root))
        return of_saved * saved + of_incoming * (of_incoming * incoming[:, None])

    states = joined(states, incoming_kv).astype(states.dtype)
    norms = reshaping.split(joined(reshaping.unsplit(norms), incoming_norm))
    decay = jnp.exp2(log2_since[:, -1]).reshape(final[1].shape[:2])[..., None]
    kv, norm = final[0] + decay[..., None] * incoming[0], final[1] + decay * incoming[1]
    return preparation.Saved.of(states, norms, scale, len(arguments.key)), (kv, norm)
