"""The launch of a query kernel, its sums over the keys seen exactly, and its final store: the same for every power."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import products, results
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import near

__all__ = ["launch", "read_keys", "store_mean"]

_BLOCK = configs.BLOCK


def launch(body, arrays, scratch, *, key, value, config, chunk, exact_window, batch_time, name, interpret):
    """Runs `body` for blocks of rows of every query; returns means of values [B, T, N, E] and sums of weights [HN, X].

    arrays: the kernel's inputs, the first with HN and X as leading axes; scratch: its shared memory; batch_time: B and
    T. A block has a warpgroup for each of `query_blocks` blocks of 64 rows, and one that copies.
    """
    heads, time = arrays[0].shape[:2]
    value_dim, count = value.shape[-1], config.query_blocks
    if interpret is not None:
        shapes = ((_BLOCK, value_dim), (_BLOCK, _BLOCK))
        scratch["interpreted"] = [plgpu.SMEM((count, *shape), jnp.float32) for shape in shapes]
    body = functools.partial(
        body, config=config, chunk=chunk, exact_window=exact_window, groups=heads // key.shape[0]
    )
    out, denominator = plgpu.kernel(
        body,
        out_type=(
            results.kind(batch_time, heads, value_dim, value.dtype),
            jax.ShapeDtypeStruct((heads, time), jnp.float32),
        ),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=(heads, time // chunk, chunk // (count * _BLOCK)),
        grid_names=("head", "chunk", "rows"),
        num_threads=count + 1,
        thread_name="warpgroup",
        kernel_name=name,
        interpret=interpret,
    )(*arrays)
    return results.cut(out, batch_time), denominator


def read_keys(acc, own, smem, denominator, block, end, config, exact_window, interpreted, power=2, first=0):
    """Adds the exact part to acc; returns the denominator with the keys' weights added.

    `block`, `end` and `first` as in `near.fold`. `power` is a power of two.
    """

    def step(total, key_smem, value_smem, between):
        scores = products.scores(own["query_smem"], key_smem, interpreted)
        for _ in range(power.bit_length() - 1):
            scores = scores * scores
        weights = scores * jnp.exp2(between())
        for part in products.split(weights):
            products.accumulate(acc, part, value_smem, interpreted)
        return total + weights.sum(1)

    return near.fold(step, denominator, smem, block, end, config, exact_window, first)


def store_mean(acc, total, out_smem, out):
    """Writes acc / total through shared memory: zero where the total is not positive, NaN where it is NaN."""
    total = lax.broadcast_in_dim(total, acc.shape, [0])
    none = total <= 0
    mean = jnp.where(none, 0.0, acc[...] / jnp.where(none, 1.0, total))
    out_smem[...] = mean.astype(out_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out)
    plgpu.wait_smem_to_gmem(0)
