"""Quadratic power attention on Hopper GPUs: fused causal kernels, forward and backward."""

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import numerics
from pallas_kernels.power_attention import config as configs
from pallas_kernels.power_attention import forward, key_vjp, operands, query_vjp, sequence, vjp_operands

__all__ = ["choose", "power_attention", "power_attention_vjp"]

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
    """Returns sums of values weighted by exp(G_i - G_j) (q_i . k_j)^p over j <= i, and of the weights, undivided.

    G is the running sum of log_decay. Returns (numerator, denominator, exponent): the true sums are 2^exponent times
    these, and the weighted mean of values is numerator / denominator. Sums over other keys of the same queries, from
    another chunk or device, may be added after both are scaled to one exponent.

    Products are of 16 bits with float32 sums. Scores are exact to float32. Weights and decayed values are rounded to
    float16 (11 bits), with a scale per block, or from p = 8 on per row, that keeps them in range. Not differentiable.

    Args:
        query: [B, T, N, D], bfloat16 or float16; N is a multiple of K. D up to 128.
        key: [B, S, K, D]; S >= T, the queries being the last T of S tokens.
        value: [B, S, K, E], E up to 128.
        power: p, even.
        log_decay: [B, S, K], at most 0; a token's decay discounts earlier tokens.
        segment_ids: [B, S]; a document starts where the id changes; negative ids are padding.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
        numerator [B, T, N, E] and denominator [B, T, N], float32, and exponent [B, T, N], int32.

    Raises:
        NotImplementedError: for unsupported requests, naming the constraint.

    Source: "Symmetric Power Transformers" (Buckman, Gelada, Zhang 2024) for the weights, FlashAttention-3 (Shah et al.
    2024) for the order of work within a thread block.
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


def power_attention_vjp(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    denominator: jax.Array,
    exponent: jax.Array,
    dout: jax.Array,
    *,
    power: int,
    log_decay: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    interpret=None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Returns gradients of the weighted mean o_i = sum_j w_ij v_j / sum_j w_ij, by two passes over the pairs.

    With P_ij = w_ij / denominator_i, delta_i = dO_i . o_i and dlog_ij = P_ij (dO_i . v_j - delta_i), the gradient with
    respect to the logarithm of a weight: dq_i = p sum_j dlog_ij k_j / (q_i . k_j), dk_j = p sum_i dlog_ij q_i / (q_i .
    k_j), dv_j = sum_i P_ij dO_i, and the gradient of log_decay_t is the sum of dlog_ij over j < t <= i. Weights are
    recomputed. No sum depends on the order in which thread blocks run.

    Products are of float16 with float32 sums. Operands are exact, except weights, which are rounded to 11 bits with a
    scale that keeps them in range. Queries whose weights are all zero have a gradient of zero.

    Args:
        query: [B, T, N, D]; query, key and value are the arguments of `power_attention`.
        key: [B, S, K, D].
        value: [B, S, K, E].
        out: [B, T, N, E], the numerator over the denominator, zero where the denominator is zero; float32 adds no
            error.
        denominator: [B, T, N], as `power_attention` returned it.
        exponent: [B, T, N], as `power_attention` returned it.
        dout: [B, T, N, E], the cotangent of the mean.
        power: p, as in `power_attention`.
        log_decay: [B, S, K], as in `power_attention`.
        segment_ids: [B, S], as in `power_attention`.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
        Gradients of query, key, value, in their dtypes, and of log_decay, float32, or None if log_decay is None.

    Raises:
        NotImplementedError: for unsupported requests, naming the constraint.
    """
    config = configs.choose_vjp(
        head_dim=query.shape[-1], value_dim=value.shape[-1], power=power, dtype=query.dtype
    )
    arrays = {"log_decay": log_decay, "segment_ids": segment_ids}
    prepared, units, positions = vjp_operands.prepare(
        query, key, value, out, denominator, exponent, dout, power=power, **arrays, config=config
    )
    options = {"power": power, "config": config, "interpret": interpret}
    dquery, query_log = query_vjp.query_vjp(prepared, time=query.shape[1], **options)
    prepared = vjp_operands.corrected(prepared, units, query_log)
    by_key = key_vjp.key_vjp(prepared, positions=positions, **options)
    dquery, dkey, dvalue, ddecay = vjp_operands.gradients(dquery, by_key, units, power=power)
    dquery, dkey = (x[..., : query.shape[-1]].astype(query.dtype) for x in (dquery, dkey))
    dvalue = dvalue[..., : value.shape[-1]].astype(value.dtype)
    if segment_ids is not None:
        ddecay = jnp.where(sequence.within_documents(segment_ids)[..., None], ddecay, 0)
    return dquery, dkey, dvalue, None if log_decay is None else ddecay
