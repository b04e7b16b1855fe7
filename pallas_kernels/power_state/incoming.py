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
    over = preparation.over_chunks(arguments, call)
    over = jnp.flip(over, 1) if reverse else over
    since = jnp.cumsum(jnp.pad(over, [(0, 0), (1, 0)]), 1)
    start, norm = degrees.degree(call.power).forward.stored(incoming, arguments.sizes, call.config)
    states, norms, shifts = saved.by_head()

    # Choose a scale for both, so that entries stay below 2^HEADROOM: that of the incoming state, where none was saved.
    of_kv, of_norm = (jnp.abs(x).reshape(len(x), -1).max(1) for x in (start, norm))
    size = jnp.maximum(of_kv, of_norm * preparation.LEAST_VALUE)
    size = jnp.log2(jnp.maximum(size, jnp.finfo(jnp.float32).tiny))[:, None]
    bound = jnp.logaddexp2(shifts + float(recurrence.HEADROOM), since[:, :-1] + size)
    scale = jnp.maximum(jnp.ceil(bound).astype(jnp.int32) - recurrence.HEADROOM, shifts)
    kept, added = jnp.exp2((shifts - scale).astype(jnp.float32)), jnp.exp2(since[:, :-1] - scale)

    whole = kept[..., None, None, None] * states + added[..., None, None, None] * start[:, None]
    norms = kept[..., None, None] * reshaping.unsplit(norms) + added[..., None, None] * norm[:, None]
    arrays = whole.astype(states.dtype), reshaping.split(norms), scale
    saved = preparation.Saved(*(x.reshape(*y.shape) for x, y in zip(arrays, saved, strict=True)))
    decay = jnp.exp2(since[:, -1]).reshape(final[1].shape[:2])[..., None]
    kv, norm = final[0] + decay[..., None] * incoming[0], final[1] + decay * incoming[1]
    return saved, (kv, norm)
