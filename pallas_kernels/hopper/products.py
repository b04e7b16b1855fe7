"""Matrix products of the tensor core, compiled or interpreted.

The interpreter supports no writable accumulator and no operand in registers. There, an accumulator is a piece of shared
memory, and a product is an ordinary one of the same 16-bit operands, summed in float32.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["accumulate", "operand", "scores", "split", "with_accumulators"]


def operand(lead, rows, columns, dtype, slices=None):
    """Returns a shared-memory type of `lead` times [rows, columns], 16-bit, in the tensor core's layout.

    An ordinary read may take whole `slices` of that many columns, by default all columns; slices of 16, 32 and 64 are
    supported.
    """
    swizzle = plgpu.find_swizzle((slices or columns) * jnp.dtype(dtype).itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM((*lead, rows, columns), dtype, transforms=transforms)


def with_accumulators(body, shapes, interpreted):
    """Calls `body` with float32 accumulators of zeros; `interpreted` is shared memory for them, or None."""
    if interpreted is None:
        return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))
    for ref, shape in zip(interpreted, shapes, strict=True):
        ref[...] = jnp.zeros(shape, jnp.float32)
    return body(*interpreted)


def accumulate(acc, a, b, interpreted, *, wait=0):
    """Adds a @ b to acc, a in registers or shared memory, b in shared memory; `wait` products may stay in flight."""
    if interpreted is None:
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(wait)
        return
    a, b = a[...].astype(jnp.float32), b[...].astype(jnp.float32)
    acc[...] = acc[...] + jnp.dot(a, b)
    # Only a fence orders an ordinary read before the copy that reuses its memory; a wgmma is ordered by its wait.
    plgpu.commit_smem()


def scores(a, b, interpreted):
    """Returns a @ b^T in float32, for two operands in shared memory with the same number of columns."""

    def product(acc):
        accumulate(acc, a, b.T, interpreted)
        return acc[...]

    return with_accumulators(product, [(a.shape[0], b.shape[0])], interpreted)


def split(x):
    """Returns two bfloat16 arrays whose sum is x, with an error of 2^-17 of each entry."""
    # Truncate instead of rounding: converting to bfloat16 and back would take as long as the exponential.
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)
