"""Power attention through states at p = 4: what the kernels are given, and what becomes of their results."""

import math

import jax.numpy as jnp
import numpy as np

from pallas_kernels import numerics
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state import quartic_layout as layouts
from pallas_kernels.power_state import quartic_query as query_kernel
from pallas_kernels.power_state import quartic_update as update_kernel
from pallas_kernels.power_state import segments

__all__ = ["power_state"]


def power_state(query, key, value, log_decay, folds, initial_state, *, config, chunk, window, interpret):
    """As `forward.power_state` at p = 4, with no argument left out but `initial_state`."""
    batch, time, heads, head_dim = query.shape
    kv_heads, value_dim = value.shape[2:]
    layout = layouts.layout_for(head_dim, value_dim)
    filled = jnp.asarray(layouts.canonical_of(head_dim, layout))
    query, key = (_fill(x, layout.head_dim) for x in (query, key))
    value = _fill(value, layout.value_dim)
    if initial_state is None:
        start = jnp.zeros((batch * kv_heads, layout.stacks, configs.BLOCK, layouts.COLUMNS), jnp.float32)
        start_norm = jnp.zeros((batch * kv_heads, layout.rows, layout.rows), jnp.float32)
    else:
        kv, norm = (x.reshape(batch * kv_heads, *x.shape[2:]) for x in initial_state)
        kv, norm = (_scattered(x, filled, layout) for x in (kv, norm))
        start = layouts.from_canonical(_fill(kv, layout.value_dim), layout)
        start_norm = layouts.norm_from_canonical(norm, layout)

    base = preparation.scale_all(
        query,
        key,
        value,
        log_decay,
        folds,
        # XLA folds the largest of many constant zeros while it compiles, for seconds a layer.
        jnp.zeros(len(start)) if initial_state is None else jnp.abs(start).max((1, 2, 3)),
        power=4,
        chunk=chunk,
        window=window,
    )
    vector, scalars = _products(preparation.time_last(base.old_key), layout)
    norm = _norms(vector, base, start_norm)
    states, final = _states(vector, scalars, base, start, layout, config, chunk, interpret)
    vector, scalars = _products(jnp.swapaxes(base.query, 1, 2).astype(jnp.float32), layout)
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
    unscale = jnp.exp2(base.shift[:, -1].astype(jnp.float32))
    kv = layouts.to_canonical(final, layout)[:, filled, :value_dim] * unscale[:, None, None]
    norm = layouts.norm_to_canonical(norm[:, -1], layout)[:, filled] * unscale[:, None]
    return out, total, (kv.reshape(batch, kv_heads, *kv.shape[1:]), norm.reshape(batch, kv_heads, -1))


def _fill(x, size):
    """Zeros behind the last axis."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def _scattered(x, positions, layout):
    """Canonical features [H, F, ...] of a smaller head size among those of the layout's, the others zero."""
    whole = jnp.zeros((len(x), math.comb(layout.head_dim + 3, 4), *x.shape[2:]), x.dtype)
    return whole.at[:, positions].set(x)


def _products(x, layout):
    """Products of two entries of x float32 [H, D, X] in float16: y [H, rows, X], and scalars [H, scalar_rows, X]."""

    def pairs(low, high, front, back):
        products = (jnp.take(x, low, axis=1) * jnp.take(x, high, axis=1)).astype(jnp.float16)
        return jnp.pad(products, [(0, 0), (front, back), (0, 0)])

    vector = pairs(*layouts.pairs(layout.head_dim), layout.rows - layout.products, 0)
    return vector, pairs(*layout.scalars.T, 0, layout.scalar_rows - layout.products)


def _states(vector, scalars, base, start, layout, config, chunk, interpret):
    """The states that chunks read, times their weights, and the last one, plain; all divided by 2^shift."""
    heads, chunks = base.carry.shape
    count = configs.segments(blocks=heads * len(layout.units), chunks=chunks)
    initial = jnp.zeros((heads, count, *start.shape[1:]), jnp.float32)
    initial = initial.at[:, 0].set(numerics.scaled(start, -base.shift[:, :1, None, None]))
    value = preparation.time_last((base.old_value * base.strength).astype(vector.dtype))
    # A row of a stack for each value; repeated here, since a program holds its constants.
    weights = jnp.repeat(jnp.asarray(layout.weights) / 2**layouts.WEIGHT_BITS, layout.value_dim, 1)
    states, finals = update_kernel.update(
        vector,
        scalars,
        jnp.tile(value, (1, layout.per_stack, 1)),
        base.carry,
        initial,
        weights,
        layout=layout,
        config=config,
        chunk=chunk,
        dtype=jnp.float16,
        interpret=interpret,
    )

    def stored(state):
        return layouts.beside(state * weights, layout)

    return segments.join(states, finals, base.log2_carry, stored)


def _norms(vector, base, start):
    """Z, sums of y y^T, before each chunk and after the last, float32 [H, n + 1, rows, rows], scaled like the states.

    Operands are float16: two roundings of 2^-12 in each of many terms, far below what the states' roundings do to the
    numerators. Strengths are divided by the largest of their chunk first, to stay in its range.
    """
    strength = base.strength[..., 0]
    peak = strength.max(-1, keepdims=True)
    relative = jnp.where(peak > 0, strength / jnp.where(peak > 0, peak, 1), 0)
    y = vector.reshape(*vector.shape[:2], *strength.shape[1:])
    weighted = (y * relative[:, None]).astype(vector.dtype)
    new = jnp.einsum("hanc,hbnc->hnab", weighted, y, preferred_element_type=jnp.float32)
    start = numerics.scaled(start, -base.shift[:, :1, None])
    return preparation.norms(base.log2_carry, new * peak[..., None], start)


def _denominator(vector, norm, scale, layout):
    """What states add to the sum of weights, y^T Z y of queries, float32 [HN, X / 64, 64].

    Z is rounded to float16, relative to its largest entry. Its error in the sum is that of 528^2 products with signs of
    their own: about 2^-12 of the largest few, below 1e-4 of the whole.
    """
    heads, chunks = norm.shape[:2]
    low, high = layouts.pairs(layout.head_dim)
    # Entries of y off the diagonal stand for both orders of their indices.
    orders = np.pad(np.where(low == high, 1, 2), (layout.rows - layout.products, 0)).astype(np.float32)
    norm = norm * orders[:, None] * orders
    peak = jnp.abs(norm).max((-1, -2), keepdims=True)
    norm = (norm / jnp.where(peak > 0, peak, 1)).astype(vector.dtype)
    y = vector.reshape(heads, -1, chunks, vector.shape[1] // chunks, layout.rows)
    product = jnp.einsum("hgnca,hnab->hgncb", y, norm, preferred_element_type=jnp.float32)
    total = (product * y).sum(-1) * peak[:, None, ..., 0]
    # Rounding may leave a sum of fourth powers below zero.
    total = jnp.maximum(total, 0).reshape(heads, -1, *scale.shape[1:]) * scale[:, None]
    return total.reshape(-1, *scale.shape[1:])
