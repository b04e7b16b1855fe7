"""Power attention through states at p = 4: operands of the kernels, and final steps on their results."""

import math

import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper import numerics
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state import recurrence, segments
from pallas_kernels.power_state.quartic import layout as layouts
from pallas_kernels.power_state.quartic import query as query_kernel
from pallas_kernels.power_state.quartic import update as update_kernel

__all__ = [
    "attend",
    "fold",
    "norm_products",
    "norms",
    "orders_of_products",
    "pair_products",
    "returned",
    "start_of",
    "states_of",
    "stored_start",
]


def fold(key, value, log_decay, folds, initial_state, call: configs.Call):
    """Computes `power_state.fold`; Z is [rows, rows] of the layout."""
    batch, _, kv_heads, head_dim = key.shape
    value_dim = value.shape[-1]
    layout = layouts.layout_for(head_dim, value_dim)
    start, start_norm = start_of(initial_state, batch * kv_heads, head_dim, layout)
    padded = layout.head_dim, layout.value_dim
    of = preparation.tokens(key, value, log_decay, folds, sizes=padded, call=call)
    carried = preparation.carried_keys(of, preparation.size_of(start, initial_state), 4)
    vector, scalars = pair_products(preparation.time_last(of.old_key), layout)
    norm = norms(vector, carried.strength, carried, start_norm, call.interpret)
    value = preparation.time_last((of.old_value * carried.strength[..., None]).astype(vector.dtype))
    states, final = states_of(vector, scalars, value, carried, start, layout=layout, call=call)

    sizes = batch, kv_heads, head_dim, value_dim
    saved = preparation.Saved.of(states, norm, carried.shift, batch)
    return saved, returned(final, norm[:, -1], carried.shift[:, -1], layout, sizes)


def attend(query, key, value, log_decay, folds, saved, with_remainder, call: configs.Call):
    """Computes `power_state.attend`."""
    batch, time, _, head_dim = query.shape
    value_dim = value.shape[-1]
    layout = layouts.layout_for(head_dim, value_dim)
    padded = layout.head_dim, layout.value_dim
    of = preparation.tokens(key, value, log_decay, folds, sizes=padded, call=call)
    unit, _ = preparation.queries(preparation.fill(query, layout.head_dim))
    unit = preparation.pad(unit, 0, -unit.shape[1] % call.chunk)
    states, norm, shift = saved.by_head()
    scale = preparation.scale_of(of, shift)
    vector, scalars = pair_products(jnp.swapaxes(unit, 1, 2).astype(jnp.float32), layout)
    vector = jnp.swapaxes(vector, 1, 2)
    *means, total = query_kernel.query_states(
        unit,
        vector,
        scalars,
        states,
        _denominator(vector, norm, scale, layout),
        of.key,
        of.value,
        of.decay,
        scale * 2.0**layouts.WEIGHT_BITS,
        layout=layout,
        batch_time=(batch, time),
        with_remainder=with_remainder,
        **call.kernel_options,
    )
    means = (x[..., :value_dim] for x in means)
    return *means, preparation.tokens_second(total, batch)[:, :time]


def start_of(initial_state, heads, head_dim, layout):
    """Converts an initial state to the layout: [H, U, 64, 48] and Z [H, rows, rows]."""
    if initial_state is None:
        start = jnp.zeros((heads, layout.stacks, configs.BLOCK, layouts.COLUMNS), jnp.float32)
        return start, jnp.zeros((heads, layout.rows, layout.rows), jnp.float32)
    filled = jnp.asarray(layouts.canonical_of(head_dim, layout))
    kv, norm = (_scattered(x.reshape(heads, *x.shape[2:]), filled, layout) for x in initial_state)
    start = layouts.from_canonical(preparation.fill(kv, layout.value_dim), layout)
    return start, layouts.norm_from_canonical(norm, layout)


def returned(state, norm, shift, layout, sizes):
    """Converts a stored state and its normalizer to canonical order: the inverse of `start_of`."""
    batch, kv_heads, head_dim, value_dim = sizes
    filled = jnp.asarray(layouts.canonical_of(head_dim, layout))
    kv = numerics.scaled(layouts.to_canonical(state, layout)[:, filled, :value_dim], shift[:, None, None])
    norm = numerics.scaled(layouts.norm_to_canonical(norm, layout)[:, filled], shift[:, None])
    return kv.reshape(batch, kv_heads, *kv.shape[1:]), norm.reshape(batch, kv_heads, -1)


def stored_start(state, key, value):
    """Converts a state (kv, norm) to the layout of stored states, but in float32 and in its own scale."""
    layout = layouts.layout_for(key.shape[-1], value.shape[-1])
    start, norm = start_of(state, key.shape[0] * key.shape[2], key.shape[-1], layout)
    return layouts.side_by_side(start * _weights(layout), layout), norm


def _weights(layout):
    """Returns the factors of states when they are stored, float32 [U, 64, 48].

    Each value has its own row of a stack.
    """
    # Repeat at run time, since a program stores its constants.
    return jnp.repeat(jnp.asarray(layout.weights) / 2**layouts.WEIGHT_BITS, layout.value_dim, 1)


def _scattered(x, positions, layout):
    """Places canonical features [H, F, ...] of a smaller head size among those of the layout, zero elsewhere."""
    whole = jnp.zeros((len(x), math.comb(layout.head_dim + 3, 4), *x.shape[2:]), x.dtype)
    return whole.at[:, positions].set(x)


def pair_products(x, layout):
    """Returns products of two entries of x float32 [H, D, X], in float16.

    These are y [H, rows, X], and the scalars [H, scalar_rows, X].
    """

    def pairs(low, high, front, back):
        products = (jnp.take(x, low, axis=1) * jnp.take(x, high, axis=1)).astype(jnp.float16)
        return jnp.pad(products, [(0, 0), (front, back), (0, 0)])

    vector = pairs(*layouts.pairs(layout.head_dim), layout.rows - layout.products, 0)
    return vector, pairs(*layout.scalars.T, 0, layout.scalar_rows - layout.products)


def states_of(vector, scalars, value, carried, start, *, layout, call: configs.Call):
    """Returns the states that chunks read, times their weights, and the plain final state; all divided by 2^shift."""
    weights = _weights(layout)
    states, finals = update_kernel.update(
        vector,
        scalars,
        jnp.tile(value, (1, layout.per_stack, 1)),
        carried.carry,
        numerics.scaled(start, -carried.shift[:, :1, None, None]),
        weights,
        layout=layout,
        config=call.config,
        chunk=call.chunk,
        interpret=call.interpret,
    )

    def stored(state):
        return layouts.side_by_side(state * weights, layout)

    return segments.join(states, finals, carried.log2_carry, stored, interpret=call.interpret)


def norms(vector, strength, carried, start, interpret):
    """Returns the normalizers Z before each chunk and after the last, [H, n + 1, rows, rows].

    Z is the sum of y y^T with weights `strength`. vector: y, float16 [H, rows, X]; strength: float32 [H, n, C], of
    either sign; start: float32 [H, rows, rows]. The result is float32, scaled like the states.

    Operands are float16: two roundings of 2^-12 in each of many terms, far below the effect of the states' roundings on
    the numerators. Weights are first divided by the largest of their chunk, to stay in range.
    """
    peak = jnp.abs(strength).max(-1, keepdims=True)
    relative = jnp.where(peak > 0, strength / jnp.where(peak > 0, peak, 1), 0)
    y = vector.reshape(*vector.shape[:2], *strength.shape[1:])
    weighted = (y * relative[:, None]).astype(vector.dtype)
    new = jnp.einsum("hanc,hbnc->hnab", weighted, y, preferred_element_type=jnp.float32)
    start = numerics.scaled(start, -carried.shift[:, :1, None])
    return recurrence.recurrence(carried.carry, peak[..., 0], new, start, interpret=interpret)


def norm_products(vector, norm, layout):
    """Returns Z y, where the form y^T Z y counts both orders of each product, float32 [H, group, n, C, rows].

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
    """Returns the number of orders of the two indices of each entry of y, float32 [rows]."""
    low, high = layouts.pairs(layout.head_dim)
    return np.pad(np.where(low == high, 1, 2), (layout.rows - layout.products, 0)).astype(np.float32)


def _denominator(vector, norm, scale, layout):
    """Returns the contribution of states to the sum of weights, y^T Z y of queries, float32 [HN, X / 64, 64].

    The error of Z in the sum is that of 528^2 products with independent signs: about 2^-12 of the largest few, below
    1e-4 of the total.
    """
    heads, chunks = norm.shape[:2]
    y = vector.reshape(heads, -1, chunks, vector.shape[1] // chunks, layout.rows)
    total = (norm_products(y, norm, layout) * y).sum(-1)
    # Rounding may make a sum of fourth powers negative.
    total = jnp.maximum(total, 0).reshape(heads, -1, *scale.shape[1:]) * scale[:, None]
    return total.reshape(-1, *scale.shape[1:])
