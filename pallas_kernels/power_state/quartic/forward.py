"""The forward pass at p = 4: operands of the kernels, and states in canonical order."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper import numerics
from pallas_kernels.power_state import configs, preparation, reshaping, segments
from pallas_kernels.power_state.quartic import layouts
from pallas_kernels.power_state.quartic import query as query_kernel
from pallas_kernels.power_state.quartic import update as update_kernel


class Operands(NamedTuple):
    """Tokens of a walk over the chunks, in its order, as in `update.Operands`."""

    vector: jax.Array  # float16 [H, layout.rows, X], products of two entries, y
    scalars: jax.Array  # float16 [H, layout.scalar_rows, X]
    value: jax.Array  # float16 [H, E, X], times its weight in the state after its chunk


def stored(state, sizes, config: configs.Config):
    """Returns a state (kv, norm) as stored states are, in float32 and its own scale: [H, U, E, P], [H, rows, rows].

    sizes: B, K, D and E before padding.
    """
    batch, kv_heads, head_dim, _ = sizes
    layout, heads = layouts.Layout(config.head_dim, config.value_dim), batch * kv_heads
    # Features of a smaller head size are placed among those of the layout, which are zero elsewhere.
    filled = jnp.asarray(layouts.canonical_of(head_dim, layout))
    kv, norm = (
        jnp.zeros((heads, math.comb(layout.head_dim + 3, 4), *x.shape[3:]), x.dtype)
        .at[:, filled]
        .set(x.reshape(heads, *x.shape[2:]))
        for x in state
    )
    kv = layouts.from_canonical(reshaping.fill(kv, layout.value_dim), layout)
    return layouts.side_by_side(kv * _weights(layout), layout), layouts.norm_from_canonical(norm, layout)


def returned(state, norm, shift, sizes, config: configs.Config):
    """Converts a state [H, U, 64, 48] and Z, both divided by 2^shift [H], to canonical order."""
    batch, kv_heads, head_dim, value_dim = sizes
    layout = layouts.Layout(config.head_dim, config.value_dim)
    filled = jnp.asarray(layouts.canonical_of(head_dim, layout))
    kv = numerics.scaled(layouts.to_canonical(state, layout)[:, filled, :value_dim], shift[:, None, None])
    norm = numerics.scaled(layouts.norm_to_canonical(norm, layout)[:, filled], shift[:, None])
    return kv.reshape(batch, kv_heads, *kv.shape[1:]), norm.reshape(batch, kv_heads, -1)


def _weights(layout):
    """Returns the factors of states when they are stored, float32 [U, 64, 48].

    Each value has its own row of a stack.
    """
    # Repeat at run time, since a program stores its constants.
    return jnp.repeat(jnp.asarray(layout.weights) / 2**layouts.WEIGHT_BITS, layout.value_dim, 1)


def operands_of_keys(tokens: preparation.Chunks, strength) -> Operands:
    """Returns the operands of the update with keys and values."""
    return operands_of(tokens.units.key_by_entry, tokens.folded_value, strength)


def operands_of(key, value, strength) -> Operands:
    """Returns the operands of a walk.

    key: float16 [H, D, any length]. value: float32 [H, n, C, E], with weights `strength` [H, n, C].
    """
    layout = layouts.Layout(key.shape[1], value.shape[-1])
    vector, scalars = _pair_products(reshaping.resized(key, strength[0].size, axis=2), layout)
    return Operands(vector, scalars, reshaping.time_last((value * strength[..., None]).astype(jnp.float16)))


def products_of_rows(by_entry, length, layout):
    """Returns y [H, `length`, rows] and the scalars [H, scalar_rows, `length`] of rows, [H, D, any length]; float16."""
    vector, scalars = _pair_products(reshaping.resized(by_entry, length, axis=2), layout)
    return jnp.swapaxes(vector, 1, 2), scalars


def _pair_products(x, layout):
    """Returns products of two entries of x float16 [H, D, X], in float16.

    These are y [H, rows, X], and the scalars [H, scalar_rows, X].
    """

    def pairs(low, high, front, back):
        # Rounded once, from float32.
        first, second = (jnp.take(x, n, axis=1).astype(jnp.float32) for n in (low, high))
        products = (first * second).astype(jnp.float16)
        return jnp.pad(products, [(0, 0), (front, back), (0, 0)])

    vector = pairs(*layouts.pairs(layout.head_dim), layout.rows - layout.products, 0)
    return vector, pairs(*layout.scalars.T, 0, layout.scalar_rows - layout.products)


def states(operands: Operands, carried: preparation.Carried, call: configs.Call):
    """Returns the states that chunks read, times their weights, and the plain final state; all divided by 2^shift."""
    layout = layouts.Layout(call.config.head_dim, call.config.value_dim)
    weights = _weights(layout)
    arrays = update_kernel.Operands(
        operands.vector,
        operands.scalars,
        jnp.tile(operands.value, (1, layout.per_stack, 1)),
        carried.scales.carry,
        weights,
    )
    found, finals = update_kernel.update(arrays, call=call)

    def weighted(state):
        return layouts.side_by_side(state * weights, layout)

    return segments.join(found, finals, carried.scales, weighted, interpret=call.interpret)


def norms(operands: Operands, weights, *_):
    """Returns Z of each chunk of the walk, sums of y y^T times `weights`, float32 [H, n, rows, rows].

    weights: float32 [H, n, C], at most 1, of either sign.

    Operands are float16: two roundings of 2^-12 in each of many terms, far below the effect of the states' roundings on
    the numerators.
    """
    y = operands.vector.reshape(*operands.vector.shape[:2], *weights.shape[1:])
    weighted = (y * weights[:, None]).astype(y.dtype)
    return jnp.einsum("hanc,hbnc->hnab", weighted, y, preferred_element_type=jnp.float32)


def norm_products(vector, norm, layout):
    """Returns Z y, where the form y^T Z y counts both orders of each product, float32 [H, group, n, C, rows].

    vector: y, float16 [H, group, n, C, rows]; norm: of `Saved`, symmetric.

    Z is rounded to float16, relative to its largest entry.
    """
    orders = orders_of_products(layout)
    norm = reshaping.unsplit(norm) * orders[:, None] * orders
    peak = jnp.abs(norm).max((-1, -2), keepdims=True)
    norm = (norm / jnp.where(peak > 0, peak, 1)).astype(vector.dtype)
    product = jnp.einsum("hgnca,hnab->hgncb", vector, norm, preferred_element_type=jnp.float32)
    return product * peak[:, None]


def orders_of_products(layout):
    """Returns the number of orders of the two indices of each entry of y, float32 [rows]."""
    low, high = layouts.pairs(layout.head_dim)
    return np.pad(np.where(low == high, 1, 2), (layout.rows - layout.products, 0)).astype(np.float32)


def attend(tokens: preparation.Chunks, saved: preparation.Saved, time, with_remainder, call: configs.Call):
    """Returns the results of `query.query_states`."""
    layout = layouts.Layout(call.config.head_dim, call.config.value_dim)
    scale = preparation.scale_of(tokens, saved.shifts)
    length = scale[0].size
    vector, scalars = products_of_rows(tokens.units.query_by_entry, length, layout)

    # The contribution of states to the sum of weights, y^T Z y of queries. The error of Z in the sum is that of 528^2
    # products with independent signs: about 2^-12 of the largest few, below 1e-4 of the total.
    heads, chunks = saved.shifts.shape
    y = vector.reshape(heads, -1, chunks, vector.shape[1] // chunks, layout.rows)
    total = (norm_products(y, saved.norms, layout) * y).sum(-1)
    # Rounding may make a sum of fourth powers negative.
    total = jnp.maximum(total, 0).reshape(heads, -1, *scale.shape[1:]) * scale[:, None]
    operands = query_kernel.Operands(
        query=reshaping.resized(tokens.units.query, length),
        vector=vector,
        scalars=scalars,
        states=saved.states,
        denominator=total.reshape(-1, *scale.shape[1:]),
        key=tokens.key,
        value=tokens.value,
        decay=tokens.decays.of_keys,
        scale=scale * 2.0**layouts.WEIGHT_BITS,
    )
    return query_kernel.query_states(operands, time=time, with_remainder=with_remainder, call=call)
