"""Per-warp operations within a warpgroup.

A warp has 16 of the 64 rows of a matrix in the tensor core's layout. Pallas arrays belong to a whole warpgroup, and a
vector along the columns is the same in all four warps; here each warp reads its own.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["rows_of_warps"]

_WARPS = 4


def rows_of_warps(ref, shape, interpreted):
    """Returns the rows of ref [n, columns] in shared memory, each repeated 64 / n times, in `shape` [64, columns].

    n divides 4. Only elementwise operations may follow: the declared type is a vector that all warps share, but each
    warp has its own.
    """
    if interpreted:
        return jnp.repeat(ref[...], shape[0] // ref.shape[0], 0)
    part = lax.div(lax.rem(_warp(), jnp.int32(_WARPS)), jnp.int32(_WARPS // ref.shape[0]))
    row = plgpu.load(ref.at[part], layout=plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(row, shape, [1])


def _warp():
    """Returns the index of this warp in its block."""

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())))
    def index(_):
        return mgpu.FragmentedArray.splat(mgpu.utils.warp_idx(), (), is_signed=True)

    return index()
