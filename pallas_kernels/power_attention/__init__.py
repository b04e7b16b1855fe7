"""Quadratic power attention on Hopper GPUs: one fused causal kernel."""

import jax
import jax.numpy as jnp

from pallas_kernels import numerics
from pallas_kernels.power_attention import config as configs
from pallas_kernels.power_attention import forward, operands

__all__ = ["choose", "power_attention"]

choose = configs.choose


def power_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    power: int,
    log_decay: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums of values weighted by exp(G_i - G_j) (q_i . k_j)^p over j <= i, and of the weights, not divided.

    G is the running sum of log_decay. Returns (numerator, denominator, exponent): the true sums are
    2^exponent times these, and the weighted mean of values is numerator / denominator. Sums over other keys
    of the same queries, from another chunk or device, may be added once both have one exponent.

    Products are of 16 bits with float32 sums. Scores are exact to float32; weights and decayed values are rounded to
    float16 (11 bits), each in a unit of its own block that keeps it in range. Not differentiable.

    Args:
        query: [B, T, N, D], bfloat16 or float16; N is a multiple of K. D up to 128.
        key: [B, S, K, D]; S >= T, the queries being the last T of S tokens.
        value: [B, S, K, E], E up to 128.
        power: p, even.
        log_decay: [B, S, K], at most 0; a token's decay discounts what came before it.
        segment_ids: [B, S]; a document starts where the id changes; negative ids are padding.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
        numerator [B, T, N, E] and denominator [B, T, N], float32, and exponent [B, T, N], int32.

    Raises:
        NotImplementedError: for what the kernel cannot do, naming the constraint.

    Source: "Symmetric Power Transformers" (Buckman, Gelada, Zhang 2024) for the weights, FlashAttention-3 (Shah et
    al. 2024) for the order of work within a thread block.
    """
    config = configs.choose(
        head_dim=query.shape[-1], value_dim=value.shape[-1], power=power, dtype=query.dtype
    )
    prepared, exponents = operands.prepare(
        query, key, value, power=power, log_decay=log_decay, segment_ids=segment_ids, config=config
    )
    numerator, denominator = forward.sums(prepared, power=power, config=config, interpret=interpret)
    time, group = query.shape[1], query.shape[2] // key.shape[2]
    unit = jnp.repeat(exponents.value, group, axis=1)[:, None, :, None]
    numerator = numerics.scaled(numerator[:, :time, :, : value.shape[-1]], unit)
    return numerator, jnp.moveaxis(denominator[..., :time], 1, 2), exponents.weight
