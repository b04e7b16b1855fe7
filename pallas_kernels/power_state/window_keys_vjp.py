"""Gradient of queries through their in-window keys, for a block of 64 rows.

With s_ij = q_i . k_j, gamma_ij the decay from key to row, and for each row its cotangent dO_i and delta_i = dO_i . o_i,

    dq_i den_i = sum_j power gamma_ij s_ij^(power - 1) (dO_i . v_j - delta_i) k_j

over the keys j of the window and of the chunk up to i. Factors of keys are computed in float32 and split into two
bfloat16 operands, like weights in `query_tile.add_keys`.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import tensor_core
from pallas_kernels.power_state import window_keys

__all__ = ["add_keys"]

_SLICE = 16
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)


def add_keys(core, acc, query, dout, keys: window_keys.Keys, delta, warpgroup, power):
    """Adds sum_j x_ij k_j to acc [64, D]; returns sum_j x_ij s_ij, float32 [64].

    x_ij = gamma_ij s_ij^(power-1) (dO_i . v_j - delta_i). acc is thus dq den / power, and the result is the sum over j
    of the gradient with respect to the logarithm of gamma_ij, times den. `power` is at least 2.

    query() [64, D] and dout [64, E]: bfloat16 operands, in shared memory or registers. delta: float32 [64], in the
    layout of sums over columns.
    """

    def step(total, key_smem, value_smem, decays):
        scores, dweights = core.products((query(), key_smem), (dout, value_smem))
        shift = decays.of_rows(delta)
        # A few columns at a time, to save registers.
        highs, lows, sums = [], [], 0.0
        for begin in range(0, key_smem.shape[0], _SLICE):
            s, slope = (x[:, begin : begin + _SLICE] for x in (scores, dweights))
            factor = decays.of_pairs(begin, _SLICE) * s
            for _ in range(power - 2):
                factor = factor * s
            factor = factor * (decays.of_rows(slope) - lax.broadcast_in_dim(shift, s.shape, [0]))
            high, low = tensor_core.split(factor)
            highs.append(high)
            lows.append(low)
            sums += factor * s
        # Straight-line code, so that each operand has its own registers until both products are done.
        core.add(acc, jnp.concatenate(highs, 1), key_smem, wait=1)
        core.add(acc, jnp.concatenate(lows, 1), key_smem)
        return total + sums.sum(1)

    return keys.fold(step, plgpu.layout_cast(jnp.zeros(delta.shape, jnp.float32), _PER_ROW), warpgroup)
