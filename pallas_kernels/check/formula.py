"""Power attention in plain JAX and float32, for the rows that a check compares.

It shares no code with the kernels. Query i attends to keys j <= i of its document with the weight w_ij = exp(G_i - G_j)
(q_i . k_j)^p, where G is the running sum of log_decay. Its output is sum_j w_ij v_j / sum_j w_ij.
"""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_EXACT = jax.lax.Precision.HIGHEST


class Decays(NamedTuple):
    """Running sums G of log_decay as high + low, each [B, T, K], so that differences keep float32 accuracy."""

    high: jax.Array
    low: jax.Array

    @classmethod
    def of(cls, log_decay: np.ndarray) -> "Decays":
        """Returns the decays of log_decay [B, T, K], at most 0 and finite."""
        total = np.cumsum(np.asarray(log_decay, np.float64), 1)
        high = total.astype(np.float32)
        return cls(jnp.asarray(high), jnp.asarray((total - high).astype(np.float32)))


class Rows(NamedTuple):
    """Results for R queries: the mean [B, R, N, E] and the sum of weights [B, R, N]."""

    mean: jax.Array
    denominator: jax.Array


class Tokens(NamedTuple):
    """Arguments of attention."""

    query: jax.Array  # [B, T, N, D]
    key: jax.Array  # [B, T, K, D]
    value: jax.Array  # [B, T, K, E]
    decays: Decays
    documents: jax.Array  # int32 [B, T], the number of each token's document


def attend(tokens: Tokens, positions, *, power: int) -> Rows:
    """Computes attention of the queries at `positions`, int32 [R], over all keys before them; p is `power`."""
    query, key, value, decays, documents = tokens
    batch, _, kv_heads, head_dim = key.shape
    rows = query[:, positions].astype(jnp.float32).reshape(batch, len(positions), kv_heads, -1, head_dim)
    scores = jnp.einsum("brkgd,btkd->bkgrt", rows, key.astype(jnp.float32), precision=_EXACT)
    high, low = (x[:, positions, :, None] - jnp.moveaxis(x, 1, 2)[:, None] for x in decays)
    time = jnp.arange(key.shape[1])
    visible = (time <= positions[:, None]) & (documents[:, positions, None] == documents[:, None])
    exponents = jnp.where(visible[:, :, None], high + low, -jnp.inf)
    weights = scores**power * jnp.exp(jnp.moveaxis(exponents, 2, 1))[:, :, None]
    denominator = weights.sum(-1)
    numerator = jnp.einsum("bkgrt,btke->bkgre", weights, value.astype(jnp.float32), precision=_EXACT)
    safe = jnp.where(denominator > 0, denominator, 1)[..., None]
    mean = jnp.moveaxis(jnp.where(denominator[..., None] > 0, numerator / safe, 0), 3, 1)
    denominator = jnp.moveaxis(denominator, 3, 1)
    return Rows(mean.reshape(*mean.shape[:2], -1, mean.shape[-1]), denominator.reshape(*mean.shape[:2], -1))


def gradients(tokens: Tokens, positions, cotangent, *, power: int) -> dict[str, jax.Array]:
    """Gradients of sum(mean * cotangent) over the rows at `positions`: query, key, value and log_decay.

    Args:
        tokens: as `positions` and `power` an argument of `attend`.
        positions: [R].
        cotangent: [B, R, N, E].
        power: p.

    Returns:
        float32 gradients by name. That of `log_decay` is a reverse running sum of the gradient of G.
    """

    def loss(query, key, value, high):
        decays = tokens.decays._replace(high=high)
        mean = attend(Tokens(query, key, value, decays, tokens.documents), positions, power=power).mean
        return (mean * cotangent).sum()

    arguments = *(x.astype(jnp.float32) for x in tokens[:3]), tokens.decays.high
    found = dict(zip(("query", "key", "value", "log_decay"), jax.grad(loss, (0, 1, 2, 3))(*arguments)))
    found["log_decay"] = jnp.cumsum(found["log_decay"][:, ::-1], 1)[:, ::-1]
    return found


def monomials(
    head_dim: int, power: int, count: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples symmetric-power features, all unless `count` is given.

    Returns their canonical positions, indices [M, p] and factors [M].

    Canonical order: non-decreasing indices, lexicographically. The feature of x is factor * prod(x[indices]).
    """
    total = math.comb(head_dim + power - 1, power)
    places = np.arange(total)
    if count is not None and total > count:
        middle = np.random.default_rng(0).choice(np.arange(1, total - 1), count - 2, replace=False)
        places = np.sort(np.concatenate([middle, [0, total - 1]]))
    chosen, sample = set(places.tolist()), []
    for place, indices in enumerate(itertools.combinations_with_replacement(range(head_dim), power)):
        if place in chosen:
            sample.append(indices)
    counts = [
        math.factorial(power) / math.prod(math.factorial(indices.count(i)) for i in set(indices))
        for indices in sample
    ]
    return places, np.asarray(sample), np.sqrt(np.asarray(counts, np.float64)).astype(np.float32)


def state(key, value, log_decay, documents, included, sample) -> dict[str, jax.Array]:
    """Computes a sample of the state after all tokens: kv [B, K, M, E] and norm [B, K, M].

    Args:
        key: [B, T, K, D].
        value: [B, T, K, E].
        log_decay: [B, T, K].
        documents: int32 [B, T], not decreasing along a row; only the document of the last included token is in the
            state.
        included: bool [B, T]; other tokens are not in the state and do not decay it.
        sample: result of `monomials`.
    """
    decays = Decays.of(np.where(np.asarray(included)[..., None], log_decay, 0))
    last = jnp.where(included, documents, -1).max(1, keepdims=True)
    inside = included & (documents == last)
    exponents = (decays.high[:, -1:] - decays.high) + (decays.low[:, -1:] - decays.low)
    weights = jnp.where(inside[..., None], jnp.exp(exponents), 0)
    features = _features(key, sample) * weights[..., None]
    kv = jnp.einsum("btkm,btke->bkme", features, value.astype(jnp.float32), precision=_EXACT)
    return {"kv": kv, "norm": features.sum(1)}


def state_gradient(tokens: Tokens, rows: Rows, positions, cotangent, sample) -> dict[str, jax.Array]:
    """Computes sampled gradients of sum(mean * cotangent) with respect to the initial state, where that is zero.

    Args:
        tokens: arguments of `attend`; the state belongs to document 0.
        rows: results of the queries at `positions`.
        positions: int32 [R].
        cotangent: [B, R, N, E].
        sample: result of `monomials`.
    """
    query, _, _, decays, documents = tokens
    kv_heads = decays.high.shape[2]
    features = _features(query[:, positions], sample)
    factor = jnp.exp(decays.high[:, positions] + decays.low[:, positions])
    factor = jnp.where((documents[:, positions] == 0)[..., None], factor, 0)
    scale = jnp.where(rows.denominator > 0, 1 / rows.denominator, 0)[..., None]

    def by_key_head(x):
        return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1])

    values = by_key_head(cotangent * scale) * factor[..., None, None]
    inner = by_key_head((cotangent * rows.mean).sum(-1, keepdims=True) * scale) * factor[..., None, None]
    features = by_key_head(features)
    kv = jnp.einsum("brkgm,brkge->bkme", features, values, precision=_EXACT)
    norm = -jnp.einsum("brkgm,brkgo->bkm", features, inner, precision=_EXACT)
    return {"kv": kv, "norm": norm}


def _features(x, sample):
    """Maps [..., D] to the sampled features [..., M]."""
    _, indices, factors = sample
    return x.astype(jnp.float32)[..., indices].prod(-1) * factors
