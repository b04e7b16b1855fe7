"""Operands of the backward kernels at all powers, in plain JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import numerics, results
from pallas_kernels.power_state import configs, decays, preparation, reshaping, window_queries

# Normalizers are multiplied by 2^-50 before they are multiplied with each other.
_NORM_BITS = 50


class MeanCotangent(NamedTuple):
    """Cotangents of the mean o = n / d: dn = do / d, dd = -(do . o) / d."""

    dout: jax.Array  # bfloat16 [B, at least T, N, E]
    inverse: jax.Array  # float32 [HN, X], 1 / d; 0 where d is below the smallest normal number
    delta: jax.Array  # float32 [HN, X], do . o
    size: jax.Array  # float32 [HN, X], the largest entry of do


class ReverseWalk(NamedTuple):
    """Operands of the gradients of states, with queries in place of keys: do / d in place of values, and their weights.

    Except in `value`, chunks contain all heads of a group and are in reverse order.
    """

    value: jax.Array  # float32 [HN, at least T, E]
    carried: preparation.Carried


def mean_cotangent(out, denominator, dout, value_dim, length) -> MeanCotangent:
    """Computes MeanCotangent from float32 out [B, T, N, E], denominator [B, T, N] and dout [B, T, N, E].

    E is padded to `value_dim`, and X is `length`.
    """
    # Both in one launch, before the transpose.
    wide = dout.astype(jnp.float32)
    delta, size = jax.lax.optimization_barrier(((wide * out).sum(-1), jnp.abs(wide).max(-1)))
    denominator, delta, size = (
        reshaping.resized(reshaping.heads_first(x), length) for x in (denominator, delta, size)
    )
    # A NaN is a weight too: its gradients are NaN, not zero.
    positive = ~(denominator < jnp.finfo(jnp.float32).tiny)
    return MeanCotangent(
        # At E = 128 the kernel reads dO without TMA, which alone reads zeros beyond the end.
        dout=results.whole(reshaping.fill(dout, value_dim), length if value_dim == 128 else 0),
        inverse=jnp.where(positive, 1 / jnp.where(positive, denominator, 1), 0),
        delta=delta,
        size=size,
    )


def reverse_walk(tokens: preparation.Chunks, mean: MeanCotangent, call: configs.Call) -> ReverseWalk:
    """Computes ReverseWalk from the mean's cotangent."""
    dout = reshaping.heads_first(mean.dout).astype(jnp.float32)
    value = mean.inverse[:, : dout.shape[1], None] * dout
    log2_strength = jnp.tile(
        jnp.flip(tokens.decays.log2_from_start, 1), (1, 1, len(value) // len(tokens.folded_value))
    )
    size, dnorm = (in_walk(x * mean.inverse, log2_strength.shape) for x in (mean.size, -mean.delta))
    carried = preparation.carry_along(
        log2_strength, size, dnorm, tokens.decays.log2_across, call, reverse=True
    )
    return ReverseWalk(value, carried)


def in_walk(x, shape):
    """Reshapes [HN, X, ...] to `shape` [H, n, G C], with the last chunk first and all heads of a group in a chunk."""
    heads, chunks, _ = shape
    x = x.reshape(heads, len(x) // heads, chunks, -1, *x.shape[2:])
    return jnp.flip(jnp.swapaxes(x, 1, 2), 1).reshape(*shape, *x.shape[4:])


def in_time(x, heads):
    """Inverts `in_walk` of x [H, n, G C], for HN = `heads`."""
    x = jnp.flip(x, 1).reshape(*x.shape[:2], heads // len(x), -1)
    return jnp.swapaxes(x, 1, 2).reshape(heads, -1)


def columns(tokens: preparation.Chunks, mean: MeanCotangent, exact_window):
    """Returns vectors of queries in the order of `window_queries.Columns`, float32 [HN, X / 64, 5, 64]."""
    group = len(mean.inverse) // len(tokens.decays.of_keys)
    coarse, fine = (jnp.repeat(x[..., exact_window:].reshape(len(x), -1), group, 0) for x in _frames(tokens))
    return vectors(*window_queries.Columns.of(mean.inverse, mean.delta, coarse, fine))


def decays_of_keys(tokens: preparation.Chunks, chunks):
    """Returns running sums of log2 decays at keys: coarse, fine, coarse_before and fine_before of a kernel's rows.

    Each is float32 [H, chunks C]. The first two are in the frame of the key's own chunk, the last two in that of the
    chunk before, zero where that does not contain the key.
    """
    size = tokens.folded_value.shape[2]

    def in_chunks(x, before):
        x = jnp.pad(x, [(0, 0), (before, chunks - before - x.shape[1]), (0, size - x.shape[2])])
        return x.reshape(len(x), -1)

    own = [in_chunks(x[:, :chunks, :size], 0) for x in _frames(tokens)]
    return own + [in_chunks(x[:, : chunks - 1, size:], 1) for x in _frames(tokens)]


def vectors(*rows):
    """Reshapes rows float32 [A, X] into blocks, [A, X / 64, rows, 64]."""
    return jnp.stack([x.reshape(len(x), -1, configs.BLOCK) for x in rows], 2)


def inner_of(tokens, saved: preparation.Saved, dual: preparation.Saved, of_kv, weights=1.0):
    """Returns <R, S> per chunk, float32 [H, n], of the state S before the chunk, decayed over it.

    saved, dual: by head, both in the order of time. of_kv: the product without normalizers, in the states' scales.
    weights: of products of two entries of normalizers.
    """
    # Entries of both normalizers may be near 2^103, if values are zeros.
    unit = 2.0**-_NORM_BITS
    norms, dnorms = (reshaping.unsplit(x.norms) * unit for x in (saved, dual))
    of_norm = (norms * weights * dnorms).sum((2, 3))
    shift = saved.shifts + dual.shifts
    total = numerics.scaled(of_kv, shift) + numerics.scaled(of_norm, shift + 2 * _NORM_BITS)
    return preparation.scaled_decay(tokens.decays.log2_across, 0) * total


def sums_of(tokens, of_queries, of_keys, inner, exact_window) -> decays.Sums:
    """Computes Sums from the kernels' sums by query [HN, 2, X] and by key [H, 2, Y], in-window and from the state."""
    of_queries = of_queries.reshape(len(of_keys), -1, *of_queries.shape[1:]).sum(1)
    of_queries = jnp.pad(of_queries, [(0, 0), (0, 0), (exact_window, 0)])
    of_queries = reshaping.resized(of_queries, of_keys.shape[2] + exact_window, axis=2)
    return decays.Sums(of_queries, of_keys, inner, tokens.entering)


def _frames(tokens):
    """Returns coarse and fine decays of each chunk and its window, [2, H, n, W + C]."""
    of_keys = tokens.decays.of_keys[:, :, :2]
    return jnp.moveaxis(of_keys.reshape(*of_keys.shape[:3], -1), 2, 0)
