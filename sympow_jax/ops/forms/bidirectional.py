"""Bidirectional linear attention over whole documents, at a cost linear in time.

Without documents this is two products: of values with the features of keys, and of the result with those of queries.
With documents, a token attends exactly to its document's tokens in its own chunk. It attends to earlier chunks through
a state carried forward, and to later chunks through a state carried backward.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array
from sympow_jax.ops import arguments, containment, cost, documents, layout, means, preparation, sharding
from sympow_jax.ops.forms import context, features
from sympow_jax.ops.tokens import SEQUENCE, Tokens


def require_supported(tokens: Tokens, implementation: str | None, absent: dict) -> None:
    """Raises NotImplementedError or ValueError for arguments that bidirectional attention does not support.

    absent: arguments that must be None, by name.
    """
    for name, x in absent.items():
        if x is not None:
            raise NotImplementedError(f"causal is False, which does not support {name}; leave it out")
    if implementation not in (None, "reference", "xla"):
        raise NotImplementedError(
            f"causal is False, which has the implementations 'reference' and 'xla', not {implementation!r}"
        )
    arguments.check_same_length(tokens.query, tokens.key, " if causal is False")


class Plan(NamedTuple):
    """Static options of a call, as in `ops.plans`."""

    power: int
    division: means.Division
    implementation: str | None
    chunk_size: int | None


@sharding.op({"tokens": SEQUENCE}, lambda plan: "B T N E")
def attend(plan, tokens):
    """Returns means [B, T, N, E] or sums [B, T, N, E + 1] over each token's document, with weights (q . k)^p."""
    power, division, implementation, chunk_size = plan
    finite = containment.remove(tokens, causal=False)
    query, key, value, _, segment_ids = finite.tokens
    dtype, kv_heads = np.promote_types(query.dtype, jnp.float32), key.shape[2]
    if division is not means.Division.NONE:
        query = preparation.unit_scale(query)
        if implementation != "reference":
            key = preparation.scaled_keys(key, power)
    document = None
    weighed = jnp.pad(value, [(0, 0), (0, 0), (0, 0), (0, 1)], constant_values=1)
    if segment_ids is not None:
        starts, valid, _ = documents.boundaries(
            segment_ids, jnp.full_like(segment_ids[:, 0], documents.NO_SEGMENT)
        )
        document = jnp.cumsum(starts, 1, dtype=jnp.int32)
        weighed = jnp.where(valid[..., None, None], weighed, 0)
    # Values of width 0, and the ones that were added to them, vary over no mesh axis.
    arrays = sharding.same_variation(
        (
            layout.time_last(query, kv_heads).astype(dtype),
            jnp.moveaxis(key, 1, 3).astype(dtype),
            jnp.moveaxis(weighed, 1, 3).astype(dtype),
        )
    )
    compute: Callable
    if implementation == "reference":
        compute = _all_pairs
    elif document is None:
        compute = _one_document
    else:
        chunk = min(chunk_size or cost.default_chunk("chunked"), query.shape[1])
        compute = functools.partial(_by_document, chunk=chunk)
    compute = functools.partial(compute, power=power, precision=cost.precision_of(value.dtype))
    by_head = jax.vmap(compute, in_axes=(0, 0, 0, None))
    sums = jax.vmap(by_head, in_axes=(0, 0, 0, None if document is None else 0))(*arrays, document)
    out = means.of_sums(layout.time_second(sums), -1, division)
    out = out if division is means.Division.NONE else out.astype(value.dtype)
    return containment.restore(out, finite)


def _all_pairs(query, key, value, document, *, power, precision):
    """Computes the formula over all pairs of one key head: [G, D, T], [D, T], [L, T] -> [G, L, T]."""
    weights = jnp.einsum("gdq,dk->gqk", query, key, precision=precision) ** power
    if document is not None:
        weights = jnp.where(document[:, None] == document, weights, 0)
    return jnp.einsum("gqk,ek->geq", weights, value, precision=precision)


def _one_document(query, key, value, document, *, power, precision):
    """Computes `_all_pairs` through features; every token attends to every other."""
    del document
    state = features.fold_all(value, key, power=power, precision=precision)
    return context.sums_from_earlier_state(power, precision, state, query, None)


def _by_document(query, key, value, document, *, power, precision, chunk):
    """Computes `_all_pairs` by features and chunks.

    Documents are numbered in order. Padding has values of zero.
    """
    time, head_dim, dtype = query.shape[-1], len(key), query.dtype
    weights = features.weights(head_dim, power, dtype)
    missing = -time % chunk
    arrays = [_chunks(layout.pad_last(x, 0, missing), chunk) for x in (query, key, value)]
    arrays.append(_chunks(jnp.pad(document, (0, missing), mode="edge"), chunk))

    @jax.checkpoint
    def own_chunk(arrays):
        return _all_pairs(*arrays, power=power, precision=precision)

    def carried(edge):
        """Returns each chunk's sums over earlier chunks of its documents.

        With edge 0 time runs backward, and the sums are over later chunks.
        """

        @jax.checkpoint
        def step(carry, arrays):
            state, current = carry
            q, k, v, document = arrays
            weighted = features.weighted(state, weights)
            read = jax.vmap(lambda q: features.query(weighted, q, power, precision))(q)
            own = features.fold(jnp.where(document == document[edge], v, 0), k, power, precision)
            continues = document[edge] == current
            state = tuple(jnp.where(continues, s, 0) + n for s, n in zip(state, own, strict=True))
            return (state, document[edge]), jnp.where(document == current, read, 0)

        nothing = (
            features.zeros(value, (), head_dim, len(value), power, dtype),
            jnp.full_like(document[0], -1),
        )
        return jax.lax.scan(step, nothing, tuple(arrays), reverse=edge == 0)[1]

    sums = jax.lax.map(own_chunk, tuple(arrays)) + carried(-1) + carried(0)
    return layout.join_chunks(sums)[..., :time]


def _chunks(x: Array, chunk: int) -> Array:
    """Reshapes [..., n * C] to [n, ..., C]."""
    return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, chunk), -2, 0)
