"""Gradients of power attention through states at p = 4: what the backward kernels are given, and what becomes of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import numerics
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import near_key_vjp, quartic
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state import quartic_key_vjp as key_kernel
from pallas_kernels.power_state import quartic_layout as layouts
from pallas_kernels.power_state import quartic_query_vjp as query_kernel

__all__ = ["Gradients", "gradients"]

_POWER = 4


class Gradients(NamedTuple):
    """X = n C positions, Y of them and the window in front, filled up to whole chunks."""

    query: jax.Array  # bfloat16 [B, T, N, D]
    key: jax.Array  # bfloat16 [B, T, K, D]
    value: jax.Array  # bfloat16 [B, T, K, E]
    # float32 sums of the gradient with respect to logarithms of weights: over keys that are met exactly, and through
    # states.
    query_sums: jax.Array  # [H N / K, 2, X]
    key_sums: jax.Array  # [H, 2, Y]
    carry: jax.Array  # float32 [H, n], with respect to the logarithm of a state's decay over a chunk
    state: tuple[
        jax.Array, jax.Array
    ]  # float32 [B, K, F, E] and [B, K, F], of the state before the first position


class _Rows(NamedTuple):
    """Of queries, H groups of them, and what their sums of weights and cotangents make of them."""

    dout: jax.Array  # bfloat16 [HN, X, E]
    exponent: jax.Array  # int32 [HN, X], of the largest entry of dout
    inverse: jax.Array  # float32 [HN, X]
    delta: jax.Array  # float32 [HN, X]


def gradients(
    query,
    key,
    value,
    log_decay,
    folds,
    saved,
    out,
    denominator,
    dout,
    dstate,
    *,
    config,
    chunk,
    window,
    interpret,
):
    """Of arguments and results of `quartic.forward`, with dout [B, T, N, E] and dstate, the cotangents of its results.

    saved: `quartic.Saved`. dstate: float32 [B, K, F, E] and [B, K, F], or None. The window is at most a chunk.
    """
    _check(config, chunk, window)
    batch, time, _, head_dim = query.shape
    value_dim = value.shape[-1]
    layout = layouts.layout_for(head_dim, value_dim)
    query, key = (quartic.fill(x, layout.head_dim) for x in (query, key))
    value, out, dout = (quartic.fill(x, layout.value_dim) for x in (value, out, dout))
    base = preparation.scale_all(
        query, key, value, log_decay, folds, None, power=_POWER, chunk=chunk, window=window, shift=saved.shift
    )
    rows = _rows(out, denominator.astype(jnp.float32), dout, chunk)
    vector, scalars = quartic.pair_products(jnp.swapaxes(base.query, 1, 2).astype(jnp.float32), layout)
    options = {"layout": layout, "config": config, "interpret": interpret}
    kernel = {"chunk": chunk, "window": window}

    dquery, query_sums = _query(base, rows, vector, scalars, saved, options | kernel)
    dual = _dual(base, rows, vector, scalars, dstate, head_dim, chunk, options)
    dkey, dvalue, key_sums = _key(base, rows, dual, options | kernel)

    exponent = numerics.exponent(jnp.abs(preparation.heads_first(query)).max(-1, keepdims=True))
    dquery = numerics.scaled(dquery[:, :time], -exponent)
    seen = slice(window, window + time)

    def heads_last(x, size):
        x = x.reshape(batch, -1, *x.shape[1:])[..., :size]
        return jnp.swapaxes(x, 1, 2).astype(jnp.bfloat16)

    state = quartic.canonical(
        dual.last, -dual.norm[:, -1], dual.shift[:, -1], batch, head_dim, value_dim, layout
    )
    return Gradients(
        query=heads_last(dquery, head_dim),
        key=heads_last(dkey[:, seen], head_dim),
        value=heads_last(dvalue[:, seen], value_dim),
        query_sums=query_sums,
        key_sums=key_sums,
        carry=_carries(base, saved, dual, layout),
        state=state,
    )


def _check(config, chunk, window):
    if window > chunk:
        raise NotImplementedError(
            f"gradients of power_state need a window of at most a chunk, {chunk}, not {window}"
        )
    if min(config.query_vjp_stages, config.key_vjp_stages) < 2:
        raise NotImplementedError(
            f"gradients of power_state at power 4 need a chunk and window of fewer than {chunk + window} positions"
        )


def _rows(out, denominator, dout, chunk):
    extra = -out.shape[1] % chunk
    dout = dout.astype(out.dtype)
    delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
    dout, delta, total = (
        preparation.pad(preparation.heads_first(x), 0, extra) for x in (dout, delta, denominator)
    )
    return _Rows(
        dout=dout,
        exponent=numerics.exponent(jnp.abs(dout).max(-1)),
        inverse=jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0),
        delta=delta,
    )


def _query(base, rows, vector, scalars, saved, options):
    """dq float32 [HN, X, D], of queries as in `base`, and sums [HN, 2, X]."""
    layout = options["layout"]
    groups = len(base.query) // len(base.key)
    scale = jnp.repeat(base.scale.reshape(len(base.scale), -1), groups, 0)
    factors = query_kernel.Rows(
        narrow=numerics.scaled(jnp.ones_like(scale), -rows.exponent),
        far=numerics.scaled(scale, rows.exponent + layouts.WEIGHT_BITS),
        delta=rows.delta,
        inverse=rows.inverse,
    )
    vector = jnp.swapaxes(vector, 1, 2)
    gradient, sums = query_kernel.query_vjp(
        base.query,
        vector,
        scalars,
        rows.dout,
        saved.states,
        base.key,
        base.value,
        base.decay,
        _blocks(factors),
        **options,
    )
    norm = saved.norm[:, :-1]
    y = vector.reshape(len(norm), groups, norm.shape[1], -1, layout.rows)
    slopes = quartic.norm_products(y, norm, layout).reshape(vector.shape)
    slopes = slopes * (-2 * scale * rows.delta * rows.inverse)[..., None]
    return _add_norm(gradient, sums, slopes, base.query, layout)


def _add_norm(gradient, sums, slopes, x, layout):
    """With the normaliser's share, given the gradient of y, slopes [.., X, rows]."""
    x = x.astype(jnp.float32)
    share = _of_entries(slopes, x, layout)
    total = (share * x).sum(-1) / _POWER
    return gradient + share, sums + jnp.stack([jnp.zeros_like(total), total], 1)


def _of_entries(slopes, x, layout):
    """The gradient of x [.., D], given that of its products of two entries, float32 [.., rows]."""
    size = layout.head_dim
    place = np.zeros((size, size), np.int32)
    low, high = layouts.pairs(size)
    place[low, high] = place[high, low] = np.arange(layout.products) + layout.rows - layout.products
    square = jnp.take(slopes, place.ravel(), axis=-1).reshape(*slopes.shape[:-1], size, size)
    return (square * (1 + np.eye(size, dtype=np.float32)) * x[..., None, :]).sum(-1)


def _blocks(factors):
    """A tuple of float32 [H, X] as the kernels take it, [H, X / 64, count, 64]."""
    stacked = jnp.stack([x.reshape(len(x), -1, configs.BLOCK) for x in factors], 2)
    return stacked.astype(jnp.float32)


class _Dual(NamedTuple):
    """Gradients with respect to states: at m those after chunk n - 1 - m, at n that before the first."""

    states: jax.Array  # float16 [H, n, U, E, P], times weights, divided by 2^(shift + WEIGHT_BITS)
    last: jax.Array  # float32 [H, U, 64, 48], divided by 2^shift_n
    norm: jax.Array  # float32 [H, n + 1, rows, rows], minus that with respect to Z, divided by 2^shift
    shift: jax.Array  # int32 [H, n + 1]


def _dual(base, rows, vector, scalars, dstate, head_dim, chunk, options):
    layout, config, interpret = (options[name] for name in ("layout", "config", "interpret"))
    heads, chunks = base.carry.shape
    start, start_norm = quartic.start_of(dstate, heads, head_dim, layout)

    def backwards(x):
        """[HN, X, ...] -> [H, n, group C, ...], chunks in reverse."""
        x = jnp.swapaxes(x.reshape(heads, -1, chunks, chunk, *x.shape[2:]), 1, 2)
        return jnp.flip(x.reshape(heads, chunks, -1, *x.shape[4:]), 1)

    groups = len(base.query) // heads
    decay = preparation.log2_scale(_decays(base, chunk).sum(2)[..., -chunk:]).reshape(heads, -1)
    positive = rows.inverse > 0
    log2_inverse = jnp.where(positive, jnp.log2(jnp.where(positive, rows.inverse, 1)), preparation.NOTHING)
    factor = backwards(jnp.maximum(jnp.repeat(decay, groups, 0) + log2_inverse, preparation.NOTHING))
    exponent = backwards(rows.exponent)
    narrow = numerics.scaled(backwards(rows.dout).astype(jnp.float32), -exponent[..., None])
    cut = base.log2_carry <= preparation.NEVER / 2
    carry = jnp.flip(jnp.where(cut, preparation.NEVER, base.log2_carry + _steps(base.shift)), 1)

    strength = factor + exponent
    shift = preparation.shifts(strength, jnp.abs(narrow).max(-1), carry, jnp.abs(start).max((1, 2, 3)))
    log2_carry = jnp.where(carry <= preparation.NEVER / 2, preparation.NEVER, carry - _steps(shift))
    after, unshift = shift[:, 1:, None], -shift[:, :1, None]
    narrow = narrow * jnp.exp2(strength - after)[..., None]
    time_last = preparation.time_last
    vector, scalars = (time_last(backwards(jnp.swapaxes(x, 1, 2))) for x in (vector, scalars))
    states, last = quartic.states_of(
        vector,
        scalars,
        narrow,
        jnp.exp2(log2_carry),
        log2_carry,
        numerics.scaled(start, unshift[..., None]),
        layout,
        config,
        interpret,
    )
    weight = jnp.exp2(factor - after) * backwards(rows.delta)
    norm = quartic.norms(vector, weight, log2_carry, numerics.scaled(-start_norm, unshift))
    return _Dual(states, last, norm, shift)


def _decays(base, chunk):
    """Running sums of base-2 logarithms, float32 [H, n, 2, W + C]."""
    return base.decay.reshape(*base.decay.shape[:3], -1)


def _steps(shift):
    return shift[:, 1:] - shift[:, :-1]


def _key(base, rows, dual, options):
    """dk float32 [H, Y, D], dv bfloat16 [H, Y, E] and sums [H, 2, Y]."""
    layout, chunk, window = (options[name] for name in ("layout", "chunk", "window"))
    heads, chunks = base.carry.shape
    length = chunk * (chunks + (window > 0))
    key, value = (preparation.pad(x, 0, length - x.shape[1]) for x in (base.key, base.value))
    exponent, value_exponent = (numerics.exponent(jnp.abs(x).max(-1)) for x in (key, value))
    narrow = numerics.scaled(key, -exponent[..., None])
    vector, scalars = quartic.pair_products(jnp.swapaxes(narrow, 1, 2).astype(jnp.float32), layout)
    vector = jnp.swapaxes(vector, 1, 2)

    # From keys to the states after their chunks as they are, and on to the dual ones as stored.
    unshift = (base.shift[:, 1:] + jnp.flip(dual.shift[:, :-1], 1))[..., None]
    kappa = numerics.scaled(base.strength[..., 0], unshift).reshape(heads, -1)
    kappa = preparation.pad(kappa, 0, length - kappa.shape[1])
    far = numerics.scaled(kappa, jnp.int32(layouts.WEIGHT_BITS))
    factors = key_kernel.Rows(
        numerics.scaled(jnp.ones_like(far), -value_exponent),
        numerics.scaled(far, value_exponent - 2 * exponent),
        far,
        *_frames(base, chunk, window),
    )
    columns = near_key_vjp.Columns(rows.inverse, rows.delta, *_query_decays(base, rows, chunk))
    gradient, dvalue, sums = key_kernel.key_vjp(
        key,
        vector,
        scalars,
        value,
        dual.states,
        base.query,
        rows.dout,
        _blocks(factors),
        _blocks(columns),
        **options,
    )
    old = vector[:, : chunk * chunks].reshape(heads, 1, chunks, chunk, layout.rows)
    slopes = quartic.norm_products(old, jnp.flip(dual.norm[:, :-1], 1), layout)
    slopes = preparation.pad(slopes.reshape(heads, -1, layout.rows), 0, length - chunk * chunks)
    # In units of the keys themselves: y has their squares.
    slopes = slopes * numerics.scaled(-2 * kappa, -2 * exponent)[..., None]
    gradient, sums = _add_norm(gradient, sums, slopes, key, layout)
    return gradient, dvalue, sums


def _frames(base, chunk, window):
    """The keys' decays in the frame of their own chunk, coarse and fine, and of the one before, float32 [H, Y]."""
    decays = _decays(base, chunk)
    behind = [(0, 0), (0, window > 0), (0, 0), (0, 0)]
    own = jnp.pad(decays[..., :chunk], behind)
    before = jnp.pad(decays[..., chunk:], [(0, 0), (1, 0), (0, 0), (0, chunk - window)])[:, : own.shape[1]]
    return [frame[:, :, part].reshape(len(frame), -1) for frame in (own, before) for part in range(2)]


def _query_decays(base, rows, chunk):
    decays = _decays(base, chunk)[..., -chunk:]
    groups = len(rows.dout) // len(decays)
    return [jnp.repeat(decays[:, :, part].reshape(len(decays), -1), groups, 0) for part in range(2)]


def _carries(base, saved, dual, layout):
    """The product of what is left of each state after a chunk with the gradient there, float32 [H, n]."""
    weights = layout.weights.reshape(layout.stacks, 1, layout.width)
    inverse = np.where(weights > 0, 4.0**layouts.WEIGHT_BITS / np.where(weights > 0, weights, 1), 0)
    inverse = jnp.asarray(inverse, jnp.float32)
    reverse = jnp.flip(dual.states, 1)
    product = (saved.states.astype(jnp.float32) * reverse.astype(jnp.float32) * inverse).sum((2, 3, 4))
    orders = quartic.orders_of_products(layout)
    weighted = saved.norm[:, :-1] * orders[:, None] * orders
    product -= (weighted * jnp.flip(dual.norm[:, :-1], 1)).sum((2, 3))
    # A carry holds the step from one power of two to the next.
    return base.carry * numerics.scaled(product, base.shift[:, 1:] + jnp.flip(dual.shift[:, :-1], 1))
