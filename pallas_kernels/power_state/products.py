"""Matrix products of the tensor core, compiled or interpreted.

Interpretation knows no accumulator that can be written and no operand in registers. There an accumulator is a piece of
shared memory, and a product an ordinary one, of the same 16-bit operands added up in float32.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["accumulate", "operand", "scores", "split", "with_accumulators"]


def operand(lead, rows, columns, dtype, slices=None):
    """A 16-bit array in shared memory, `lead` times [rows, columns], as the tensor core reads it.

    An ordinary read may take whole `slices` of so many columns, all by default; those of 16, 32 and 64 are known.
    """
    swizzle = plgpu.find_swizzle((slices or columns) * jnp.dtype(dtype).itemsize * 8)
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM((*lead, rows, columns), dtype, transforms=transforms)


def with_accumulators(body, shapes, interpreted):
    """What `body` returns, given float32 accumulators of zeros; `interpreted` is shared memory for them, or None."""
    if interpreted is None:
        return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))
    for ref, shape in zip(interpreted, shapes, strict=True):
        ref[...] = jnp.zeros(shape, jnp.float32)
    return body(*interpreted)


def accumulate(acc, a, b, interpreted, *, wait=0):
    """acc += a @ b, with a in registers or shared memory and b in shared memory; `wait` products may be in flight."""
    if interpreted is None:
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(wait)
        return
    a, b = a[...].astype(jnp.float32), b[...].astype(jnp.float32)
    acc[...] = acc[...] + jnp.dot(a, b)
    # An ordinary read is ordered before the copy that reuses its memory only by a fence; a wgmma's is by its wait.
    plgpu.commit_smem()


def scores(a, b, interpreted):
    """float32 a @ b^T of two operands of as many columns, both in shared memory."""

    def product(acc):
        accumulate(acc, a, b.T, interpreted)
        return acc[...]

    return with_accumulators(product, [(a.shape[0], b.shape[0])], interpreted)


def split(x):
    """Two bfloat16 arrays that add up to x, but for 2^-17 of each entry."""
    # Cut off rather than rounded: a conversion and back would take as long as the exponential.
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << 16))
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)
