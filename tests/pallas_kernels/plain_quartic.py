"""NumPy stand-ins for the state kernels at p = 4, with the same arguments and roundings.

Gradients of values stay float32. `kernels` substitutes these functions, traced or not.
"""

import contextlib
import functools
from unittest import mock

import jax
import numpy as np

from pallas_kernels.power_state import configs, window_queries
from pallas_kernels.power_state.quartic import backward as quartic_vjp
from pallas_kernels.power_state.quartic import forward as quartic
from pallas_kernels.power_state.quartic import key_vjp as quartic_key_vjp
from pallas_kernels.power_state.quartic import layouts
from pallas_kernels.power_state.quartic import query_vjp as quartic_query_vjp
from sympow_jax.ops import sharding

__all__ = ["KERNELS", "kernels"]


@contextlib.contextmanager
def kernels(multiprocessors=20):
    """Replaces the kernels within this context; few multiprocessors make two segments of two heads at D = 16."""
    with contextlib.ExitStack() as stack:
        for module, function, shapes in KERNELS:
            called = functools.partial(_called, function, shapes)
            stack.enter_context(mock.patch.object(module, function.__name__, called))
        stack.enter_context(mock.patch.object(configs, "MULTIPROCESSORS", multiprocessors))
        yield


def _called(function, shapes, operands, **options):
    """Calls a NumPy function with arrays that may be traced."""
    out = [jax.ShapeDtypeStruct(*x) for x in shapes(operands, **options)]

    def call(operands):
        results = function(jax.tree.map(np.asarray, operands), **options)
        return [np.asarray(x, shape.dtype) for x, shape in zip(results, out, strict=True)]

    # Results of a callback lose the manual mesh axes that they vary over, which results of the kernels keep.
    return sharding.same_variation((operands, jax.pure_callback(call, out, operands)))[1]


def _layout(call):
    return layouts.Layout(call.config.head_dim, call.config.value_dim)


def _shapes_of_update(operands, *, call):
    layout = _layout(call)
    finals = len(operands.carry), call.config.segments, layout.stacks, configs.BLOCK, layouts.COLUMNS
    shape = *operands.carry.shape, layout.stacks, layout.value_dim, layout.width
    return (shape, np.float16), (finals, np.float32)


def _shapes_of_query(operands, *, time, with_remainder, call):
    (heads, length, _), batch = operands.query.shape, len(operands.key)
    shape, dtype = (batch, time, heads // batch, operands.value.shape[-1]), operands.query.dtype
    return *[(shape, dtype)] * (1 + with_remainder), ((heads, length), np.float32)


def _shapes_of_query_vjp(operands, *, call):
    heads, time, _ = operands.query.shape
    return (operands.query.shape, np.float32), ((heads, 2, time), np.float32)


def _shapes_of_key_vjp(operands, *, call):
    heads, time, _ = operands.key.shape
    gradients = [(x.shape, np.float32) for x in (operands.key, operands.value)]
    return *gradients, ((heads, 2, time), np.float32)


def single(x):
    return np.asarray(x, np.float32)


def rounded(x):
    return single(x.astype(np.float16))


def blocks_and_scalars(vector, scalars, layout):
    """Returns columns [U, 48, X] and scalars [U, 64 / E, X] of every stack, from [rows, X] and [scalar_rows, X]."""
    column, scalar = _of_stacks(layout)
    return vector[column], scalars[scalar]


def _in_heads(x, before, length):
    """Returns [B, T, N, ...] as [HN, `length`, ...], with `before` zeros in front."""
    x = np.swapaxes(x, 1, 2).reshape(-1, x.shape[1], x.shape[3])[:, : length - before]
    return np.pad(x, [(0, 0), (before, length - before - x.shape[1]), (0, 0)])


def query_vjp(operands, *, call):
    query, vector, scalars, dout, states, key, value, decay, rows = operands
    (heads, time, _), layout, chunk, exact_window = query.shape, _layout(call), call.chunk, call.exact_window
    key, value = (_in_heads(x, exact_window, exact_window + time) for x in (key, value))
    dout = _in_heads(dout, 0, time)
    gradient, sums = np.zeros(query.shape, np.float32), np.zeros((heads, 2, time), np.float32)
    rows = _vectors(rows)
    for head in range(heads):
        held = head // (heads // len(states))
        for c in range(time // chunk):
            own = slice(c * chunk, (c + 1) * chunk)
            seen = slice(c * chunk, (c + 1) * chunk + exact_window)
            row = quartic_query_vjp.Rows(*rows[head, :, own, None])
            q, do = single(query[head, own]), single(dout[head, own])
            y = single(vector[head, own]).T, single(scalars[head, :, own])
            far, _ = _far(q, do * row.narrow, *y, single(states[held, c]), layout)
            far = row.state * far
            k, v = single(key[held, seen]), single(value[held, seen])
            scores, gamma = _near(q, k, single(decay[held, c]), exact_window)
            slopes = gamma * scores**3 * (do @ v.T - row.delta)
            gradient[head, own] = row.inverse * (far + 4 * slopes @ k)
            sums[head, 0, own] = row.inverse[:, 0] * (slopes * scores).sum(1)
            sums[head, 1, own] = row.inverse[:, 0] * (q * far).sum(1) / 4
    return gradient, sums


def key_vjp(operands, *, call):
    key, vector, scalars, value, dual, query, dout, rows, columns = operands
    (heads, time, _), layout, chunk, exact_window = key.shape, _layout(call), call.chunk, call.exact_window
    chunks, group = dual.shape[1], len(query) // heads
    dout = _in_heads(dout, 0, query.shape[1])
    dkey, dvalue = np.zeros(key.shape, np.float32), np.zeros(value.shape, np.float32)
    sums = np.zeros((heads, 2, time), np.float32)
    rows, columns = _vectors(rows), _vectors(columns)
    for head in range(heads):
        for c in range(chunks):
            old = slice(c * chunk, (c + 1) * chunk)
            row = quartic_key_vjp.Rows(*rows[head, :, old, None])
            k, v = single(key[head, old]), single(value[head, old])
            y = single(vector[head, old]).T, single(scalars[head, :, old])
            far, state_value = _far(k, v * row.narrow_value, *y, single(dual[head, chunks - 1 - c]), layout)
            dkey[head, old] += row.state_key * far
            dvalue[head, old] += row.state_value * state_value
            sums[head, 1, old] += (k * row.state_key * far).sum(1) / 4
            # Queries of this chunk and all keys visible to them; keys of the next chunk use their `before` frame.
            seen = slice(c * chunk, min((c + 1) * chunk + exact_window, time))
            row = quartic_key_vjp.Rows(*rows[head, :, seen])
            later = np.arange(seen.stop - seen.start) >= chunk
            decays = np.stack(
                [np.where(later, row.coarse_before, row.coarse), np.where(later, row.fine_before, row.fine)]
            )
            k, v = single(key[head, seen]), single(value[head, seen])
            for member in range(head * group, (head + 1) * group):
                column = window_queries.Columns(*columns[member, :, old, None])
                q, do = single(query[member, old]), single(dout[member, old])
                own = np.concatenate([column.coarse, column.fine], 1).T
                scores, gamma = _near(q, k, decays, exact_window, own)
                slopes = gamma * scores**3 * column.inverse * (do @ v.T - column.delta)
                dkey[head, seen] += 4 * slopes.T @ q
                dvalue[head, seen] += (gamma * scores**4 * column.inverse).T @ do
                sums[head, 0, seen] += (slopes * scores).sum(0)
    return dkey, dvalue, sums


def update(operands, *, call):
    """Computes `quartic.update.update`."""
    vector, scalars, value, carry, weights = operands
    (heads, chunks), layout, segments = carry.shape, _layout(call), call.config.segments
    chunk = value.shape[2] // chunks
    stored, finals = [], np.zeros((heads, segments, *weights.shape), np.float32)
    for head in range(heads):
        columns, factors = blocks_and_scalars(single(vector[head]), single(scalars[head]), layout)
        factors = np.repeat(factors, layout.value_dim, 1)
        for index in range(chunks):
            state = finals[head, index // -(-chunks // segments)]
            stored.append(_beside(rounded(state * single(weights)), layout))
            time = slice(index * chunk, (index + 1) * chunk)
            scaled = rounded(single(value[head, :, time]) * factors[..., time])
            state *= float(carry[head, index])
            state += scaled @ np.swapaxes(columns[..., time], 1, 2)
    shape = (heads, chunks, layout.stacks, layout.value_dim, layout.width)
    return np.stack(stored).reshape(shape).astype(np.float16), finals


def query_states(operands, *, time, with_remainder, call):
    """Computes `quartic.query.query_states`."""
    query, vector, scalars, stored, denominator, key, value, decay, scale = operands
    batch, length, layout = len(key), time, _layout(call)
    (heads, time, _), chunk, exact_window = query.shape, call.chunk, call.exact_window
    key, value = (_in_heads(x, exact_window, exact_window + time) for x in (key, value))
    out = np.zeros((heads, time, layout.value_dim), np.float32)
    total = single(denominator).reshape(heads, time).copy()
    first, count, _ = layout.steps(layouts.STEP).T
    read = np.concatenate([f + np.arange(n * layouts.STEP) for f, n in zip(first, count, strict=True)])
    for head in range(heads):
        held = head // (heads // len(stored))
        columns, factors = blocks_and_scalars(single(vector[head]).T, single(scalars[head]), layout)
        for index in range(time // chunk):
            rows = slice(index * chunk, (index + 1) * chunk)
            features = rounded(factors[read][:, :, None, rows] * columns[read][:, None, :, rows])
            features = features.reshape(len(read), layout.width, chunk)
            old = np.einsum("upt,uep->te", features, single(stored[held, index])[read])
            seen = slice(index * chunk, (index + 1) * chunk + exact_window)
            sums = single(decay[held, index, :2]).reshape(2, -1).sum(0)
            between = np.where(
                np.tri(chunk, exact_window + chunk, exact_window), sums[exact_window:, None] - sums, -1e4
            )
            weights = (single(query[head, rows]) @ single(key[held, seen]).T) ** 4 * np.exp2(between)
            out[head, rows] = old * single(scale[held]).reshape(-1, 1)[rows]
            out[head, rows] += weights @ single(value[held, seen])
            total[head, rows] += weights.sum(1)
    # Rows after the last query are zero.
    mean = np.divide(out, total[..., None], out=np.zeros_like(out), where=~(total[..., None] <= 0))
    mean = np.swapaxes(mean.reshape(batch, -1, *mean.shape[1:]), 1, 2)[:, :length]
    means = [mean.astype(query.dtype)]
    if with_remainder:
        means.append((mean - single(means[0])).astype(query.dtype))
    return *means, total


def _beside(state, layout):
    """Computes `layout.side_by_side` without JAX, which a callback must not wait for."""
    split = state.reshape(-1, layout.per_stack, layout.value_dim, layouts.COLUMNS)
    return np.swapaxes(split, 1, 2).reshape(-1, layout.value_dim, layout.width)


def _of_stacks(layout):
    """Returns the rows of y [U, 48] and of the scalars [U, 64 / E] that belong to each stack."""
    block, first = np.repeat(layout.units, layouts.UNIT, 0).T
    first = first + np.tile(np.arange(layouts.UNIT), len(layout.units)) * layout.per_stack
    return (
        block[:, None] * layouts.COLUMNS + np.arange(layouts.COLUMNS),
        first[:, None] + np.arange(layout.per_stack),
    )


def _far(x, value, vector, scalars, states, layout):
    """Returns gradients, with respect to x and value, of weighted features of x times states times value.

    x: [X, D], states: [U, E, P], value: [X, E].
    """
    columns, factors = blocks_and_scalars(vector, scalars, layout)
    states = states.reshape(layout.stacks, layout.value_dim, layout.per_stack, layouts.COLUMNS)
    scaled = rounded(factors[..., None] * value)
    slopes = np.einsum("uste,uesc->uct", scaled, states, optimize=True)
    means = np.einsum("uct,uesc->uste", columns, states, optimize=True)
    scalar_slopes = np.einsum("uste,te->ust", means, value)
    dvector, dscalars = np.zeros_like(vector), np.zeros_like(scalars)
    column, scalar = _of_stacks(layout)
    np.add.at(dvector, column, slopes)
    np.add.at(dscalars, scalar, scalar_slopes)

    gradient = np.zeros_like(x)
    for slope, indices in (
        (dvector[layout.rows - layout.products :], np.stack(layouts.pairs(layout.head_dim), 1)),
        (dscalars[: layout.products], layout.scalars),
    ):
        for n in range(2):
            np.add.at(gradient.T, indices[:, n], slope * x.T[indices[:, 1 - n]])
    return gradient, np.einsum("ust,uste->te", factors, means)


def _near(query, key, decay, exact_window, own=None):
    """Returns scores and decays of a chunk's queries and the keys visible to them."""
    decay = decay[:2].reshape(2, -1)
    own = decay[:, exact_window:] if own is None else own
    between = (own[:, :, None] - decay[:, None]).sum(0)
    seen = np.tri(*between.shape, exact_window, dtype=bool)
    return query @ key.T, np.exp2(np.where(seen, between, -1e4))


def _vectors(x):
    """Reshapes [H, X / 64, count, 64] to [H, count, X]."""
    x = single(x)
    return np.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1)


# Each stand-in, with the module in which it replaces the kernel of the same name, and the shapes of its results.
KERNELS = (
    (quartic.update_kernel, update, _shapes_of_update),
    (quartic.query_kernel, query_states, _shapes_of_query),
    (quartic_vjp.query_kernel, query_vjp, _shapes_of_query_vjp),
    (quartic_vjp.key_kernel, key_vjp, _shapes_of_key_vjp),
)
