"""The gradient with respect to queries through the keys that they meet exactly, for a block of 64 rows.

With s_ij = q_i . k_j, gamma_ij the decay from key to row, and for each row its cotangent dO_i and delta_i = dO_i . o_i,

    dq_i den_i = sum_j power gamma_ij s_ij^(power - 1) (dO_i . v_j - delta_i) k_j

over the keys j of the window and of the chunk up to i. Factors of keys are computed in float32 and split into two
bfloat16 operands, as weights are in `query`.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.power_state import near, products

__all__ = ["read_keys"]

_ROWS = plgpu.Layout.WGMMA.reduce(1)


def read_keys(acc, own, smem, delta, block, end, config, window, interpreted, power=2, first=0):
    """acc [64, D] += sum_j x_ij k_j; returns float32 [64], sum_j x_ij s_ij, x_ij = gamma s^(power-1) (dO . v - delta).

    acc is thus dq den / power, and what is returned is the sum over j of the gradient with respect to the logarithm of
    gamma_ij, times den. `power` is at least 2.

    own: `query_smem` [64, D] and `dout_smem` [64, E], bfloat16 operands. smem: `key_smem` and `value_smem`, operands of
    `config.key_stages` blocks of 64, `key_full`, `key_free` and `decay_smem`, as in `query`. delta: float32 [64], in
    the layout of sums over columns. `block`, `end` and `first` as in `near.fold`. interpreted: two float32 [64, 64] in
    shared memory, or None.
    """

    def step(total, key_smem, value_smem, between):
        def pairs(scores, dweights):
            products.accumulate(scores, own["query_smem"], key_smem.T, interpreted, wait=1)
            products.accumulate(dweights, own["dout_smem"], value_smem.T, interpreted)
            return scores[...], dweights[...]

        shape = own["query_smem"].shape[0], key_smem.shape[0]
        scores, dweights = products.with_accumulators(pairs, [shape] * 2, interpreted)
        factor = jnp.exp2(between()) * scores
        for _ in range(power - 2):
            factor = factor * scores
        factor = factor * (dweights - lax.broadcast_in_dim(delta, shape, [0]))
        high, low = products.split(factor)
        # Straight-line code, so that each operand has its own registers until both products are done.
        products.accumulate(acc, high, key_smem, interpreted, wait=1)
        products.accumulate(acc, low, key_smem, interpreted)
        return total + (factor * scores).sum(1)

    return near.fold(
        step,
        plgpu.layout_cast(jnp.zeros(delta.shape, jnp.float32), _ROWS),
        smem,
        block,
        end,
        config,
        window,
        first,
    )
