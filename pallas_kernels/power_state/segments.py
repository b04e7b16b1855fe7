"""Joins the states of segments of time, which the update computes in parallel."""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch
from pallas_kernels.power_state import recurrence

# A state that arrives with a smaller factor is forgotten: it changes no entry. Entries are at most 2^HEADROOM, the
# smallest step of float16 is 2^-24, and half of it rounds to nothing; the last bit is a margin.
_LEAST_FACTOR = 2.0 ** -(recurrence.HEADROOM + 26)

# Threads of a warpgroup, elements per load of one thread (16 bytes of float16), and its maximum number of loads.
_THREADS, _VECTOR, _LOADS = 128, 8, 5


def join(states, finals, scales: recurrence.Scales, stored=lambda state: state, *, interpret=None):
    """Returns the state before each chunk and the final state. Each segment began at zero, without what is before it.

    Args:
        states: float16 [H, n, A, B, C], the states that chunks read, each from its own segment only.
        finals: float32 [H, segments, P, Q, R], the state after each segment; zero after a segment without chunks.
        scales: of the states, with the decays of segments.
        stored: linear map from states in the layout of `finals` to states as chunks read them.
        interpret: parameters of the GPU interpreter, or None to run on a GPU.
    """
    segments = finals.shape[1]
    if segments == 1:
        return states, finals[:, 0]

    # The state before a segment is decayed into each of its states.
    arriving, state = [], finals[:, 0]
    for segment in range(1, segments):
        arriving.append(stored(state))
        state = scales.over_segment[:, segment, None, None, None] * state + finals[:, segment]
    return add_arriving(states, jnp.stack(arriving, 1), scales.in_segment, interpret=interpret), state


def add_arriving(states, arriving, factor, *, interpret=None):
    """Adds factor [H, n] * arriving state [H, segments - 1, ...] to the states [H, n, ...] of later segments.

    The states are changed in place. Two kinds are not moved: those of the first segment, at which nothing arrives, and
    those of chunks that have forgotten what arrives.
    """
    heads, chunks, *rest = states.shape
    length = -(-chunks // (arriving.shape[1] + 1))
    count = math.prod(rest)
    unit = _THREADS * _VECTOR
    # Every layout has whole tiles, so that `unit` divides the size of a state.
    part_size = unit * next(n for n in range(_LOADS, 0, -1) if count % (n * unit) == 0)
    num_parts = count // part_size
    layout = plgpu.Layout.WG_STRIDED((part_size,), _VECTOR)

    def body(states, arriving, factor):
        head, part = lax.axis_index("head"), lax.axis_index("part")
        later = lax.axis_index("chunk")
        chunk, source = later + length, arriving.at[head, lax.div(later, jnp.int32(length)), part]
        scale = factor[head, chunk]

        @pl.when(jnp.logical_not(scale < _LEAST_FACTOR))  # also if it is NaN
        def _add():
            state = plgpu.load(states.at[head, chunk, part], layout=layout, optimized=False)
            joined = state.astype(jnp.float32) + scale * plgpu.load(source, layout=layout, optimized=False)
            states[head, chunk, part] = joined.astype(states.dtype)

    def update(states):
        plgpu.kernel(
            body,
            grid=(num_parts, chunks - length, heads),
            grid_names=("part", "chunk", "head"),
            kernel_name="power_state_join",
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
            **launch.interpreted(interpret),
        )(states, arriving.reshape(heads, -1, num_parts, part_size), factor)

    # In place, by a reference of `run_state`: one of `jax.new_ref` has an effect, which is an error of jax 0.11.2 in a
    # function with a rule of differentiation.
    joined = pl.run_state(update)(states.reshape(heads, chunks, num_parts, part_size))
    return joined.reshape(states.shape)
