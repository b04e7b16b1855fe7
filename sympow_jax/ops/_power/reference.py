"""Power attention as its papers write it: slow, plain, and right in float64.

Equations are those of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025), except that
rotations have been applied to queries and keys by the caller.
"""

import dataclasses

import jax
import jax.numpy as jnp

from sympow_jax.ops import feature_maps
from sympow_jax.ops._power import mean as means
from sympow_jax.ops._power import state as power_state

__all__ = ["attention", "group_heads", "recurrent", "sums_between", "ungroup_heads"]


def attention(query, key, value, *, power, log_decay, segment_ids, state, window, return_state, division):
    """Y_i = sum_j B_ij V_j / sum_j B_ij with B_ij = b_ij (Q_i . K_j)^p and b_ij = prod_{j < m <= i} gamma_m.

    (Section 3.1, the attention formulation.) Keys that were folded into `state` count through their features.
    `key` may be longer than `query`; the queries are its last tokens.
    """
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    time = query.shape[1]
    sequence = power_state.Sequence.join(key, value, log_decay, segment_ids, state, dtype)
    q_BKGTD = group_heads(query.astype(dtype), key.shape[2])
    key, value = sequence.key.astype(dtype), sequence.value.astype(dtype)

    document = sequence.document
    seen = document[:, -time:, None] == document[:, None, :]
    seen &= sequence.valid[:, -time:, None] & sequence.valid[:, None, :]
    steps = jnp.arange(key.shape[1])
    seen &= steps[-time:, None] >= steps
    decay_BKTX = jnp.where(seen[:, None], jnp.exp(sums_between(sequence.log_decay)[:, :, -time:]), 0)

    scores = jnp.einsum("bkgtd,bxkd->bkgtx", q_BKGTD, key, precision="highest")
    weights = decay_BKTX[:, :, None] * scores**power
    numerator = jnp.einsum("bkgtx,bxke->bkgte", weights, value, precision="highest")
    denominator = weights.sum(-1)

    if state is not None:
        features = feature_maps.symmetric_power(q_BKGTD, power)
        in_first = (sequence.valid & (document == 0))[:, None, -time:]
        from_start = jnp.cumsum(jnp.moveaxis(sequence.log_decay, 1, 2), -1)[..., -time:]
        decay = jnp.where(in_first, jnp.exp(from_start), 0)[:, :, None]
        numerator += decay[..., None] * jnp.einsum(
            "bkgtf,bkfe->bkgte", features, state.kv, precision="highest"
        )
        denominator += decay * jnp.einsum("bkgtf,bkf->bkgt", features, state.norm, precision="highest")
    out = _result(numerator, denominator, value.dtype, division)
    return ungroup_heads(out), _final_state(sequence, state, power, window, dtype) if return_state else None


def _final_state(sequence, state, power, window, dtype):
    """The state behind `sequence`: the last `window` tokens exactly, the tokens before them as features."""
    after = sequence.after
    folded = (after >= window) & (after < jnp.iinfo(after.dtype).max)
    # Decay from each token to the last folded one: all of it but the window's.
    log_decay = jnp.where((after < window)[..., None], 0, sequence.log_decay)
    behind = jnp.pad(log_decay[:, 1:], [(0, 0), (0, 1), (0, 0)])
    decay_BXK = jnp.exp(jnp.cumsum(behind[:, ::-1], 1)[:, ::-1])
    decay_BXK = jnp.where(folded[..., None], decay_BXK, 0)
    features = feature_maps.symmetric_power(sequence.key.astype(dtype), power) * decay_BXK[..., None]
    kv = jnp.einsum("bxkf,bxke->bkfe", features, sequence.value.astype(dtype), precision="highest")
    norm = features.sum(1)
    if state is not None:
        old = jnp.where((sequence.document[:, -1] == 0)[:, None], jnp.exp(log_decay.sum(1)), 0)
        kv, norm = old[..., None, None] * state.kv + kv, old[..., None] * state.norm + norm
    return power_state.PowerState(kv=kv, norm=norm, **power_state.window_of(sequence, window, dtype))


def recurrent(query, key, value, *, power, log_decay, segment_ids, state, window, return_state, division):
    """Equation (2): S_i = gamma_i S_{i-1} + V_i phi(K_i)^T, Z_i likewise, Y_i = S_i phi(Q_i) / Z_i phi(Q_i).

    Everything is folded: no window, and none in the state that comes out.
    """
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    time = query.shape[1]
    sequence = power_state.Sequence.join(key, value, log_decay, segment_ids, state, dtype)
    slots = sequence.key.shape[1] - time
    query = jnp.pad(query.astype(dtype), [(0, 0), (slots, 0), (0, 0), (0, 0)])
    q_BKGXD = group_heads(query, key.shape[2])

    def step(carry, inputs):
        kv, norm = carry
        q, k, v, log_gamma, valid, start = inputs
        gamma = jnp.where(start[:, None], 0, jnp.exp(log_gamma))
        features = jnp.where(valid[:, None, None], feature_maps.symmetric_power(k, power), 0)
        kv = gamma[..., None, None] * kv + features[..., None] * v[..., None, :]
        norm = gamma[..., None] * norm + features
        features = jnp.where(valid[:, None, None, None], feature_maps.symmetric_power(q, power), 0)
        numerator = jnp.einsum("bkgf,bkfe->bkge", features, kv, precision="highest")
        denominator = jnp.einsum("bkgf,bkf->bkg", features, norm, precision="highest")
        return (kv, norm), _result(numerator, denominator, value.dtype, division)

    by_time = (
        jnp.moveaxis(q_BKGXD, 3, 0),
        *(
            jnp.moveaxis(x, 1, 0)
            for x in (
                sequence.key.astype(dtype),
                sequence.value.astype(dtype),
                sequence.log_decay,
                sequence.valid,
                sequence.start,
            )
        ),
    )
    empty = power_state.PowerState.zeros(
        query.shape[0], *key.shape[2:], value.shape[-1], power=power, window=window, dtype=dtype
    )
    start = empty if state is None else state
    # What a loop carries varies over mesh axes as the queries do.
    start = tuple(x + jnp.zeros_like(query, x.dtype, shape=x.shape) for x in (start.kv, start.norm))
    (kv, norm), out = jax.lax.scan(step, start, by_time)
    out = ungroup_heads(jnp.moveaxis(out, 0, 3)[..., -time:, :])
    if not return_state:
        return out, None
    return out, dataclasses.replace(empty, kv=kv, norm=norm, segment=sequence.segment)


def _result(numerator, denominator, dtype, division):
    """The mean in the dtype of values; without division the sums, those of weights last, in their own."""
    if division is means.Division.NONE:
        return jnp.concatenate([numerator, denominator[..., None]], -1)
    return means.mean(numerator, denominator[..., None], -1, division).astype(dtype)


def sums_between(log_decay):
    """[B, X, K] -> [B, K, X, X]: sums of log_decay over j < m <= i at (i, j), each column from its own start."""
    length = log_decay.shape[1]
    steps = jnp.arange(length)
    later = steps[:, None] > steps
    column = jnp.where(later, jnp.moveaxis(log_decay, 1, 2)[..., :, None], 0)
    return jnp.cumsum(column, -2)


def group_heads(query, kv_heads):
    """[B, X, N, D] -> [B, K, G, X, D]."""
    batch, time, heads, head_dim = query.shape
    return jnp.moveaxis(query.reshape(batch, time, kv_heads, heads // kv_heads, head_dim), 1, 3)


def ungroup_heads(out):
    """[B, K, G, X, E] -> [B, X, N, E]."""
    batch, kv_heads, group, time, value_dim = out.shape
    return jnp.moveaxis(out, 3, 1).reshape(batch, time, kv_heads * group, value_dim)
