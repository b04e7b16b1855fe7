"""Sizes of each block of 64 cotangents and values, from which the scales of a head's operands follow: one launch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import launch, numerics, results, tensor_core
from pallas_kernels.power_attention import configs, pairs

# Size of a block without a gradient or a value, as an exponent: below those of all others.
NOTHING = -1000
# Where weights are scaled by row, they are at most 2^64 here, so that their products with gradients of weights stay
# finite. Otherwise queries are scaled up as in the forward pass.
_HIGH_WEIGHT_BITS = 64
# Sizes that one load reads, one for each thread.
TOGETHER = 128
# Added to a root's exponent, so that the division is of positive numbers.
_POSITIVE = 1024


class Weights(NamedTuple):
    """Sums of weights, in the scales of the forward pass, and the exponents of lengths that these contain."""

    sum: jax.Array  # float32 [B, N, T]
    exponent: jax.Array  # int32 [B, N, T]
    query_exponent: jax.Array  # int32 [B, N, T]
    longest: jax.Array  # int32 [B, K], of the longest key


class Sizes(NamedTuple):
    """Largest sizes in each of m blocks of queries and n of keys, both rounded up to a multiple of `TOGETHER`.

    Entries after the last block are uninitialized.
    """

    dout: jax.Array  # float32 [B, N, m], an entry of a cotangent
    # int32 [B, N, m], exponent of |dO| / denominator^(1/p), which bounds the gradients by scores
    gradient: jax.Array
    inverse: jax.Array  # int32 [B, N, m], minus the exponent of the smallest denominator
    value: jax.Array  # float32 [B, K, n], an entry of a value
    value_length: jax.Array  # int32 [B, K, n], exponent of a value's length


def bits(power: int) -> int:
    """Returns h: the queries of the gradient kernels are of length 2^h."""
    return _HIGH_WEIGHT_BITS // power if configs.scaled_by_row(power) else configs.query_bits(power)


def denominators(weights, at, kv_head, power):
    """Returns the denominators of a block of queries in the scale of the gradient kernels, inside a kernel.

    Those are of queries of length 2^`bits` and of keys relative to the head's longest one.

    weights: references to `Weights`. at: batch row, head and tokens.
    """
    row, head, tokens = at
    total, exponent, query_exponent = (
        plgpu.load(x.at[row, head, tokens], layout=tensor_core.PER_ROW, optimized=False) for x in weights[:3]
    )
    exponent = exponent - power * (query_exponent - bits(power) + weights.longest[row, kv_head])
    first, second = numerics.factors(exponent)
    return total * first * second


def weighs_nothing(denominator):
    """Returns True for queries without a gradient. A NaN is a weight too: its gradients are NaN, not zero."""
    return denominator < np.finfo(np.float32).tiny


def root(exponent, power):
    """Returns r with x^(1/p) at least 2^r for an x with that exponent."""
    return lax.div(exponent - 1 + _POSITIVE * power, jnp.int32(power)) - _POSITIVE


def length_exponent(tile, size):
    """Returns the exponents of the lengths of a block's rows, whose largest entries are `size`."""
    peak = numerics.normal_exponent(size)
    tile = pairs.scaled(tile, -peak)
    # That of a square root is half of its argument's, rounded up.
    return peak + ((numerics.normal_exponent((tile * tile).sum(1)) + 1) >> 1)


def sizes(dout, value, weights: Weights, *, power: int, interpret=None) -> Sizes:
    """Returns the sizes of dout [B, T, N, E] and value [B, S, K, E], 16-bit, T and S at least a block.

    `dout` may be a block shorter than the weights. Cotangents of queries whose weights are all zero, and rows with NaN
    or infinity, count as zeros.
    """
    batch, _, heads, size = dout.shape
    kv_heads = value.shape[2]
    query_blocks, key_blocks = weights.sum.shape[2] // pairs.BLOCK, value.shape[1] // pairs.BLOCK

    def body(dout, value, *refs):
        weights, found, (smem, full) = Weights(*refs[:4]), Sizes(*refs[4:9]), refs[9:]
        row, block, head = (lax.axis_index(name) for name in ("batch", "block", "head"))

        def load(source, head):
            """Loads a block of rows, and the largest entries of those that are finite."""
            begin = block * pairs.BLOCK
            plgpu.copy_gmem_to_smem(results.block(source, row * source.shape[2] + head, begin), smem, full)
            plgpu.barrier_wait(full)
            tile = plgpu.load(smem, layout=pairs.LAYOUT).astype(jnp.float32)
            size = jnp.abs(tile).max(1)
            return tile, jnp.where(size < jnp.inf, size, 0.0)

        def largest(chosen, exponent):
            return jnp.where(chosen, exponent, NOTHING).max()

        @pl.when((head < heads) & (block < query_blocks))
        def _cotangents():
            tile, size = load(dout, head)
            at = row, head, pl.ds(block * pairs.BLOCK, pairs.BLOCK)
            denominator = denominators(weights, at, lax.div(head, jnp.int32(heads // kv_heads)), power)
            size = jnp.where(weighs_nothing(denominator), 0.0, size)
            exponent = numerics.normal_exponent(denominator)
            gradient = length_exponent(tile, size) - root(exponent, power)
            found.dout[row, head, block] = size.max()
            found.gradient[row, head, block] = largest(size > 0, gradient)
            found.inverse[row, head, block] = largest(size > 0, -exponent)

        @pl.when((head >= heads) & (block < key_blocks))
        def _values():
            own = head - heads
            tile, size = load(value, own)
            found.value[row, own, block] = size.max()
            found.value_length[row, own, block] = largest(size > 0, length_exponent(tile, size))

    def vector(heads, blocks, dtype):
        return jax.ShapeDtypeStruct((batch, heads, -(-blocks // TOGETHER) * TOGETHER), dtype)

    return Sizes(
        *plgpu.kernel(
            body,
            out_type=(
                vector(heads, query_blocks, jnp.float32),
                vector(heads, query_blocks, jnp.int32),
                vector(heads, query_blocks, jnp.int32),
                vector(kv_heads, key_blocks, jnp.float32),
                vector(kv_heads, key_blocks, jnp.int32),
            ),
            scratch_types=[tensor_core.operand((), pairs.BLOCK, size, dout.dtype), plgpu.Barrier()],
            grid=(batch, max(query_blocks, key_blocks), heads + kv_heads),
            grid_names=("batch", "block", "head"),
            kernel_name="power_attention_vjp_sizes",
            **launch.interpreted(interpret),
        )(dout, value, *weights)
    )
