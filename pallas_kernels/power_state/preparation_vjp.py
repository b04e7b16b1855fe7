"""Operands of the backward kernels at all powers, in plain JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import numerics, results
from pallas_kernels.power_state import configs, decays, preparation, reshaping, window_queries

# Normalizers are multiplied by 2^-50 before they are multiplied with each other.
_NORM_BITS = 50


class Mean(NamedTuple):
    """Cotangent of the mean o = n / d: dn = do / d, dd = -(do . o) / d.

    H, X and n are as in `preparation.Chunks`.
    """

    dout: jax.Array  # bfloat16 [B, at least T, N, E]
    inverse: jax.Array  # float32 [B N, X], 1 / d; 0 where d is below the smallest normal number
    delta: jax.Array  # float32 [B N, X], do . o
    size: jax.Array  # float32 [B N, X], the largest entry of do


class Prepared(NamedTuple):
    """What both backward passes read: tokens, and the mean's cotangent."""

    tokens: preparation.Chunks
    mean: Mean


class Dual(NamedTuple):
    """Operands of the gradients of states, with queries in place of keys: do / d in place of values, and their weights.

    Except in `value`, chunks contain all heads of a group and are in reverse order.
    """

    value: jax.Array  # float32 [B N, at least T, E]
    carried: preparation.Carried


def mean_of(out, denominator, dout, value_dim, length) -> Mean:
    """Computes Mean from float32 out [B, T, N, E], denominator [B, T, N] and dout [B, T, N, E].

    E is padded to `value_dim`, and X is `length`.
    """
    # Both in one launch, before the transpose.
    wide = dout.astype(jnp.float32)
    delta, size = jax.lax.optimization_barrier(((wide * out).sum(-1), jnp.abs(wide).max(-1)))
    denominator, delta, size = (
        reshaping.resized(reshaping.heads_first(x), length) for x in (denominator, delta, size)
    )
    # A NaN is a weight too: its gradients are NaN, not zero.
    some = ~(denominator < jnp.finfo(jnp.float32).tiny)
    return Mean(
        # At E = 128 the kernel reads dO without TMA, which alone reads zeros beyond the end.
        dout=results.whole(reshaping.fill(dout, value_dim), length if value_dim == 128 else 0),
        inverse=jnp.where(some, 1 / jnp.where(some, denominator, 1), 0),
        delta=delta,
        size=size,
    )


def dual_of(tokens: preparation.Chunks, mean: Mean, call: configs.Call) -> Dual:
    """Computes Dual from the mean's cotangent."""
    dout = reshaping.heads_first(mean.dout).astype(jnp.float32)
    value = mean.inverse[:, : dout.shape[1], None] * dout
    log2_strength = jnp.tile(
        jnp.flip(tokens.decays.log2_from_start, 1), (1, 1, len(value) // len(tokens.folded_value))
    )
    size, dnorm = (backwards(x * mean.inverse, log2_strength.shape) for x in (mean.size, -mean.delta))
    carried = preparation.carry_along(
        log2_strength, size, dnorm, tokens.decays.log2_across, call, reverse=True
    )
    return Dual(value, carried)


def backwards(x, shape):
    """Reshapes [B N, X, ...] to `shape` [H, n, G C], with the last chunk first and all heads of a group in a chunk."""
    heads, chunks, _ = shape
    x = x.reshape(heads, len(x) // heads, chunks, -1, *x.shape[2:])
    return jnp.flip(jnp.swapaxes(x, 1, 2), 1).reshape(*shape, *x.shape[4:])


def forwards(x, heads):
    """Inverts `backwards` of x [H, n, G C], for B N = `heads`."""
    x = jnp.flip(x, 1).reshape(*x.shape[:2], heads // len(x), -1)
    return jnp.swapaxes(x, 1, 2).reshape(heads, -1)


def columns(tokens: preparation.Chunks, mean: Mean, exact_window):
    """Returns vectors of queries in the order of `window_queries.Columns`, float32 [B N, X / 64, 5, 64]."""
    group = len(mean.inverse) // len(tokens.decays.blocks)
    coarse, fine = (jnp.repeat(x[..., exact_window:].reshape(len(x), -1), group, 0) for x in _frames(tokens))
    return vectors(*window_queries.Columns.of(mean.inverse, mean.delta, coarse, fine))


def decays_of_keys(tokens: preparation.Chunks, chunks):
    """Returns running sums of log2 decays at keys in `chunks` chunks, float32 [H, chunks C], in two frames.

    The frames are those of their own chunk and of the previous one. There is a coarse and a fine part per frame, in
    this order, zero in frames that do not contain the key.
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
    """Returns <R, S> per chunk, float32 [H, n], from that of the states without normalizers, in their scales.

    saved, dual: by head, both in the order of time. weights: of products of two entries of normalizers.
    """
    # Entries of both normalizers may be near 2^103, if values are zeros.
    least = 2.0**-_NORM_BITS
    norms, dnorms = (reshaping.unsplit(x.norms) * least for x in (saved, dual))
    of_norm = (norms * weights * dnorms).sum((2, 3))
    shift = saved.shifts + dual.shifts
    total = numerics.scaled(of_kv, shift) + numerics.scaled(of_norm, shift + 2 * _NORM_BITS)
    return preparation.scaled_decay(tokens.decays.log2_across, 0) * total


def sums_of(tokens, of_queries, of_keys, inner, exact_window) -> decays.Sums:
    """Computes Sums from the kernels' sums by query [B N, 2, X] and by key [H, 2, Y], in-window and from the state."""
    of_queries = of_queries.reshape(len(of_keys), -1, *of_queries.shape[1:]).sum(1)
    of_queries = jnp.pad(of_queries, [(0, 0), (0, 0), (exact_window, 0)])
    of_queries = reshaping.resized(of_queries, of_keys.shape[2] + exact_window, axis=2)
    return decays.Sums(of_queries, of_keys, inner, tokens.entering)


def _frames(tokens):
    """Returns coarse and fine decays of each chunk and its window, [H, n, W + C] each."""
    return (
        tokens.decays.blocks[:, :, part].reshape(*tokens.decays.blocks.shape[:2], -1) for part in range(2)
    )
