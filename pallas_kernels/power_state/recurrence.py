"""Recurrences along chunks: of the normalizers, and of the scales of states."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch
from pallas_kernels.power_state import decays

# States, and products of a value and a key, stay below 2^13: float16 ends at 2^16.
HEADROOM = 13
# Base-2 logarithm of a decay to zero between states: below `decays.NOTHING`, whatever the difference of their scales.
_NEVER = -1e5
# Threads of a warpgroup, and chunks whose terms are loaded before the first of them is added.
_THREADS, _AHEAD = 128, 16


class Scales(NamedTuple):
    """Powers of two that keep states in range along n chunks, and the decays between states in these scales."""

    shift: jax.Array  # int32 [H, n + 1], exponents; -126 where the state is empty
    carry: jax.Array  # float32 [H, n], from one state to the next
    in_segment: (
        jax.Array
    )  # float32 [H, n], from what arrives at a segment of time to the state before each of its chunks
    over_segment: jax.Array  # float32 [H, segments], from there to the next segment; 1 for one without chunks


def scales(log2_carry, largest, sums, *, segments: int, reverse: bool = False, interpret=None) -> Scales:
    """Returns Scales from bounds on the states' entries: x_0 = 0 and x_{c+1} = 2^log2_carry_c x_c + new_c.

    The bounds divided by 2^shift are at most 2^HEADROOM.

    log2_carry: float32 [H, n], with `reverse` in reverse order. largest, sums: float32 [H, n]; new_c is 2^largest_c
    sums_c. Logarithms of zero are `decays.NOTHING` or less.
    """
    heads, chunks = largest.shape
    per_segment = -(-chunks // segments)

    def body(log2_carry, largest, sums, *out):
        head, out = lax.axis_index("head"), Scales(*out)

        def shift_of(x):
            """Returns the bound's logarithm, rounded up, less HEADROOM."""
            whole = x.astype(jnp.int32)
            up = whole + jnp.where(whole.astype(jnp.float32) < x, 1, 0)
            return jnp.where(x > decays.NOTHING / 2, up - HEADROOM, jnp.finfo(jnp.float32).minexp)

        def advance(first, count, before):
            chunks_of_run = [first + n for n in range(count)]
            carries = [log2_carry[head, chunks - 1 - chunk if reverse else chunk] for chunk in chunks_of_run]
            terms = [largest[head, chunk] + jnp.log2(sums[head, chunk]) for chunk in chunks_of_run]
            for chunk, carry, new in zip(chunks_of_run, carries, terms):
                x, shift, since = before
                old = carry + x
                larger = jnp.maximum(old, new)
                after = larger + jnp.log2(jnp.exp2(old - larger) + jnp.exp2(new - larger))
                shift_after = shift_of(after)
                some = (x > decays.NOTHING / 2) & (carry > decays.NOTHING)
                scaled_carry = jnp.where(some, carry + (shift - shift_after).astype(jnp.float32), _NEVER)
                since = jnp.where(lax.rem(chunk, jnp.int32(per_segment)) == 0, 0.0, since)
                out.shift[head, chunk + 1] = shift_after
                out.carry[head, chunk] = jnp.exp2(scaled_carry)
                out.in_segment[head, chunk] = jnp.exp2(since)
                out.over_segment[head, lax.div(chunk, jnp.int32(per_segment))] = jnp.exp2(
                    since + scaled_carry
                )
                before = after, shift_after, since + scaled_carry
            return before

        # Segments after the last chunk.
        for segment in range(-(-chunks // per_segment), segments):
            out.over_segment[head, segment] = jnp.float32(1)
        x = jnp.float32(decays.NOTHING)
        out.shift[head, 0] = shift_of(x)
        _over_chunks(chunks, advance, (x, shift_of(x), jnp.float32(0)))

    def vector(size, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((heads, size), dtype)

    return Scales(
        *plgpu.kernel(
            body,
            out_type=(vector(chunks + 1, jnp.int32), vector(chunks), vector(chunks), vector(segments)),
            grid=(heads,),
            grid_names=("head",),
            kernel_name="power_state_scales",
            # One chunk waits for another, so the latency of exponential and logarithm counts.
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
            ),
            **launch.interpreted(interpret),
        )(log2_carry, largest, sums)
    )


def recurrence(scales: Scales, log2_unit, new, *, interpret=None):
    """Computes x_0 = 0 and x_{c+1} = carry_c x_c + 2^(log2_unit_c - shift_{c+1}) new_c in float32.

    Returns x before each step, as the sum of two bfloat16: [H, n, 2 A, B], rounded x and then the rounding errors; and
    the last x, float32 [H, A, B]. A thread carries an entry.

    log2_unit: float32 [H, n]; new: float32 [H, n, A, B]; A B is a multiple of 128.
    """
    heads, chunks, *shape = new.shape
    layout = plgpu.Layout.WG_STRIDED((_THREADS,), 1)

    def body(carry, shift, log2_unit, new, before, last):
        head, part = lax.axis_index("head"), lax.axis_index("part")

        def load(ref):
            return plgpu.load(ref, layout=layout, optimized=False)

        def add(first, count, x):
            terms = []
            for n in range(count):
                exponent = log2_unit[head, first + n] - shift[head, first + n + 1].astype(jnp.float32)
                terms.append(jnp.exp2(exponent) * load(new.at[head, first + n, part]))
            for n, term in enumerate(terms):
                rounded = x.astype(jnp.bfloat16)
                before[head, first + n, 0, part] = rounded
                before[head, first + n, 1, part] = (x - rounded.astype(jnp.float32)).astype(jnp.bfloat16)
                x = carry[head, first + n] * x + term
            return x

        x = plgpu.layout_cast(jnp.zeros((_THREADS,), jnp.float32), layout)
        last[head, part] = _over_chunks(chunks, add, x)

    parts = new[0, 0].size // _THREADS
    before, last = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((heads, chunks, 2, parts, _THREADS), jnp.bfloat16),
            jax.ShapeDtypeStruct((heads, parts, _THREADS), jnp.float32),
        ),
        grid=(parts, heads),
        grid_names=("part", "head"),
        kernel_name="power_state_recurrence",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **launch.interpreted(interpret),
    )(
        scales.carry,
        scales.shift,
        log2_unit,
        new.reshape(heads, chunks, -1, _THREADS),
    )
    return before.reshape(heads, chunks, -1, shape[1]), last.reshape(heads, *shape)


def _over_chunks(chunks, add, x):
    """Returns the last x = add(first, count, x), called for all chunks in order, `_AHEAD` at a time."""
    runs, rest = divmod(chunks, _AHEAD)
    x = lax.fori_loop(jnp.int32(0), jnp.int32(runs), lambda run, x: add(run * _AHEAD, _AHEAD, x), x)
    return add(runs * _AHEAD, rest, x)
