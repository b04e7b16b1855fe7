"""Stretches of time that the update handles side by side."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["add_arriving", "join"]

# Numbers that one thread of a warpgroup loads at once, 16 bytes of states, and how often at most.
_THREADS, _VECTOR, _LOADS = 128, 8, 5


def join(states, finals, log2_carry, stored=lambda state: state, *, interpret=None):
    """The state before each chunk and the last one, from those of segments that began from nothing, but the first.

    states: [H, n, ...], what chunks read; finals: float32 [H, segments, ...]; log2_carry: float32 [H, n].
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
    return add_arriving(states, jnp.stack(arriving, 1), factor, interpret=interpret), state


def add_arriving(states, arriving, factor, *, interpret=None):
    """states [H, n, ...] plus factor [H, n] times the state [H, segments, ...] that arrives at their segment.

    Nothing arrives at the first segment, whose states stay where they are; the others are read and written once.
    """
    heads, chunks, *rest = states.shape
    length = -(-chunks // arriving.shape[1])
    count = math.prod(rest)
    unit = _THREADS * _VECTOR
    loads = next(n for n in range(_LOADS, 0, -1) if count % (n * unit) == 0)
    parts = count // (loads * unit), loads * unit
    layout = plgpu.Layout.WG_STRIDED(parts[1:], _VECTOR)

    def body(states, arriving, factor):
        head, part = lax.axis_index("head"), lax.axis_index("part")
        chunk = lax.axis_index("chunk") + length
        source = arriving.at[head, lax.div(chunk, jnp.int32(length)), part]
        state = plgpu.load(states.at[head, chunk, part], layout=layout, optimized=False).astype(jnp.float32)
        joined = state + factor[head, chunk] * plgpu.load(source, layout=layout, optimized=False)
        states[head, chunk, part] = joined.astype(states.dtype)

    # A kernel writes in place what it is given as a reference.
    held = jax.new_ref(states.reshape(heads, chunks, *parts))
    plgpu.kernel(
        body,
        grid=(parts[0], chunks - length, heads),
        grid_names=("part", "chunk", "head"),
        kernel_name="power_state_join",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )(held, arriving.reshape(heads, -1, *parts), factor)
    return jax.freeze(held).reshape(states.shape)
