"""Gradients at p = 4 through states: operands of the backward kernels, and final steps on their sums.

The normalizer's contribution to gradients is added here, because the kernels have no room for its matrix.
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper import numerics
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state import prepare_vjp as preparation_vjp
from pallas_kernels.power_state.quartic import forward as quartic
from pallas_kernels.power_state.quartic import key_vjp as key_kernel
from pallas_kernels.power_state.quartic import layout as layouts
from pallas_kernels.power_state.quartic import query_vjp as query_kernel

__all__ = ["attend_vjp", "fold_vjp"]

_POWER = 4


def fold_vjp(prepared, key, value, dfinal, call: configs.Call):
    """Computes `power_state.fold_vjp` from its prepared arrays."""
    batch, _, kv_heads, head_dim = key.shape
    layout = layouts.layout_for(head_dim, value.shape[-1])
    end, end_norm = quartic.start_of(dfinal, batch * kv_heads, head_dim, layout)
    of, unit, _, mean = prepared
    length = mean.inverse.shape[1]
    dual = preparation_vjp.dual_of(of, mean, preparation.size_of(end, dfinal))
    strength = dual.carried.strength
    query, dout = (
        preparation_vjp.backwards(preparation_vjp.lengthened(x, length), strength.shape).astype(jnp.float32)
        for x in (unit, dual.value)
    )
    vector, scalars = quartic.pair_products(preparation.time_last(query), layout)
    duals, first = quartic.states_of(
        vector,
        scalars,
        preparation.time_last((dout * strength[..., None]).astype(vector.dtype)),
        dual.carried,
        end,
        layout=layout,
        call=call.with_chunk(strength.shape[2]),
    )
    norm = quartic.norms(vector, strength * dual.dnorm, dual.carried, end_norm, call.interpret)
    shift = dual.carried.shift
    sizes = batch, kv_heads, head_dim, value.shape[-1]
    saved = preparation.Saved.of(duals, norm, shift, batch)
    return saved, quartic.returned(first, norm[:, -1], shift[:, -1], layout, sizes)


def attend_vjp(prepared, saved, dual, batch_time, length, call: configs.Call):
    """Returns the gradients of queries [B, T, N, D], keys and values [B, T, K, ...], the kernels' sums, and <R, S>.

    <R, S> is [H, n]. saved, dual: with heads as the first axis; batch_time: B and T; length: of padded keys.
    """
    of, unit, exponent, mean = prepared
    unit, exponent = (preparation_vjp.lengthened(x, mean.inverse.shape[1]) for x in (unit, exponent))
    batch, time = batch_time
    layout = layouts.Layout(unit.shape[-1], mean.dout.shape[-1])
    options = {"layout": layout, **call.kernel_options}
    dquery, of_queries = _query_vjp(of, unit, mean, saved, options)
    dkey, dvalue, of_keys = _key_vjp(of, unit, mean, dual, length, options)
    own = slice(call.exact_window, call.exact_window + time)
    of_tokens = numerics.scaled(dquery, -exponent)[:, :time], dkey[:, own], dvalue[:, own]
    gradients = [preparation.tokens_second(x, batch).astype(unit.dtype) for x in of_tokens]
    return *gradients, of_queries, of_keys, _inner(of, saved, dual, layout)


def _query_vjp(of, unit, mean, saved, options):
    layout = options["layout"]
    heads, chunks = saved.shifts.shape
    group = len(unit) // heads
    vector, scalars = quartic.pair_products(jnp.swapaxes(unit, 1, 2).astype(jnp.float32), layout)
    vector = jnp.swapaxes(vector, 1, 2)
    scale = jnp.repeat(preparation.scale_of(of, saved.shifts).reshape(heads, -1), group, 0)
    exponent = numerics.exponent(mean.size)
    rows = query_kernel.Rows(
        narrow=numerics.scaled(jnp.ones_like(scale), -exponent),
        state=numerics.scaled(scale, exponent + layouts.WEIGHT_BITS),
        delta=mean.delta,
        inverse=mean.inverse,
    )
    gradient, sums = query_kernel.query_vjp(
        unit,
        vector,
        scalars,
        mean.dout,
        saved.states,
        of.key,
        of.value,
        of.decay,
        preparation_vjp.vectors(*rows),
        **options,
    )
    y = vector.reshape(heads, group, chunks, -1, layout.rows)
    slopes = quartic.norm_products(y, saved.norms, layout).reshape(vector.shape)
    slopes = slopes * (-2 * scale * mean.delta * mean.inverse)[..., None]
    return _with_norm(gradient, sums, slopes, unit, layout)


def _key_vjp(of, unit, mean, dual, length, options):
    layout, chunk, exact_window = (options[name] for name in ("layout", "chunk", "exact_window"))
    heads, chunks = dual.shifts.shape
    key, value = (
        preparation_vjp.lengthened(preparation.pad(preparation.heads_first(x), exact_window, 0), length)
        for x in (of.key, of.value)
    )
    exponent, value_exponent = (numerics.exponent(jnp.abs(x).max(-1)) for x in (key, value))
    narrow = numerics.scaled(key, -exponent[..., None])
    vector, scalars = quartic.pair_products(jnp.swapaxes(narrow, 1, 2).astype(jnp.float32), layout)
    vector = jnp.swapaxes(vector, 1, 2)

    # Factors from keys with largest entries in [1/2, 1) to the gradients of the states.
    met = of.to_state, jnp.flip(dual.shifts, 1)[..., None] + _POWER * of.old_exponent[..., 0]
    met = preparation_vjp.lengthened(preparation.scaled_decay(*met).reshape(heads, -1), length)
    factor = numerics.scaled(met, jnp.int32(layouts.WEIGHT_BITS))
    rows = key_kernel.Rows(
        numerics.scaled(jnp.ones_like(factor), -value_exponent),
        numerics.scaled(factor, value_exponent - 2 * exponent),
        factor,
        *preparation_vjp.decays_of_keys(of, length // chunk),
    )
    gradient, dvalue, sums = key_kernel.key_vjp(
        key,
        vector,
        scalars,
        value,
        dual.states,
        unit,
        mean.dout,
        preparation_vjp.vectors(*rows),
        preparation_vjp.columns(of, mean, exact_window),
        **options,
    )
    old = vector[:, : chunk * chunks].reshape(heads, 1, chunks, chunk, layout.rows)
    slopes = quartic.norm_products(old, jnp.flip(dual.norms, 1), layout)
    slopes = preparation_vjp.lengthened(slopes.reshape(heads, -1, layout.rows), length)
    # In the scale of the keys themselves: y contains their squares.
    slopes = slopes * numerics.scaled(2 * met, -2 * exponent)[..., None]
    gradient, sums = _with_norm(gradient, sums, slopes, key, layout)
    return gradient, dvalue, sums


def _with_norm(gradient, sums, slopes, x, layout):
    """Adds the normalizer's contribution, given the gradient of y, slopes [.., X, rows]."""
    x = x.astype(jnp.float32)
    share = _of_entries(slopes, x, layout)
    total = (share * x).sum(-1) / _POWER
    return gradient + share, sums + jnp.stack([jnp.zeros_like(total), total], 1)


def _of_entries(slopes, x, layout):
    """Returns the gradient of x [.., D], given that of its products of two entries, float32 [.., rows]."""
    size = layout.head_dim
    place = np.zeros((size, size), np.int32)
    low, high = layouts.pairs(size)
    place[low, high] = place[high, low] = np.arange(layout.products) + layout.rows - layout.products
    square = jnp.take(slopes, place.ravel(), axis=-1).reshape(*slopes.shape[:-1], size, size)
    return (square * (1 + np.eye(size, dtype=np.float32)) * x[..., None, :]).sum(-1)


def _inner(of, saved, dual, layout):
    """Returns <R, S> per chunk, float32 [H, n], of states that are stored times their weights."""
    weights = layout.weights.reshape(layout.stacks, 1, layout.width)
    inverse = np.where(weights > 0, 4.0**layouts.WEIGHT_BITS / np.where(weights > 0, weights, 1), 0)
    product = saved.states.astype(jnp.float32) * jnp.flip(dual.states, 1).astype(jnp.float32)
    inner = (product * inverse.astype(np.float32)).sum((2, 3, 4))
    orders = quartic.orders_of_products(layout)
    inner += (saved.norms * orders[:, None] * orders * jnp.flip(dual.norms, 1)).sum((2, 3))
    shift = (saved.shifts + jnp.flip(dual.shifts, 1)).astype(jnp.float32)
    return preparation.scaled_decay(of.over_chunk, shift) * inner
