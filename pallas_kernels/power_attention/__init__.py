"""Quadratic power attention on Hopper GPUs: fused causal kernels, forward and backward."""

import jax
import jax.numpy as jnp

from pallas_kernels.power_attention import (
    blocks,
    configs,
    decays,
    forward,
    key_vjp,
    query_vjp,
    sequence,
    units,
    vjp_operands,
)

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
    save_residuals: bool = True,
    interpret=None,
) -> dict[str, jax.Array]:
    """Returns means of values weighted by exp(G_i - G_j) (q_i . k_j)^p over j <= i, and the sums of the weights.

    G is the running sum of log_decay. A mean is zero if no weight is positive.

    Products take 16-bit operands and accumulate in float32. Scores are exact to float32. Weights and decayed values are
    rounded to float16 (11 bits), with a scale per block, or from p = 8 on per row, that keeps them in range. Not
    differentiable.

    Args:
        query: [B, T, N, D], bfloat16 or float16; N is a multiple of K. D up to 128.
        key: [B, S, K, D]; S >= T, the queries being the last T of S tokens.
        value: [B, S, K, E], E up to 128.
        power: p, even.
        log_decay: [B, S, K], at most 0; a token's decay discounts earlier tokens.
        segment_ids: [B, S]; a document starts where the id changes; negative ids are padding.
        save_residuals: whether to return what `power_attention_vjp` needs.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
        `out`, the means [B, T, N, E] in the values' dtype. If `save_residuals`, also `remainder`, what rounding took
        from them, in bfloat16, and with T and S padded to whole blocks: `weight_sum` [B, N, T], float32, and
        `weight_exponent`, int32, so that sums of weights are 2^weight_exponent weight_sum; `unit_query` and `unit_key`,
        float16, and the exponents of lengths that were taken out of them, `query_exponent` [B, N, T] and `key_exponent`
        [B, K, S].

    Raises:
        NotImplementedError: for unsupported requests, naming the constraint.

    Source: "Symmetric Power Transformers" (Buckman, Gelada, Zhang 2024) for the weights, FlashAttention-3 (Shah et al.
    2024) for the order of work within a thread block.
    """
    config = configs.choose(
        head_dim=query.shape[-1], value_dim=value.shape[-1], power=power, dtype=query.dtype
    )
    tokens = sequence.whole_blocks(
        query, key, value, log_decay=log_decay, segment_ids=segment_ids, config=config
    )
    unit_query, unit_key, query_exponent, key_exponent = units.unit_lengths(
        tokens.query, tokens.key, configs.query_bits(power), interpret=interpret
    )
    call = configs.Call(power=power, config=config, interpret=interpret)
    of_blocks = blocks.prepare(key_exponent, tokens.value, tokens.log_decay, call)
    first = None
    if segment_ids is not None:
        first, _ = sequence.visible_blocks(tokens.log_decay)
        first = first[..., first.shape[-1] - tokens.query.shape[1] // configs.BLOCK :]
    operands = forward.Operands(unit_query, unit_key, query_exponent, first)
    results = forward.means(operands, of_blocks, dtype=value.dtype, save_residuals=save_residuals, call=call)
    for name in ("out", "remainder") if save_residuals else ("out",):
        results[name] = results[name][:, : query.shape[1], :, : value.shape[-1]]
    if not save_residuals:
        return results
    saved = {"unit_query": unit_query, "query_exponent": query_exponent}
    return results | saved | {"unit_key": unit_key, "key_exponent": key_exponent}


def power_attention_vjp(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dout: jax.Array,
    *,
    saved: dict[str, jax.Array],
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

    Products are of float16 with float32 sums. Weights and the gradients of scores are rounded to 11 bits, with scales
    that keep them in range. Other operands are exact unless they are too small to be normal in float16. Queries whose
    weights are all zero have a gradient of zero.

    Args:
        query: [B, T, N, D]; query, key and value are the arguments of `power_attention`.
        key: [B, S, K, D].
        value: [B, S, K, E].
        dout: [B, T, N, E], the cotangent of the mean; it is rounded to the mean's dtype.
        saved: results of `power_attention` with `save_residuals`.
        power: p, as in `power_attention`.
        log_decay: [B, S, K], as in `power_attention`.
        segment_ids: [B, S], as in `power_attention`.
        interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
        Gradients of query, key, value, in their dtypes, and of log_decay, float32, or None if log_decay is None.

    Raises:
        NotImplementedError: for unsupported requests, naming the constraint.
    """
    config = configs.choose(
        head_dim=query.shape[-1], value_dim=value.shape[-1], power=power, dtype=query.dtype
    )
    call = configs.Call(power=power, config=config, interpret=interpret)
    tokens = sequence.whole_blocks(
        query, key, value, log_decay=log_decay, segment_ids=segment_ids, config=config
    )
    operands = vjp_operands.prepare(tokens, dout, saved, segment_ids, call)
    # The real keys, after the padding in front.
    positions = slice(tokens.front, tokens.front + key.shape[1])
    dquery, delta = query_vjp.query_vjp(operands, time=query.shape[1], dtype=query.dtype, call=call)
    operands = operands._replace(delta=delta)
    dkey, dvalue, dlog = key_vjp.key_vjp(operands, positions=positions, dtype=key.dtype, call=call)
    dquery, dkey, dvalue = (
        x[..., : like.shape[-1]] for x, like in ((dquery, query), (dkey, key), (dvalue, value))
    )
    if log_decay is None:
        return dquery, dkey, dvalue, None
    ddecay = decays.log_decay_vjp(dlog, interpret=interpret)[:, positions]
    if segment_ids is not None:
        ddecay = jnp.where(sequence.within_documents(segment_ids)[..., None], ddecay, 0)
    return dquery, dkey, dvalue, ddecay
