"""Stretches of time that the update handles side by side."""

import jax.numpy as jnp
import numpy as np

__all__ = ["join"]


def join(states, finals, log2_carry, stored=lambda state: state):
    """The state before each chunk and the last one, from those of segments that began from nothing, but the first.

    states: 16-bit [H, n, ...], what chunks read; finals: float32 [H, segments, ...]; log2_carry: float32 [H, n].
    stored: linear, from states as finals hold them to those that chunks read.
    """
    chunks, segments = states.shape[1], finals.shape[1]
    if segments == 1:
        return states, finals[:, 0]

    # What came before a segment decays into each of its states.
    length = -(-chunks // segments)
    decay = jnp.pad(log2_carry, [(0, 0), (0, segments * length - chunks)])
    since = jnp.cumsum(decay.reshape(-1, segments, length), -1)
    arriving, state = [], jnp.zeros_like(finals[:, 0])
    for segment in range(segments):
        arriving.append(stored(state))
        state = jnp.exp2(since[:, segment, -1, None, None, None]) * state + finals[:, segment]
    factor = jnp.exp2(jnp.pad(since[..., :-1], [(0, 0), (0, 0), (1, 0)])).reshape(len(states), -1)[:, :chunks]
    added = jnp.stack(arriving, 1)[:, np.arange(chunks) // length]
    return (states + factor[..., None, None, None] * added).astype(states.dtype), state
