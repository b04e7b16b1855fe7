"""Reference implementation of power attention: the formulas of its papers, unoptimized and right in float64.

Equations are those of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025), except that the
caller has already applied rotations to queries and keys. Except for feature maps, it shares no code with the
implementations it checks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Bool, Float, Int
from sympow_jax.ops import decays, feature_maps, layout, means, power_state


class _Tokens(NamedTuple):
    """Tokens in the window of a state, in 2W slots, followed by the new ones.

    document: 0 for the state's document, counting up from there; -1 for empty slots and padding.
    last: the number and the segment id of the last token's document.
    """

    key: Float[Array, "B X K D"]
    value: Float[Array, "B X K E"]
    log_decay: Float[Array, "B X K c"]  # c is 1, or E for decays per value
    document: Int[Array, "B X"]
    last: tuple[Int[Array, " B"], Int[Array, " B"]]

    @property
    def valid(self) -> Bool[Array, "B X"]:
        return self.document >= 0


def attention(plan, arrays, state):
    """Computes Y_i = sum_j B_ij V_j / sum_j B_ij with B_ij = b_ij (Q_i . K_j)^p.

    This is the attention formulation of section 3.1, with b_ij = prod_{j < m <= i} gamma_m. Keys already in `state`
    contribute through their features. There may be more keys than queries, which are the last tokens. With decays
    per value channel, b_ij differs per channel, which the paper leaves to future work.
    """
    time = arrays.query.shape[1]
    tokens = _tokens(plan, arrays, state)
    q_BKGTD = jnp.moveaxis(layout.by_group(arrays.query.astype(plan.dtype), arrays.key.shape[2]), 1, 3)
    document = tokens.document
    visible = (document[:, -time:, None] == document[:, None]) & tokens.valid[:, None]
    steps = jnp.arange(document.shape[1])
    visible &= steps[-time:, None] >= steps

    # Entry (i, j) is the sum of log decays over j < m <= i; each column starts its own sum.
    later = (steps[:, None] > steps)[:, :, None]
    log_BKXc = jnp.moveaxis(tokens.log_decay, 1, 2)
    between_BKTXc = jnp.cumsum(jnp.where(later, log_BKXc[:, :, :, None], 0), 2)[:, :, -time:]
    decay_BKTXc = jnp.where(visible[:, None, :, :, None], jnp.exp(between_BKTXc), 0)
    scores = jnp.einsum("bkgtd,bxkd->bkgtx", q_BKGTD, tokens.key, precision="highest")
    # Sums over keys: of weighted values [B, K, G, T, E] and of weights [B, K, G, T, c].
    weights = (scores**plan.power)[..., None] * decay_BKTXc[:, :, None]
    if weights.shape[-1] == 1:
        numerator = jnp.einsum("bkgtx,bxke->bkgte", weights[..., 0], tokens.value, precision="highest")
    else:
        numerator = jnp.einsum("bkgtxe,bxke->bkgte", weights, tokens.value, precision="highest")
    denominator = weights.sum(4)

    if state is not None:
        features = feature_maps.symmetric_power(q_BKGTD, plan.power)
        in_first = (document == 0)[:, None, -time:, None]
        from_start = jnp.cumsum(log_BKXc, 2)[:, :, -time:]
        decay = jnp.where(in_first, jnp.exp(from_start), 0)[:, :, None]
        kv, norm = state.kv, state.norm if plan.per_channel else state.norm[..., None]
        numerator += decay * jnp.einsum("bkgtf,bkfe->bkgte", features, kv, precision="highest")
        denominator += decay * jnp.einsum("bkgtf,bkfc->bkgtc", features, norm, precision="highest")
    out = _ungrouped(_result(plan, numerator, denominator, arrays.value.dtype))
    return out, _state_after(plan, tokens, state) if plan.return_state else None


def _tokens(plan, arrays, state) -> _Tokens:
    """Returns the window of the state and the new tokens, zero where there is no token."""
    _, key, value, log_decay, segment_ids = arrays
    batch, time, kv_heads, _ = key.shape
    channels = value.shape[-1] if plan.per_channel else 1
    if log_decay is None:
        log_decay = jnp.zeros((batch, time, kv_heads, channels), plan.dtype)
    log_decay = log_decay.reshape(batch, time, kv_heads, channels)
    before = jnp.full(batch, -1, jnp.int32) if state is None else state.segment
    if segment_ids is None:
        # All tokens continue the document of the state.
        before = jnp.where(before < 0, 0, before)
        segment_ids = jnp.broadcast_to(before[:, None], (batch, time))
    # Use the wider dtype of the two: ids that wrapped around could be equal.
    ids_dtype = np.promote_types(segment_ids.dtype, before.dtype)
    segment_ids, before = segment_ids.astype(ids_dtype), before.astype(ids_dtype)
    arrays = [x.astype(plan.dtype) for x in (key, value, log_decay)]
    if state is not None:
        slots = state.keys.shape[1]
        in_use = jnp.arange(slots) < state.length[:, None]
        window_decays = state.log_decays.reshape(batch, slots, kv_heads, channels)
        window = (state.keys, state.values, window_decays)
        arrays = [jnp.concatenate([x.astype(plan.dtype), y], 1) for x, y in zip(window, arrays)]
        window_ids = jnp.where(in_use, before[:, None], -1)
        segment_ids = jnp.concatenate([window_ids, segment_ids], 1)

    def count(carry, segment):
        current, number = carry
        number += (segment >= 0) & (segment != current)
        current = jnp.where(segment >= 0, segment, current)
        return (current, number), jnp.where(segment >= 0, number, -1)

    # Padding changes nothing; any other id that differs from the last one starts a document.
    start = before + jnp.zeros_like(segment_ids[:, 0]), jnp.zeros_like(segment_ids[:, 0])
    (segment, number), document = jax.lax.scan(count, start, segment_ids.T)
    valid = (document.T >= 0)[..., None, None]
    key, value, log_decay = (jnp.where(valid, x, 0) for x in arrays)
    return _Tokens(key, value, log_decay, document.T, (number, segment))


def _state_after(plan, tokens, state):
    """Returns the state after the tokens: the last `exact_window` exactly, the tokens before them as features."""
    number, segment = tokens.last
    of_last = tokens.valid & (tokens.document == number[:, None])
    # Number of tokens of the last document that follow each of its tokens.
    following = jnp.cumsum(of_last[:, ::-1], 1)[:, ::-1] - of_last
    in_window, folded = of_last & (following < plan.exact_window), of_last & (following >= plan.exact_window)
    # Decay from each token to the last folded one; decays of the window are left out.
    log_decay = jnp.where(in_window[..., None, None], 0, tokens.log_decay)
    later_decay = jnp.pad(log_decay[:, 1:], [(0, 0), (0, 1), (0, 0), (0, 0)])
    decay_BXKc = jnp.exp(jnp.cumsum(later_decay[:, ::-1], 1)[:, ::-1])
    decay_BXKc = jnp.where(folded[..., None, None], decay_BXKc, 0)
    features = feature_maps.symmetric_power(tokens.key, plan.power)
    kv = jnp.einsum("bxkf,bxke->bkfe", features, tokens.value * decay_BXKc, precision="highest")
    norm = jnp.einsum("bxkf,bxkc->bkfc", features, decay_BXKc, precision="highest")
    if state is not None:
        old = jnp.where((number == 0)[:, None, None], jnp.exp(log_decay.sum(1)), 0)[:, :, None]
        old_norm = state.norm if plan.per_channel else state.norm[..., None]
        kv, norm = old * state.kv + kv, old * old_norm + norm
    # Slot s holds the s-th token of the window.
    slot = jnp.where(in_window, jnp.cumsum(in_window, 1) - 1, -1)
    chosen = (slot[:, :, None] == jnp.arange(2 * plan.exact_window)).astype(plan.dtype)
    slots = (
        jnp.einsum("bxs,bxkd->bskd", chosen, x, precision="highest")
        for x in (tokens.key, tokens.value, decays.bounded(tokens.log_decay, False))
    )
    keys, values, log_decays = slots
    return power_state.PowerState(
        kv=kv,
        norm=norm if plan.per_channel else norm[..., 0],
        keys=keys,
        values=values,
        log_decays=log_decays if plan.per_channel else log_decays[..., 0],
        length=in_window.sum(1, dtype=jnp.int32),
        segment=segment,
    )


def _result(plan, numerator, denominator, dtype):
    """Returns the mean in the dtype of values.

    Without division it returns the sums, those of weights last, in the dtype of the computation.
    """
    if plan.division is means.Division.NONE:
        return jnp.concatenate([numerator, denominator], -1)
    some = denominator != 0 if plan.division is means.Division.SIGNED else ~(denominator <= 0)
    safe = jnp.where(some, denominator, 1)
    # Divide both by the same constant, which cancels: the gradient of a quotient squares its denominator.
    size = jax.lax.stop_gradient(safe)
    return jnp.where(some, (numerator / size) / (safe / size), 0).astype(dtype)


def _ungrouped(out):
    """Reshapes [B, K, G, X, E] to [B, X, N, E]."""
    batch, kv_heads, group, time, value_dim = out.shape
    return jnp.moveaxis(out, 3, 1).reshape(batch, time, kv_heads * group, value_dim)
