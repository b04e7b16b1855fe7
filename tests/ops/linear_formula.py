"""The formula of linear attention over T x T pairs, and a rotation by position, for tests."""

import jax
import jax.numpy as jnp

from sympow_jax.ops import feature_maps

MAPS = {
    "elu": lambda x, power: feature_maps.elu_plus_one(x),
    "relu": lambda x, power: jnp.maximum(x, 0),
    "identity": lambda x, power: x,
    "symmetric": feature_maps.symmetric_power,
    "tensor": feature_maps.tensor_power,
}


def attention(
    query,
    key,
    value,
    *,
    feature_map="elu",
    power=2,
    rotate=None,
    normalizer="unrotated",
    causal=True,
    log_decay=None,
    segment_ids=None,
):
    """Computes sum_j b_ij rotate(phi_i) . rotate(phi_j) v_j / sum_j b_ij phi_i . phi_j.

    It is zero if the divisor is zero. A document is a run of equal ids, across padding between them.
    """
    batch, time, heads, _ = query.shape
    group = heads // key.shape[2]
    query, key = MAPS[feature_map](query, power), MAPS[feature_map](key, power)
    rotated = (query, key) if rotate is None else (rotate(query), rotate(key))
    if normalizer == "rotated":
        query, key = rotated
    seen = same_document(batch, time, segment_ids)
    decay = jnp.ones((batch, time, time, heads))
    if causal:
        seen &= jnp.tri(time, dtype=bool)
    if log_decay is not None:
        steps = jnp.arange(time)
        if segment_ids is not None:
            log_decay = jnp.where((segment_ids >= 0)[..., None], log_decay, 0)
        between = (steps[:, None] > steps)[None, :, :, None] * log_decay[:, :, None]
        decay = jnp.repeat(jnp.exp(jnp.cumsum(between, 1)), group, 3)
    decay = jnp.where(seen[..., None], decay, 0)

    def weights(query, key):
        return decay * jnp.einsum("btnf,bsnf->btsn", query, jnp.repeat(key, group, 2), precision="highest")

    numerator = jnp.einsum(
        "btsn,bsne->btne", weights(*rotated), jnp.repeat(value, group, 2), precision="highest"
    )
    denominator = weights(query, key).sum(2)[..., None]
    some = denominator != 0
    return jnp.where(some, numerator / jnp.where(some, denominator, 1), 0)


def same_document(batch, time, segment_ids):
    """Returns a mask of the pairs within one document, [B, T, T]; a loop, so that it can be checked by inspection."""
    if segment_ids is None:
        return jnp.ones((batch, time, time), bool)

    def step(carry, ids):
        current, count = carry
        count = count + ((ids >= 0) & (ids != current))
        return (jnp.where(ids >= 0, ids, current), count), jnp.where(ids >= 0, count, -1)

    start = jnp.full(batch, -1, segment_ids.dtype), jnp.zeros(batch, int)
    document = jax.lax.scan(step, start, jnp.asarray(segment_ids).T)[1].T
    return (document[:, :, None] == document[:, None]) & (document >= 0)[:, :, None]


def rotation(positions=None, *, rate=0.1, doubled=False):
    """Returns a `rotate` that rotates the two halves of features by position times rate.

    positions: [S]; None counts from 0. Queries are the last of them. doubled: multiplies every feature by (cos, sin)
    instead.
    """

    def rotate(x):
        steps = jnp.arange(x.shape[1]) if positions is None else positions[-x.shape[1] :]
        width = x.shape[-1] if doubled else x.shape[-1] // 2
        angles = rate * steps[:, None] / (1 + jnp.arange(width))
        cos, sin = (f(angles).astype(x.dtype)[:, None] for f in (jnp.cos, jnp.sin))
        if doubled:
            return jnp.concatenate([x * cos, x * sin], -1)
        first, second, rest = x[..., :width], x[..., width : 2 * width], x[..., 2 * width :]
        return jnp.concatenate([first * cos - second * sin, first * sin + second * cos, rest], -1)

    return rotate
