"""The delta rule on power features, in chunks.

A token i moves what the state S returns for its key k_i toward its value v_i, by a part d_i of their difference:

    u_i = d_i (v_i - g_i phi(k_i)^T S_(i-1)),    S_i = g_i S_(i-1) + phi(k_i) u_i^T,    o_i = phi(q_i)^T S_i

Within a chunk no features are needed, because phi(k_i)^T phi(k_j) = (k_i . k_j)^p. Let b_ij be the decay from j to i,
A_ij = b_ij (k_i . k_j)^p for j < i, else 0, and let the rows of R be what the keys read of the state before the chunk,
decayed. Then

    U = (I + diag(d) A)^-1 diag(d) (V - R),

which is a triangular system; V - R is `wanted` here, and U `corrected`. Reads and the state then are those of power
attention without a denominator, with U in place of V. Source: "Parallelizing Linear Transformers with the Delta Rule
over Sequence Length" (Yang et al. 2024), with decays as in "Gated Delta Networks" (Yang et al. 2025); both have p = 1.
"""

import functools

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Float
from sympow_jax.ops import cost, decays, derivatives, layout
from sympow_jax.ops.forms import features

CHUNK = 128
"""Tokens per chunk that measured fastest with gradients on two CPU cores, at p = 2 and D = 32 and 64."""

_HIGHEST = jax.lax.Precision.HIGHEST
# `_solve` has blocks of 16 to 64 tokens (less in a shorter chunk), at most 8 if these suffice: 16 and 32 measured alike
# on two CPU cores.
_SHORTEST, _LONGEST, _BLOCKS = 16, 64, 8
# The most chunks without a state. Each is a part of the program: eight take twice as long to compile, and as long to
# run at 1,024 tokens on two CPU cores.
_MOST_CHUNKS = 4
# Time of the pairs of tokens, of which about half are computed, per FLOP of all pairs, relative to that of features per
# FLOP, on two CPU cores.
_TIME_OF_PAIRS = 3 / 4


def prefers_pairs(time: int, *, heads: int, kv_heads: int, head_dim: int, value_dim: int, power: int) -> bool:
    """Returns whether the attention form should be faster on a CPU than chunks of `CHUNK`."""
    # Keys are compared with keys too, and read the state before they are written to it.
    shape = {"head_dim": head_dim, "value_dim": value_dim}
    pair = cost.pair_flops(1, heads=heads + kv_heads, **shape)
    by_features = cost.feature_flops(heads=heads, kv_heads=2 * kv_heads, power=power, **shape)
    return _TIME_OF_PAIRS * pair * time <= pair * CHUNK + by_features


def attend(
    power: int,
    chunk: int | None,
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
        power: p, at least 1.
        chunk: tokens per chunk; None compares all pairs of tokens, and has no state and no features.
        query: of unit length, or zero.
        key: of unit length, or zero.
        value: V.
        delta: d, zero for tokens that write nothing.
        log_decay: as `decays.bounded` returns it.
        kv: the state before the first token; None for zeros.
        return_state: whether to return the state. Without it, what is returned in its place has no meaning.
    """
    (batch, time, kv_heads, head_dim), value_dim = key.shape, value.shape[3]
    size = chunk or -(-time // min(_MOST_CHUNKS, -(-time // CHUNK)))

    def chunks(x):
        """Returns [J, B, K, ..., C], with zeros at the end."""
        x = jnp.pad(x, [(0, 0), (0, -time % size)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, -1, size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 2), (0, -1))

    arrays = [chunks(x) for x in (layout.by_group(query, kv_heads), key, value, delta, log_decay)]
    if chunk is None:
        out = jax.vmap(jax.vmap(functools.partial(_over_pairs, power), 1, 1), 1, 1)(arrays)
    else:
        if kv is None:
            state = features.zeros(value, (batch, kv_heads), head_dim, value_dim, power, value.dtype)
        else:
            state = features.from_canonical(kv, head_dim, power)
        # Rows, then key heads: the second and third axis of chunks, and the first of states.
        of_head = jax.vmap(jax.vmap(functools.partial(_over_chunks, power), (1, 0), (1, 0)), (1, 0), (1, 0))
        out, state = of_head(arrays, state)
        kv = features.to_canonical(state, head_dim, power)
    # [J, B, K, G, E, C] to [B, X, N, E].
    out = jnp.moveaxis(out, (0, -1), (1, 2)).reshape(batch, -1, query.shape[2], value_dim)
    return out[:, :time], kv


def _over_pairs(power, arrays):
    """Returns the outputs of the chunks of one head, [J, G, E, C], which are compared with all earlier keys.

    `written` is what these keys have written, decayed to the start of the chunk.
    """
    product = functools.partial(jnp.einsum, precision=_HIGHEST)
    keys = written = None
    outs = []
    for query, key, value, *others in zip(*arrays, strict=True):
        reads = jnp.zeros_like(value), jnp.zeros_like(value, shape=(len(query), *value.shape))
        if keys is not None:
            compared = product("dj,gdi->gji", keys, _readers(query, key))
            read = product("ej,gji->gei", written, jax.lax.integer_pow(compared, power))
            reads = read[0], read[1:]
        out, new, across = _within_chunk(power, query, key, value, *others, reads)
        keys = key if keys is None else jnp.concatenate([keys, key], 1)
        written = new if written is None else jnp.concatenate([across * written, new], 1)
        outs.append(out)
    return jnp.stack(outs)


@functools.partial(derivatives.custom_vjp, static=1)
def _over_chunks(power, arrays, state, differentiated=False):
    """Returns the outputs of the chunks of one head, [J, G, E, C], and the state after them.

    Also returned if `differentiated`: the chunks, the state before each, and what was read of it.
    """
    feature_weights = features.weights(arrays[1].shape[1], power, arrays[1].dtype)

    def step(state, chunk):
        query, key, *_ = chunk
        weighted = features.weighted(state, feature_weights)
        # Read and written. Apart from those of queries: XLA would compute joined monomials again for a part of them.
        of_key = features.monomials(power, key)
        by_query = features.query(weighted, layout.merge_heads(query), power, _HIGHEST)
        reads = features.read(weighted, of_key, _HIGHEST), layout.split_heads(by_query, len(query))
        out, written, across = _within_chunk(power, *chunk, reads)
        new = features.write(written, of_key, _HIGHEST)
        after = tuple(across * s + n for s, n in zip(state, new))
        return after, (out, state, reads) if differentiated else out

    final, results = jax.lax.scan(step, state, arrays)
    if not differentiated:
        return results, final
    out, *saved = results
    return (out, final), (arrays, *saved)


def _over_chunks_vjp(power, residuals, cotangents):
    arrays, states, reads = residuals
    dout, dfinal = cotangents
    feature_weights = features.weights(arrays[1].shape[1], power, arrays[1].dtype)
    product = functools.partial(jnp.matmul, precision=_HIGHEST)

    def step(dstate, inputs):
        chunk, state, reads, dout = inputs
        query, key, *_ = chunk
        queries = layout.merge_heads(query)
        weighted = features.weighted(state, feature_weights)
        of_key, key_vjp = jax.vjp(functools.partial(features.monomials, power), key)
        (_, written, across), saved = _within_chunk.fun(power, *chunk, reads, differentiated=True)
        dwritten = features.read(dstate, of_key, _HIGHEST)
        dacross = sum(jnp.vdot(d, s, precision=_HIGHEST) for d, s in zip(dstate, state))
        dquery, dkey, *others, (dread_by_key, dread_by_query) = _within_chunk_vjp(
            power, saved, (dout, dwritten, dacross)
        )
        dread_by_query = layout.merge_heads(dread_by_query)
        dqueries = features.query_vjp(weighted, queries, dread_by_query, power, _HIGHEST)
        (dkey_by_state,) = key_vjp(
            tuple(product(w, dread_by_key) + product(d, written) for w, d in zip(weighted, dstate))
        )
        by_key = features.write(dread_by_key, of_key, _HIGHEST)
        by_query = features.fold(dread_by_query, queries, power, _HIGHEST)
        dstate_by_reads = features.weighted(tuple(map(jnp.add, by_key, by_query)), feature_weights)
        gradients = dquery + layout.split_heads(dqueries, len(query)), dkey + dkey_by_state, *others
        return tuple(across * d + r for d, r in zip(dstate, dstate_by_reads)), gradients

    dstate, gradients = jax.lax.scan(step, dfinal, (arrays, states, reads, dout), reverse=True)
    return list(gradients), dstate


_over_chunks.defvjp(functools.partial(_over_chunks.fun, differentiated=True), _over_chunks_vjp)


def _readers(query, key):
    """Returns the vectors that are compared with keys, [1 + G, D, C]: the keys, and the queries of all heads."""
    return jnp.concatenate([key[None], query])


@functools.partial(derivatives.custom_vjp, static=1)
def _within_chunk(power, query, key, value, delta, log_decay, reads, differentiated=False):
    """Returns the outputs of a chunk [G, E, C], what its tokens write to the state after it, and the state's decay.

    `reads` are what the key, [E, C], and the queries, [G, E, C], of each token read of that state, without decays. What
    `_within_chunk_vjp` needs is also returned if `differentiated`.
    """
    product = functools.partial(jnp.einsum, precision=_HIGHEST)
    coarse, fine = decays.split(log_decay)
    tokens = jnp.arange(key.shape[1])
    visible = tokens[:, None] >= tokens
    within = decays.within((coarse[:, None], fine[:, None]), (coarse, fine), visible)
    scores = product("gdi,dj->gij", _readers(query, key), key)
    weights = within * jax.lax.integer_pow(scores, power)
    from_start, to_end = decays.exp(coarse + fine), decays.exp(decays.sums_after(log_decay))
    decayed = tuple(from_start * x for x in reads)
    wanted = value - decayed[0]
    corrected = _solve(delta[:, None] * weights[0], delta * wanted)
    out = product("gij,ej->gei", weights[1:], corrected) + decayed[1]
    across = decays.exp(log_decay.sum())
    results = out, corrected * to_end, across
    if not differentiated:
        return results
    saved = query, key, delta, within, scores, weights, wanted, corrected, decayed, from_start, to_end, across
    return results, saved


def _within_chunk_vjp(power, saved, cotangents):
    """Returns the gradients of `_within_chunk`.

    With L = I + diag(d) A and W = V - R, U = L^-1 diag(d) W has dW = diag(d) L^-T dU, and d(diag(d) A)_ij =
    -(L^-T dU)_i . U_j. A weight has degree p in each of its vectors, so (x . dx) / p sums the gradients by the
    logarithms of x's weights, and those of the decays are sums of these: no matrix of pairs is reduced.
    """
    query, key, delta, within, scores, weights, wanted, corrected, decayed, from_start, to_end, across = saved
    dout, dwritten, dacross = cotangents
    product = functools.partial(jnp.einsum, precision=_HIGHEST)
    dcorrected = product("gei,gij->ej", dout, weights[1:]) + dwritten * to_end
    # The transposed equations, from the last token to the first.
    transposed = (delta[:, None] * weights[0]).T[::-1, ::-1]
    dsolved = _solve(transposed, dcorrected[:, ::-1])[:, ::-1]
    dwanted = delta * dsolved
    # The cotangents of d_i A_ij, and of all weights, in which those of keys have their strengths.
    dequations = jnp.tril(product("ei,ej->ij", -dsolved, corrected), -1)
    dweights = jnp.concatenate([dequations[None], product("gei,ej->gij", dout, corrected)])
    dscores = dweights * (power * within * jax.lax.integer_pow(scores, power - 1))
    dreaders = product("dj,gij->gdi", key, dscores)
    by_log = (_readers(query, key) * dreaders).sum(1) / power
    ddelta = (dsolved * wanted).sum(0) + by_log[0]
    scaled = _readers(query, delta * key)
    dcompared = product("gdi,gij->dj", scaled, dscores)
    dprefix = delta * by_log[0] + by_log[1:].sum(0) - (key * dcompared).sum(0) / power
    dprefix += (decayed[1] * dout).sum((0, 1)) - (decayed[0] * dwanted).sum(0)
    dafter = (dwritten * corrected * to_end).sum(0)
    dlog_decay = decays.sums_from(dprefix) + decays.sums_after(dafter[::-1])[::-1] + dacross * across
    dkey = delta * dreaders[0] + dcompared
    return dreaders[1:], dkey, dwanted, ddelta, dlog_decay, (-from_start * dwanted, from_start * dout)


_within_chunk.defvjp(functools.partial(_within_chunk.fun, differentiated=True), _within_chunk_vjp)


def _solve(weights: Float[Array, "C C"], right: Float[Array, "E C"]) -> Float[Array, "E C"]:
    """Returns x with x_i + sum_(j < i) weights_ij x_j = right_i for each column i; reads weights with j < i only.

    Blocks of columns follow each other, each by the inverse of its own weights. The entries of an inverse are bounded,
    since no step of the delta rule amplifies the state. (XLA calls a library for triangular solves on CPUs, whose
    threads wait for each other in every small one, up to 20 times as long on a busy machine.)
    """
    size = right.shape[1]
    width = 1
    while width < min(size, _SHORTEST) or (width < _LONGEST and width * _BLOCKS < size):
        width *= 2
    count = -(-size // width)
    ends = 0, count * width - size
    weights, right = jnp.pad(weights, [ends, ends]), jnp.pad(right, [(0, 0), ends])
    product = functools.partial(jnp.matmul, precision=_HIGHEST)
    rows = weights.reshape(count, width, count * width)
    own = jnp.diagonal(rows.reshape(count, width, count, width), axis1=0, axis2=2)
    inverses = _inverses(jnp.moveaxis(own, -1, 0))
    x = right[:, :0]
    for row, inverse, part in zip(rows, inverses, jnp.split(right, count, 1), strict=True):
        found = product(part - product(x, row[:, : x.shape[1]].T), inverse.T)
        x = jnp.concatenate([x, found], 1)
    return x[:, :size]


def _inverses(weights: Float[Array, "n C C"]) -> Float[Array, "n C C"]:
    """Returns the inverses of I + the strictly lower parts, from those of their diagonal blocks, of 1, 2, 4, ... rows.

    C is a power of two. [[A, 0], [M, B]] has the inverse [[A', 0], [-B' M A', B']].
    """
    count, size, _ = weights.shape
    product = functools.partial(jnp.matmul, precision=_HIGHEST)
    found, width = jnp.ones_like(weights, shape=(count, size, 1, 1)), 1
    while width < size:
        blocks = weights.reshape(count, size // (2 * width), 2, width, -1, 2, width)
        below = jnp.moveaxis(jnp.diagonal(blocks[:, :, 1, :, :, 0], axis1=1, axis2=3), -1, 1)
        first, second = found[:, ::2], found[:, 1::2]
        below = -product(second, product(below, first))
        found = jnp.block([[first, jnp.zeros_like(first)], [below, second]])
        width *= 2
    return found[:, 0]
