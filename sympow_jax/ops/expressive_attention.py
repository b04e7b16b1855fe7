"""Expressive attention: weights z^2 / (1 + z^2) of scores z, which are zero for orthogonal queries and keys.

"Reorganizing attention-space geometry with expressive attention" (Gros 2024), equation 2.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops import containment, cost, decays, documents, pairwise, sharding, time_axis
from sympow_jax.ops.forms import expressive
from sympow_jax.ops.tokens import SEQUENCE, Tokens

_UNSEEN = -2  # document number of masked keys; padding queries have -1


def expressive_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K E"],
    *,
    log_decay: Float[Array, "B S K"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    causal: bool = True,
    scale: float = 1.0,
    block_size: int = 256,
    axis_name: str | None = None,
) -> Float[Array, "B T N E"]:
    """Computes Y_i = sum_j A_ij V_j / sum_j A_ij with A_ij = exp(G_i - G_j) z_ij^2 / (1 + z_ij^2).

    Scores are z_ij = scale Q_i . K_j, and G is the running sum of log_decay. If `causal`, j <= i. If all weights of a
    row are zero, its output and gradients are zero. Computed in float32, or in float64 for float64 queries; the output
    has the dtype of `value`.

    Scores may have any size. In float32 the weights follow the formula for all finite z, and so do their derivatives, 2
    z / (1 + z^2)^2, up to |z| = 1e11, beyond which they vanish. A row whose weights are all tiny is averaged like any
    other, if the largest |z| exp((G_i - G_j) / 2) is above 1.2e-38. Below that the row counts as zero. Weights below
    1e-38 of the row's largest and decays of more than 174 nats also count as zero. The effect of rounding z is relative
    to z: at large z, gradients are dominated by the smallest scores, which may be sums that cancel.

    Only approximations have a recurrent form. For |z| < 1, z^2 / (1 + z^2) = z^2 - z^4 + z^6 - .... Each of these even
    powers has a finite state, that of `power_attention` with p = 2, 4, 6, .... The series diverges for |z| >= 1 and has
    no finite state, so decoding needs a KV cache. For small z the first term dominates, which is `power_attention` with
    p = 2; for large z all keys have equal weight.

    Args:
        query: the last T of S positions; N is a multiple of K.
        key: S >= T.
        value: E may differ from D.
        log_decay: natural logarithm of a decay, at most 0, of which G is the running sum. A token's own decay does not
            discount its own key.
        segment_ids: documents, as in `ops.documents`. No query attends across a boundary. Padding outputs zero, is
            masked as a key and does not decay.
        causal: if False, attention is bidirectional within a document, and log_decay must be None.
        scale: factor of the scores, a finite number. It affects the result. To learn one, multiply the query by it.
        block_size: queries and keys per block. Changes only speed and memory. Blocks above the diagonal and those of
            other documents are skipped, and blocks are recomputed in the backward pass, so memory is linear in S.
        axis_name: a manual mesh axis of a `jax.shard_map` over which time is sharded in order. Arguments and output are
            this device's shard, of equal length on all devices. Each device computes a part of the heads over the whole
            time axis. The numbers of keys and queries must be equal.

    Raises:
        ValueError: for shapes or options that do not match each other.
        NotImplementedError: for a KV cache if time is sharded.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> query, key, value = jnp.ones((3, 1, 32, 4, 16))  # [B, T, N, D]
        >>> ops.expressive_attention(query, key, value).shape
        (1, 32, 4, 16)
    """
    if scale is None:
        raise ValueError("scale is None; it must be a number, since it affects the result")
    tokens = Tokens.of(query, key, value, log_decay, segment_ids)
    plan = pairwise.prepare(
        tokens,
        causal=causal,
        scale=scale,
        block_size=block_size,
        axis_name=axis_name,
    )
    return _call(plan, tokens=tokens)


@sharding.op({"tokens": SEQUENCE}, lambda plan: "B T N E")
def _call(plan, tokens):
    def attend(tokens):
        finite = containment.remove(tokens, causal=plan.causal)
        return containment.restore(_blockwise(plan, finite.tokens), finite)

    with jax.named_scope("expressive_xla"):
        return time_axis.by_heads(attend, tokens, plan.axis_name)


def _blockwise(plan, tokens):
    query, key, value, log_decay, segment_ids = tokens
    batch, time, heads, _ = query.shape
    key_time, kv_heads = key.shape[1:3]
    dtype, out_dtype = np.promote_types(query.dtype, jnp.float32), value.dtype
    settings = expressive.Settings(plan.causal, cost.precision_of(key.dtype))
    # Queries are padded at their end, unless one block holds them all. Keys are also padded at their start, so that
    # the last blocks of both end together.
    block = min(plan.block_size, key_time)
    rows = min(block, time)
    tail = -time % rows
    front = -(key_time + tail) % block

    def blocks(x, front, length):
        x = jnp.pad(x, [(0, 0), (front, tail)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, -1, length, *x.shape[2:]), 1, 0)  # [J, B, C, ...]

    def by_head(x):
        x = blocks(x, front, block)
        return jnp.moveaxis(x, 2, -1).reshape(len(x), batch * kv_heads, -1, block)

    query = plan.scale * query.astype(dtype)
    queries = blocks(query.reshape(batch, time, kv_heads, heads // kv_heads, -1), 0, rows)
    queries = queries.transpose(0, 1, 3, 5, 4, 2)  # [I, B, K, D, G, R]
    queries = queries.reshape(len(queries), batch * kv_heads, *queries.shape[3:])
    keys, values = by_head(key.astype(dtype)), by_head(value.astype(dtype))
    half_decay = query_document = key_document = document = None
    if segment_ids is not None:
        document = documents.numbered(segment_ids)
        of_head = by_head(jnp.broadcast_to(document[..., None], (batch, key_time, kv_heads)))[:, :, 0]
        query_document = of_head[-len(queries) :, :, -rows:]
        key_document = jnp.where(of_head < 0, _UNSEEN, of_head)
    if log_decay is not None:
        if segment_ids is not None:
            log_decay = jnp.where(document[..., None] >= 0, log_decay, 0)
        half_decay = by_head(decays.bounded(log_decay.astype(dtype) / 2, False))[:, :, 0]
    ranges = _ranges(
        plan.causal,
        None if document is None else blocks(document, front, block),
        len(queries),
        rows,
        len(keys),
    )
    out, *_ = expressive.attend(
        settings,
        expressive.Blocks(queries, keys, values, half_decay, query_document, key_document, ranges),
    )
    out = out.reshape(len(out), batch, kv_heads, -1, heads // kv_heads, rows).transpose(1, 0, 5, 2, 4, 3)
    return out.reshape(batch, time + tail, heads, -1)[:, :time].astype(out_dtype)


def _ranges(
    causal, document: Int[Array, "J B C"] | None, count: int, rows: int, columns: int
) -> Int[Array, "I 2"]:
    """Returns the ranges of key blocks for each of the `count` query blocks, for `expressive.Blocks`."""
    diagonal = jnp.arange(columns - count, columns, dtype=jnp.int32)
    start, stop = jnp.zeros_like(diagonal), diagonal if causal else jnp.full_like(diagonal, columns)
    if document is not None:
        _, batch, block = document.shape
        queries = document[-count:, :, -rows:]
        first = jnp.where(queries > 0, queries, jnp.iinfo(jnp.int32).max).min(2)
        # Documents are numbered in order; padding has the number of the document before it.
        number = jax.lax.cummax(jnp.moveaxis(document, 1, 0).reshape(batch, -1), axis=1)
        begin = jax.vmap(jnp.searchsorted, (0, 1), 1)(number, first)
        start = begin.min(1).astype(jnp.int32) // block
        if not causal:
            end = jax.vmap(functools.partial(jnp.searchsorted, side="right"), (0, 1), 1)(
                number, queries.max(2)
            )
            stop = -(-end.max(1).astype(jnp.int32) // block)
    return jnp.stack([jnp.minimum(start, stop), stop], axis=1)
