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
    """states [H, n, ...] plus factor [H, n] times the arriving state of their segment, [H, segments, ...].

    Bound by memory: every number is read and written once, which XLA does at two thirds of the speed of a copy.
    """
    heads, chunks, *rest = states.shape
    length = -(-chunks // arriving.shape[1])
    count = math.prod(rest)
    unit = _THREADS * _VECTOR
    loads = next(n for n in range(_LOADS, 0, -1) if count % (n * unit) == 0)
    size = loads * unit
    layout = plgpu.Layout.WG_STRIDED((size,), _VECTOR)

    def body(states, arriving, factor, out):
        head, chunk, part = (lax.axis_index(name) for name in ("head", "chunk", "part"))
        segment = lax.div(chunk, jnp.int32(length))
        state = plgpu.load(states.at[head, chunk, part], layout=layout, optimized=False)
        more = plgpu.load(arriving.at[head, segment, part], layout=layout, optimized=False)
        out[head, chunk, part] = (state.astype(jnp.float32) + factor[head, chunk] * more).astype(out.dtype)

    parts = (count // size, size)
    joined = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((heads, chunks, *parts), states.dtype),
        grid=(count // size, chunks, heads),
        grid_names=("part", "chunk", "head"),
        kernel_name="power_state_join",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(states.reshape(heads, chunks, *parts), arriving.reshape(heads, -1, *parts), factor)
    return joined.reshape(states.shape)
