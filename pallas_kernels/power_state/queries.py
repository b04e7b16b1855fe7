"""Sums of a block of query rows over their in-window keys, and the final store: the same for every power."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import tensor_core
from pallas_kernels.power_state import window_keys

__all__ = ["read_keys", "store_mean"]


def read_keys(core, acc, query_smem, keys: window_keys.Keys, denominator, warpgroup, power):
    """Adds the weighted values of in-window keys to acc; returns the denominator with the keys' weights added.

    `power` is a power of two.
    """

    def step(total, key_smem, value_smem, decays):
        scores = core.product(query_smem, key_smem)
        for _ in range(power.bit_length() - 1):
            scores = scores * scores
        weights = decays.of_rows(scores) * decays.of_pairs(0, scores.shape[1])
        for part in tensor_core.split(weights):
            core.add(acc, part, value_smem)
        return total + weights.sum(1)

    return keys.fold(step, denominator, warpgroup)


def store_mean(acc, total, out_smem, out):
    """Writes acc / total through shared memory: zero where the total is not positive, NaN where it is NaN."""
    total = lax.broadcast_in_dim(total, acc.shape, [0])
    none = total <= 0
    mean = jnp.where(none, 0.0, acc[...] / jnp.where(none, 1.0, total))
    out_smem[...] = mean.astype(out_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out)
    plgpu.wait_smem_to_gmem(0)
