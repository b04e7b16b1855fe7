"""Linear recurrence along chunks, of the normalizers: a thread carries an entry, in float32."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch

# Threads of a warpgroup, and chunks whose terms are loaded before the first of them is added.
_THREADS, _AHEAD = 128, 16


def recurrence(carry, factor, new, *, interpret=None):
    """Computes x_0 = 0 and x_{c+1} = carry_c x_c + factor_c new_c, float32 [H, n + 1, A, B].

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
        runs, rest = divmod(chunks, _AHEAD)
        x = lax.fori_loop(jnp.int32(0), jnp.int32(runs), lambda run, x: add(run * _AHEAD, _AHEAD, x), x)
        add(runs * _AHEAD, rest, x)

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
