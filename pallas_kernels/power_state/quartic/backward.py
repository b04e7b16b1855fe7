"""The backward pass at p = 4: operands of the kernels, final steps on their sums, and <R, S>.

The normalizer's contribution to gradients is added here, because the kernels have no room for its matrix.
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper import numerics
from pallas_kernels.power_state import configs, preparation, preparation_vjp, reshaping
from pallas_kernels.power_state import units as units_kernel
from pallas_kernels.power_state.quartic import forward, layouts
from pallas_kernels.power_state.quartic import key_vjp as key_kernel
from pallas_kernels.power_state.quartic import query_vjp as query_kernel

_POWER = 4


def operands_of_queries(units: units_kernel.Units, walk: preparation_vjp.ReverseWalk) -> forward.Operands:
    """Returns the operands of the walk that computes the gradients of states, from scaled queries."""
    strength = walk.carried.strength
    query, value = (
        preparation_vjp.in_walk(reshaping.resized(x, strength.size // len(x)), strength.shape)
        for x in (units.query, walk.value)
    )
    return forward.operands_of(reshaping.time_last(query.astype(jnp.float16)), value, strength)


def query_vjp(
    tokens: preparation.Chunks,
    mean: preparation_vjp.MeanCotangent,
    saved: preparation.Saved,
    time,
    call: configs.Call,
):
    """Returns the gradients of queries [B, T, N, D] and the kernel's sums, [HN, 2, X]; `saved` is by head."""
    length = mean.inverse.shape[1]
    unit = reshaping.resized(tokens.units.query, length)
    layout = layouts.Layout(call.config.head_dim, call.config.value_dim)
    heads, chunks = saved.shifts.shape
    group = len(unit) // heads
    vector, scalars = forward.products_of_rows(tokens.units.query_by_entry, length, layout)
    scale = jnp.repeat(preparation.scale_of(tokens, saved.shifts).reshape(heads, -1), group, 0)
    dout_exponent = numerics.exponent(mean.size)
    rows = query_kernel.Rows(
        narrow=numerics.scaled(jnp.ones_like(scale), -dout_exponent),
        state=numerics.scaled(scale, dout_exponent + layouts.WEIGHT_BITS),
        delta=mean.delta,
        inverse=mean.inverse,
    )
    operands = query_kernel.Operands(
        query=unit,
        vector=vector,
        scalars=scalars,
        dout=mean.dout,
        states=saved.states,
        key=tokens.key,
        value=tokens.value,
        decay=tokens.decays.of_keys,
        rows=preparation_vjp.vectors(*rows),
    )
    gradient, sums = query_kernel.query_vjp(operands, call=call)
    y = vector.reshape(heads, group, chunks, -1, layout.rows)
    dy = forward.norm_products(y, saved.norms, layout).reshape(vector.shape)
    dy = dy * (-2 * scale * mean.delta * mean.inverse)[..., None]
    gradient, sums = _with_norm(gradient, sums, dy, unit, layout)
    exponent = reshaping.resized(tokens.units.query_exponent, length)[..., None]
    gradient = numerics.scaled(gradient, -exponent)[:, :time]
    return reshaping.from_heads_first(gradient, len(tokens.key)).astype(unit.dtype), sums


def key_vjp(
    tokens: preparation.Chunks,
    mean: preparation_vjp.MeanCotangent,
    dual: preparation.Saved,
    time,
    length,
    call: configs.Call,
):
    """Returns the gradients of keys and values [B, T, K, ...] and the kernel's sums, [H, 2, `length`].

    dual: the gradients of states by head.
    """
    layout, exact_window = layouts.Layout(call.config.head_dim, call.config.value_dim), call.exact_window
    heads, chunks = dual.shifts.shape
    key, value = (
        reshaping.resized(reshaping.pad(reshaping.heads_first(x), exact_window, 0), length)
        for x in (tokens.key, tokens.value)
    )
    units = tokens.units
    exponent, value_size = (reshaping.resized(x, length) for x in (units.key_exponent, units.value_size))
    value_exponent = numerics.exponent(value_size)
    vector, scalars = forward.products_of_rows(units.key_by_entry, length, layout)

    # Factors from keys with largest entries in [1/2, 1) to the gradients of the states.
    met = (
        tokens.decays.log2_to_end,
        jnp.flip(dual.shifts, 1)[..., None] + _POWER * tokens.folded_exponent,
    )
    met = reshaping.resized(preparation.scaled_decay(*met).reshape(heads, -1), length)
    factor = numerics.scaled(met, jnp.int32(layouts.WEIGHT_BITS))
    rows = key_kernel.Rows(
        numerics.scaled(jnp.ones_like(factor), -value_exponent),
        numerics.scaled(factor, value_exponent - 2 * exponent),
        factor,
        *preparation_vjp.decays_of_keys(tokens, length // call.chunk),
    )
    operands = key_kernel.Operands(
        key=key,
        vector=vector,
        scalars=scalars,
        value=value,
        states=dual.states,
        query=reshaping.resized(units.query, mean.inverse.shape[1]),
        dout=mean.dout,
        rows=preparation_vjp.vectors(*rows),
        columns=preparation_vjp.columns(tokens, mean, exact_window),
    )
    gradient, dvalue, sums = key_kernel.key_vjp(operands, call=call)
    old = vector[:, : call.chunk * chunks].reshape(heads, 1, chunks, call.chunk, layout.rows)
    dy = forward.norm_products(old, jnp.flip(dual.norms, 1), layout)
    dy = reshaping.resized(dy.reshape(heads, -1, layout.rows), length)
    # In the scale of the keys themselves: y contains their squares.
    dy = dy * numerics.scaled(2 * met, -2 * exponent)[..., None]
    gradient, sums = _with_norm(gradient, sums, dy, key, layout)
    dkey, dvalue = (
        reshaping.from_heads_first(x[:, exact_window : exact_window + time], len(tokens.key)).astype(
            tokens.key.dtype
        )
        for x in (gradient, dvalue)
    )
    return dkey, dvalue, sums


def _with_norm(gradient, sums, dy, x, layout):
    """Adds the normalizer's contribution, given the gradient of y, float32 [.., X, rows]."""
    x, size = x.astype(jnp.float32), layout.head_dim
    # The gradient of x [.., D] through its products of two entries.
    place = np.zeros((size, size), np.int32)
    low, high = layouts.pairs(size)
    place[low, high] = place[high, low] = np.arange(layout.products) + layout.rows - layout.products
    square = jnp.take(dy, place.ravel(), axis=-1).reshape(*dy.shape[:-1], size, size)
    share = (square * (1 + np.eye(size, dtype=np.float32)) * x[..., None, :]).sum(-1)
    total = (share * x).sum(-1) / _POWER
    return gradient + share, sums + jnp.stack([jnp.zeros_like(total), total], 1)


def inner(tokens: preparation.Chunks, saved: preparation.Saved, dual: preparation.Saved):
    """Returns <R, S> per chunk, float32 [H, n], of states that are stored times their weights.

    S is the state before the chunk, decayed over it, and R the gradient of the state after it, both in order of time.
    """
    layout = layouts.Layout(tokens.key.shape[-1], tokens.value.shape[-1])
    weights = layout.weights.reshape(layout.stacks, 1, layout.width)
    inverse = np.where(weights > 0, 4.0**layouts.WEIGHT_BITS / np.where(weights > 0, weights, 1), 0)
    product = saved.states.astype(jnp.float32) * dual.states.astype(jnp.float32)
    product = (product * inverse.astype(np.float32)).sum((2, 3, 4))
    orders = forward.orders_of_products(layout)
    return preparation_vjp.inner_of(tokens, saved, dual, product, orders[:, None] * orders)
