"""Power attention through states at p = 4: what the kernels are given, and what becomes of their results."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import numerics
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state import quartic_layout as layouts
from pallas_kernels.power_state import quartic_query as query_kernel
from pallas_kernels.power_state import quartic_update as update_kernel
from pallas_kernels.power_state import segments

__all__ = [
    "Saved",
    "canonical",
    "fill",
    "forward",
    "norm_products",
    "norms",
    "orders_of_products",
    "pair_products",
    "power_state",
    "start_of",
    "states_of",
]


class Saved(NamedTuple):
    """What the forward pass leaves for the gradients, H = B K heads and n chunks."""

    states: (
        jax.Array
    )  # float16 [H, n, U, E, P], what chunks read: times weights, divided by 2^(shift + WEIGHT_BITS)
    shift: jax.Array  # int32 [H, n + 1]
    norm: (
        jax.Array
    )  # float32 [H, n + 1, rows, rows], Z before each chunk and after the last, divided by 2^shift


def power_state(query, key, value, log_decay, folds, initial_state, *, config, chunk, window, interpret):
    """As `forward.power_state` at p = 4, with no argument left out but `initial_state`."""
    options = {"config": config, "chunk": chunk, "window": window, "interpret": interpret}
    return forward(query, key, value, log_decay, folds, initial_state, **options)[:3]


def forward(query, key, value, log_decay, folds, initial_state, *, config, chunk, window, interpret):
    """What `power_state` returns, and `Saved`."""
    batch, time, heads, head_dim = query.shape
    kv_heads, value_dim = value.shape[2:]
    layout = layouts.layout_for(head_dim, value_dim)
    query, key = (fill(x, layout.head_dim) for x in (query, key))
    value = fill(value, layout.value_dim)
    start, start_norm = start_of(initial_state, batch * kv_heads, head_dim, layout)
    base = preparation.scale_all(
        query,
        key,
        value,
        log_decay,
        folds,
        jnp.abs(start).max((1, 2, 3)),
        power=4,
        chunk=chunk,
        window=window,
    )
    vector, scalars = pair_products(preparation.time_last(base.old_key), layout)
    unshift = -base.shift[:, :1, None]
    norm = norms(vector, base.strength[..., 0], base.log2_carry, numerics.scaled(start_norm, unshift))
    states, final = states_of(
        vector,
        scalars,
        base.old_value * base.strength,
        base.carry,
        base.log2_carry,
        numerics.scaled(start, unshift[..., None]),
        layout,
        config,
        interpret,
    )
    vector, scalars = pair_products(jnp.swapaxes(base.query, 1, 2).astype(jnp.float32), layout)
    vector = jnp.swapaxes(vector, 1, 2)
    out, total = query_kernel.query_states(
        base.query,
        vector,
        scalars,
        states,
        _denominator(vector, norm[:, :-1], base.scale, layout),
        base.key,
        base.value,
        base.decay,
        base.scale * 2.0**layouts.WEIGHT_BITS,
        layout=layout,
        config=config,
        chunk=chunk,
        window=window,
        interpret=interpret,
    )
    out = jnp.swapaxes(out.reshape(batch, heads, -1, layout.value_dim)[:, :, :time, :value_dim], 1, 2)
    total = jnp.swapaxes(total.reshape(batch, heads, -1)[:, :, :time], 1, 2)
    state = canonical(final, norm[:, -1], base.shift[:, -1], batch, head_dim, value_dim, layout)
    return out, total, state, Saved(states, base.shift, norm)


def start_of(state, heads, head_dim, layout):
    """A canonical state [B, K, F, E] and [B, K, F], or None, as [H, U, 64, 48] and the matrix Z [H, rows, rows]."""
    if state is None:
        start = jnp.zeros((heads, layout.stacks, configs.BLOCK, layouts.COLUMNS), jnp.float32)
        return start, jnp.zeros((heads, layout.rows, layout.rows), jnp.float32)
    filled = jnp.asarray(layouts.canonical_of(head_dim, layout))
    kv, norm = (_scattered(x.reshape(heads, *x.shape[2:]), filled, layout) for x in state)
    return (
        layouts.from_canonical(fill(kv, layout.value_dim), layout),
        layouts.norm_from_canonical(norm, layout),
    )


def canonical(state, norm, shift, batch, head_dim, value_dim, layout):
    """The inverse of `start_of`, of what was divided by 2^shift, int32 [H]."""
    filled = jnp.asarray(layouts.canonical_of(head_dim, layout))
    kv = numerics.scaled(layouts.to_canonical(state, layout)[:, filled, :value_dim], shift[:, None, None])
    norm = numerics.scaled(layouts.norm_to_canonical(norm, layout)[:, filled], shift[:, None])
    return kv.reshape(batch, -1, *kv.shape[1:]), norm.reshape(batch, -1, norm.shape[-1])


def fill(x, size):
    """Zeros behind the last axis."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def _scattered(x, positions, layout):
    """Canonical features [H, F, ...] of a smaller head size among those of the layout's, the others zero."""
    whole = jnp.zeros((len(x), math.comb(layout.head_dim + 3, 4), *x.shape[2:]), x.dtype)
    return whole.at[:, positions].set(x)


def pair_products(x, layout):
    """Products of two entries of x float32 [H, D, X] in float16: y [H, rows, X], and scalars [H, scalar_rows, X]."""

    def pairs(low, high, front, back):
        products = (jnp.take(x, low, axis=1) * jnp.take(x, high, axis=1)).astype(jnp.float16)
        return jnp.pad(products, [(0, 0), (front, back), (0, 0)])

    vector = pairs(*layouts.pairs(layout.head_dim), layout.rows - layout.products, 0)
    return vector, pairs(*layout.scalars.T, 0, layout.scalar_rows - layout.products)


def states_of(vector, scalars, value, carry, log2_carry, start, layout, config, interpret):
    """The states that chunks read, times their weights, and the last one, plain.

    vector, scalars: of `pair_products`; value: float32 [H, n, C, E], times the factors of what chunks add; start:
    float32 [H, U, 64, 48].
    """
    heads, chunks = carry.shape
    count = configs.segments(blocks=heads * len(layout.units), chunks=chunks)
    initial = jnp.zeros((heads, count, *start.shape[1:]), jnp.float32).at[:, 0].set(start)
    # A row of a stack for each value; repeated here, since a program holds its constants.
    weights = jnp.repeat(jnp.asarray(layout.weights) / 2**layouts.WEIGHT_BITS, layout.value_dim, 1)
    states, finals = update_kernel.update(
        vector,
        scalars,
        jnp.tile(preparation.time_last(value.astype(vector.dtype)), (1, layout.per_stack, 1)),
        carry,
        initial,
        weights,
        layout=layout,
        config=config,
        chunk=value.shape[2],
        dtype=jnp.float16,
        interpret=interpret,
    )

    def stored(state):
        return layouts.beside(state * weights, layout)

    return segments.join(states, finals, log2_carry, stored)


def norms(vector, strength, log2_carry, start):
    """Sums of y y^T, before each chunk and after the last, float32 [H, n + 1, rows, rows].

    vector: y, float16 [H, rows, X]; strength: float32 [H, n, C], the factors of what chunks add.

    Operands are float16: two roundings of 2^-12 in each of many terms, far below what the states' roundings do to the
    numerators. Strengths are divided by the largest of their chunk first, to stay in its range.
    """
    peak = jnp.abs(strength).max(-1, keepdims=True)
    relative = jnp.where(peak > 0, strength / jnp.where(peak > 0, peak, 1), 0)
    y = vector.reshape(*vector.shape[:2], *strength.shape[1:])
    weighted = (y * relative[:, None]).astype(vector.dtype)
    new = jnp.einsum("hanc,hbnc->hnab", weighted, y, preferred_element_type=jnp.float32)
    return preparation.norms(log2_carry, new * peak[..., None], start)


def norm_products(vector, norm, layout):
    """Z y, where the form y^T Z y counts both orders of each product, float32 [H, group, n, C, rows].

    vector: y, float16 [H, group, n, C, rows]; norm: float32 [H, n, rows, rows], symmetric.

    Z is rounded to float16, relative to its largest entry.
    """
    orders = orders_of_products(layout)
    norm = norm * orders[:, None] * orders
    peak = jnp.abs(norm).max((-1, -2), keepdims=True)
    norm = (norm / jnp.where(peak > 0, peak, 1)).astype(vector.dtype)
    product = jnp.einsum("hgnca,hnab->hgncb", vector, norm, preferred_element_type=jnp.float32)
    return product * peak[:, None]


def orders_of_products(layout):
    """In how many orders the two indices of each entry of y occur, float32 [rows]."""
    low, high = layouts.pairs(layout.head_dim)
    return np.pad(np.where(low == high, 1, 2), (layout.rows - layout.products, 0)).astype(np.float32)


def _denominator(vector, norm, scale, layout):
    """What states add to the sum of weights, y^T Z y of queries, float32 [HN, X / 64, 64].

    The error of Z in the sum is that of 528^2 products with signs of their own: about 2^-12 of the largest few, below
    1e-4 of the whole.
    """
    heads, chunks = norm.shape[:2]
    y = vector.reshape(heads, -1, chunks, vector.shape[1] // chunks, layout.rows)
    total = (norm_products(y, norm, layout) * y).sum(-1)
    # Rounding may leave a sum of fourth powers below zero.
    total = jnp.maximum(total, 0).reshape(heads, -1, *scale.shape[1:]) * scale[:, None]
    return total.reshape(-1, *scale.shape[1:])
