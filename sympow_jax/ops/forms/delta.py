"""The delta rule on features of even powers, in chunks.

A token i replaces what the state S returns for its key k_i, by a part beta_i of the difference from its value v_i:

    u_i = beta_i (v_i - gamma_i phi(k_i)^T S_(i-1)),    S_i = gamma_i S_(i-1) + phi(k_i) u_i^T,    o_i = phi(q_i)^T S_i

Within a chunk no features are needed, because phi(k_i)^T phi(k_j) = (k_i . k_j)^p. With the decays b_ij between tokens,
A_ij = b_ij (k_i . k_j)^p for j < i, and what the chunk's keys read from the state before it, decayed, as rows of R,

    U = (I + diag(beta) A)^-1 diag(beta) (V - R),

which is one triangular solve. Reads and the state then are those of power attention without a denominator, with U in
place of V. Source: "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (Yang et al. 2024),
with decays as in "Gated Delta Networks" (Yang et al. 2025); both have p = 1.
"""

import functools

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Float
from sympow_jax.ops import decays, feature_maps, layout

__all__ = ["attend"]


def attend(
    power: int,
    chunk: int,
    query: Float[Array, "B X N D"],
    key: Float[Array, "B X K D"],
    value: Float[Array, "B X K E"],
    delta: Float[Array, "B X K"],
    log_decay: Float[Array, "B X K"],
    kv: Float[Array, "B K F E"] | None,
    *,
    return_state: bool,
) -> tuple[Float[Array, "B X N E"], Float[Array, "B K F E"] | None]:
    """Returns the outputs and the state after the last token.

    Args:
        power: p, even.
        chunk: tokens per chunk. One chunk for all tokens, without a state, needs no features.
        query: of unit length, or zero.
        key: of unit length, or zero.
        value: V.
        delta: beta, zero for tokens that write nothing.
        log_decay: as `decays.bounded` returns it.
        kv: the state before the first token; None for zeros.
        return_state: whether to return the state.
    """
    kv_heads, time = key.shape[2], key.shape[1]
    has_state = kv is not None or return_state or chunk < time

    def chunks(x):
        """Returns [J, B, K, ..., C], with zeros at the end."""
        x = jnp.pad(x, [(0, 0), (0, -time % chunk)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
        return jnp.moveaxis(x, (1, 2), (0, -1))

    arrays = [chunks(x) for x in (layout.by_group(query, kv_heads), key, value, delta, log_decay)]
    if has_state and kv is None:
        features = feature_maps.symmetric_power_dim(key.shape[3], power)
        shape = (key.shape[0], kv_heads, features, value.shape[3])
        kv = jnp.zeros_like(value, shape=shape)
    body = jax.checkpoint(functools.partial(_chunk, power))
    kv, out = jax.lax.scan(body, kv, arrays)
    # [J, B, K, G, E, C] to [B, X, N, E].
    out = jnp.moveaxis(out, (0, -1), (1, 2)).reshape(query.shape[0], -1, *query.shape[2:3], value.shape[3])
    return out[:, :time], kv


def _chunk(power, kv, arrays):
    query, key, value, delta, log_decay = arrays
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    coarse, fine = decays.split(log_decay)
    tokens = jnp.arange(log_decay.shape[-1])
    visible = tokens[:, None] >= tokens
    within = decays.within(
        (coarse[..., :, None], fine[..., :, None]), (coarse[..., None, :], fine[..., None, :]), visible
    )
    own = within * product("bkdi,bkdj->bkij", key, key) ** power
    reads, wanted = None, value
    if kv is not None:
        from_start = decays.exp(coarse + fine)
        key_features, query_features = (
            feature_maps.symmetric_power(jnp.moveaxis(x, -2, -1), power) for x in (key, query)
        )
        wanted = value - from_start[:, :, None] * product("bkif,bkfe->bkei", key_features, kv)
        reads = from_start[:, :, None, None] * product("bkgif,bkfe->bkgei", query_features, kv)
    # Row i of the solution has the corrected value of token i.
    corrected = jax.lax.linalg.triangular_solve(
        delta[..., None] * jnp.where(tokens[:, None] > tokens, own, 0)
        + jnp.eye(len(tokens), dtype=own.dtype),
        jnp.moveaxis(delta[:, :, None] * wanted, -2, -1),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    weights = within[:, :, None] * product("bkgdi,bkdj->bkgij", query, key) ** power
    out = product("bkgij,bkje->bkgei", weights, corrected)
    if kv is not None:
        out = out + reads
        to_end = decays.exp(decays.sums_after(log_decay))[..., None]
        across = decays.exp(log_decay.sum(-1))[..., None, None]
        kv = across * kv + product("bkif,bkie->bkfe", key_features * to_end, corrected)
    return kv, out
