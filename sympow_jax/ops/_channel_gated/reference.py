"""Power attention with a decay for every value channel, as its formula is written: slow, plain, right in float64."""

import jax.numpy as jnp

from sympow_jax.ops._power import mean as means
from sympow_jax.ops._power import reference
from sympow_jax.ops._power import state as power_state

__all__ = ["attention"]


def attention(query, key, value, log_decay, *, power, segment_ids):
    """Y_ie = sum_j B_ije V_je / sum_j B_ije with B_ije = b_ije (Q_i . K_j)^p and b_ije = prod_{j < m <= i} gamma_me.

    Section 3.1 of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025) with a gate for
    every channel e, which that paper leaves to future work.
    """
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    sequence = power_state.Sequence.join(key, value, log_decay, segment_ids, None, dtype)
    batch, time, kv_heads, channels = value.shape
    document, steps = sequence.document, jnp.arange(time)
    seen = (document[:, :, None] == document[:, None, :]) & (steps[:, None] >= steps)
    seen &= sequence.valid[:, :, None] & sequence.valid[:, None, :]

    between = reference.sums_between(sequence.log_decay.reshape(batch, time, -1))
    between = between.reshape(batch, kv_heads, channels, time, time)
    decay_BKETX = jnp.where(seen[:, None, None], jnp.exp(between), 0)
    q_BKGTD = reference.group_heads(query.astype(dtype), kv_heads)
    key, value = sequence.key.astype(dtype), sequence.value.astype(dtype)
    scores = jnp.einsum("bkgtd,bxkd->bkgtx", q_BKGTD, key, precision="highest")
    weights_BKGETX = decay_BKETX[:, :, None] * (scores**power)[:, :, :, None]
    numerator = jnp.einsum("bkgetx,bxke->bkgte", weights_BKGETX, value, precision="highest")
    denominator = jnp.moveaxis(weights_BKGETX.sum(-1), 3, 4)
    out = means.mean(numerator[..., None], denominator[..., None], -1)[..., 0]
    return reference.ungroup_heads(out).astype(query.dtype)
