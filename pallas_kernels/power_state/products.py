"""Matrix products of the tensor core, compiled or interpreted.

Interpretation knows no accumulator that can be written and no operand in registers. There an accumulator is a piece of
shared memory, and a product an ordinary one, of the same 16-bit operands added up in float32.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["accumulate", "operand", "with_accumulators"]


def operand(lead, rows, columns, dtype):
    """A 16-bit array in shared memory, `lead` times [rows, columns], as the tensor core reads it."""
    swizzle = plgpu.find_swizzle(columns * jnp.dtype(dtype).itemsize * 8)
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
