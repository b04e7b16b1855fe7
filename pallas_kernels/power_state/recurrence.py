"""Linear recurrences along chunks: of the normalizers, and of bounds of states by their logarithms."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, tensor_core
from pallas_kernels.power_state import configs, decays

_BLOCK = configs.BLOCK
# Threads of a warpgroup, and chunks whose terms are loaded before the first of them is added.
_THREADS, _AHEAD = 128, 16


def recurrence(carry, factor, new, *, interpret=None):
    """Computes x_0 = 0 and x_{c+1} = carry_c x_c + factor_c new_c, float32 [H, n + 1, A, B].

    A thread carries an entry.

    carry, factor: float32 [H, n]; new: float32 [H, n, A, B]; A B is a multiple of 128.
    """
    heads, chunks, *shape = new.shape
    layout = plgpu.Layout.WG_STRIDED((_THREADS,), 1)

    def body(carry, factor, new, result):
        head, part = lax.axis_index("head"), lax.axis_index("part")

        def load(ref):
            return plgpu.load(ref, layout=layout, optimized=False)

        def add(first, count, x):
            terms = [factor[head, first + n] * load(new.at[head, first + n, part]) for n in range(count)]
            for n, term in enumerate(terms):
                x = carry[head, first + n] * x + term
                result[head, first + n + 1, part] = x
            return x

        x = plgpu.layout_cast(jnp.zeros((_THREADS,), jnp.float32), layout)
        result[head, 0, part] = x
        _over_chunks(chunks, add, x)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((heads, chunks + 1, new[0, 0].size // _THREADS, _THREADS), jnp.float32),
        grid=(new[0, 0].size // _THREADS, heads),
        grid_names=("part", "head"),
        kernel_name="power_state_recurrence",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **launch.interpreted(interpret),
    )(
        carry,
        factor,
        new.reshape(heads, chunks, -1, _THREADS),
    ).reshape(heads, chunks + 1, *shape)


def log2_recurrence(log2_carry, log2_new, *, interpret=None):
    """Returns log2 of x_0 = 0 and x_{c+1} = 2^log2_carry_c x_c + 2^log2_new_c, float32 [H, n + 1].

    log2_carry, log2_new: float32 [H, n]. Logarithms of zero are `decays.NOTHING` or less.
    """
    heads, chunks = log2_new.shape

    def body(log2_carry, log2_new, result):
        head = lax.axis_index("head")

        def add(first, count, x):
            terms = [(log2_carry[head, first + n], log2_new[head, first + n]) for n in range(count)]
            for n, (carry, new) in enumerate(terms):
                old = carry + x
                largest = jnp.maximum(old, new)
                x = largest + jnp.log2(jnp.exp2(old - largest) + jnp.exp2(new - largest))
                launch.store(result.at[head, first + n + 1], x)
            return x

        # Every thread has the same number.
        x = plgpu.layout_cast(jnp.full((_BLOCK,), decays.NOTHING, jnp.float32), tensor_core.PER_ROW)
        launch.store(result.at[head, 0], x)
        _over_chunks(chunks, add, x)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((heads, chunks + 1, _BLOCK), jnp.float32),
        grid=(heads,),
        grid_names=("head",),
        kernel_name="power_state_bounds",
        # One chunk waits for another, so the latency of exponential and logarithm counts.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
        ),
        **launch.interpreted(interpret),
    )(log2_carry, log2_new)[..., 0]


def _over_chunks(chunks, add, x):
    """Calls x = add(first, count, x) for all chunks in order, `_AHEAD` at a time."""
    runs, rest = divmod(chunks, _AHEAD)
    x = lax.fori_loop(jnp.int32(0), jnp.int32(runs), lambda run, x: add(run * _AHEAD, _AHEAD, x), x)
    add(runs * _AHEAD, rest, x)
