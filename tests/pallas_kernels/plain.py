"""Plain-JAX stand-ins for the state kernels of all powers and at p = 2, with the same arguments and roundings.

They run in seconds, where interpreting the kernels takes minutes, and test the code around the kernels. The order of
their sums may differ.
"""

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper import numerics
from pallas_kernels.power_state import (
    configs,
    decays,
    reshaping,
    segments,
    units,
    window_queries,
)
from pallas_kernels.power_state import recurrence as recurrences
from pallas_kernels.power_state.square import backward, forward, layouts
from pallas_kernels.power_state.square import key_vjp as key_kernel
from pallas_kernels.power_state.square import query_vjp as query_kernel
from sympow_jax.ops import sharding

__all__ = ["KERNELS", "SHARED", "kernels"]


@contextlib.contextmanager
def kernels(multiprocessors=20):
    """Replaces the kernels traced within this context; few multiprocessors make several segments of time."""
    with contextlib.ExitStack() as stack:
        for module, plain in KERNELS:
            stack.enter_context(mock.patch.object(module, plain.__name__, plain))
        stack.enter_context(mock.patch.object(configs, "MULTIPROCESSORS", multiprocessors))
        yield


def update(operands, *, call, reverse=False):
    """Computes `update.update`."""
    key, value, carry = operands
    heads, chunks = carry.shape
    layout, segments, value_dim = layouts.Layout(key.shape[1]), call.config.segments, value.shape[1]
    start = _zeros((heads, layouts.TILE, value_dim, layout.width), operands)
    each = -(-chunks // segments)

    def step(state, inputs):
        key, value, carry, begins = inputs
        state = jnp.where(begins, 0, state)
        # [H, 16, P, C] times [H, E, C]; each product of two entries is rounded once.
        scalar, vector = key[:, layout.indices[..., 0]], key[:, layout.indices[..., 1]]
        scaled = (value[:, None, None] * scalar[:, :, :, None]).astype(key.dtype)
        new = jnp.einsum("hjpex,hjpx->hjep", scaled, vector, preferred_element_type=jnp.float32)
        after = carry[:, None, None, None] * state + new
        return after, (state.astype(key.dtype), after)

    by_chunk = *(_in_chunks(x, chunks, call.chunk, heads, reverse) for x in (key, value)), carry
    by_chunk = tuple(jnp.moveaxis(x, 1, 0) for x in by_chunk)
    begins = np.arange(chunks) % each == 0
    _, (states, after) = jax.lax.scan(step, start, (*by_chunk, begins))
    begin = np.arange(segments) * each
    finals = jnp.moveaxis(after[np.minimum(begin + each, chunks) - 1], 0, 1)
    finals = jnp.where((begin < chunks)[:, None, None, None], finals, 0)
    finals = finals.reshape(heads, segments, layouts.TILE, value_dim, layout.sections, -1)
    return jnp.moveaxis(states, 0, 1), jnp.swapaxes(finals, 3, 4)


def norms(key, weights, *, interpret, reverse=False):
    """Computes `norms.norms`."""
    heads, chunks, size = weights.shape
    chunk = size * heads // len(key)
    keys = _in_chunks(key, chunks, chunk, heads, reverse).astype(jnp.float32)
    return jnp.einsum("hnix,hnx,hnjx->hnij", keys, weights, keys, precision="highest")


def recurrence(scales, log2_unit, new, *, interpret):
    """Computes `recurrence.recurrence`."""

    def step(x, inputs):
        carry, factor, new = inputs
        return carry[:, None, None] * x + factor[:, None, None] * new, x

    factor = jnp.exp2(log2_unit - scales.shift[:, 1:])
    start = _zeros(new[:, 0].shape, new)
    last, before = jax.lax.scan(step, start, [jnp.moveaxis(x, 1, 0) for x in (scales.carry, factor, new)])
    return reshaping.split(jnp.moveaxis(before, 0, 1)), last


def scales(log2_carry, largest, sums, *, segments, interpret, reverse=False):
    """Computes `recurrence.scales`."""
    log2_carry = jnp.flip(log2_carry, 1) if reverse else log2_carry

    def step(x, inputs):
        carry, new = inputs
        after = jnp.logaddexp2(carry + x, new)
        return after, after

    start = _zeros(largest[:, 0].shape, largest) + decays.NOTHING
    _, after = jax.lax.scan(step, start, (log2_carry.T, (largest + jnp.log2(sums)).T))
    bound = jnp.concatenate([start[:, None], after.T], 1)
    some = bound > decays.NOTHING / 2
    shift = jnp.where(some, jnp.ceil(bound) - recurrences.HEADROOM, -126).astype(jnp.int32)
    decayed = some[:, :-1] & (log2_carry > decays.NOTHING)
    log2_carry = jnp.where(decayed, log2_carry + shift[:, :-1] - shift[:, 1:], -1e5)
    heads, chunks = log2_carry.shape
    length = -(-chunks // segments)
    by_segment = jnp.pad(log2_carry, [(0, 0), (0, segments * length - chunks)]).reshape(heads, segments, -1)
    since = jnp.cumsum(by_segment, -1)
    before = jnp.pad(since[..., :-1], [(0, 0), (0, 0), (1, 0)]).reshape(heads, -1)[:, :chunks]
    return recurrences.Scales(shift, *map(jnp.exp2, (log2_carry, before, since[..., -1])))


def add_arriving(states, arriving, factor, *, interpret):
    """Computes `segments.add_arriving`."""
    chunks = states.shape[1]
    length = -(-chunks // (arriving.shape[1] + 1))
    more = jnp.repeat(arriving, length, 1)[:, : chunks - length]
    factor = factor[:, length:].reshape(len(factor), -1, *[1] * (states.ndim - 2))
    return states.at[:, length:].set((states[:, length:] + factor * more).astype(states.dtype))


def in_units(query, key, value, *, call):
    """Computes `units.in_units`."""
    query, key, value = map(reshaping.heads_first, (query, key, value))
    key, value = (reshaping.pad(x, call.exact_window, 0) for x in (key, value))

    def scaled(x, of_zeros):
        size = jnp.abs(x).max(-1)
        exponent = jnp.where(size > 0, numerics.exponent(size), of_zeros)
        unit = numerics.scaled(x, -exponent[..., None])
        return unit, jnp.swapaxes(unit, 1, 2).astype(jnp.float16), exponent

    return units.Units(
        *scaled(query, 0), *scaled(key, units.OF_ZEROS)[1:], jnp.abs(value).max(-1).astype(jnp.float32)
    )


def chunk_decays(log2_decay, entering, *, call):
    """Computes `decays.chunk_decays`."""
    chunk = call.chunk
    count = (log2_decay.shape[1] - call.exact_window) // chunk
    frames = log2_decay[:, _seen(count, chunk, call.exact_window)]
    entering = jnp.repeat(entering, len(frames) // len(entering))
    entering = (np.arange(count * chunk) < entering[:, None]).reshape(*frames.shape[:2], chunk)
    coarse = numerics.coarse(frames, frames.shape[-1], -decays.FORGET * decays.LOG2E)
    sums = [jnp.cumsum(x, -1) for x in (coarse, frames - coarse)]
    blocks = [x.reshape(*x.shape[:2], -1, configs.BLOCK) for x in sums]
    to_last = sum(x[..., -1:] - x for x in blocks)
    folded = jnp.where(entering, frames[..., :chunk], 0)
    after = _suffix_sums(jnp.pad(folded, [(0, 0), (0, 0), (0, 1)]))
    return decays.Decays(
        jnp.stack([*blocks, jnp.exp2(to_last)], 2),
        decays.or_nothing(sum(sums)[..., call.exact_window :]),
        jnp.where(entering, decays.or_nothing(after[..., 1:]), decays.NOTHING),
        decays.or_nothing(after[..., 0]),
    )


def decay_gradient(sums, *, call):
    """Computes `decays.decay_gradient`."""
    queries, (window, state_keys) = sums.queries, jnp.swapaxes(sums.keys, 0, 1)
    heads, length = window.shape
    position = np.arange(length + call.exact_window)

    def in_chunks(x):
        return x.reshape(heads, -1, call.chunk)

    # For each chunk, queries up to its end.
    ends = np.arange(call.chunk, length + 1, call.chunk) + call.exact_window
    queries = jnp.where(position < ends[:, None], queries[:, 1, None], 0)
    queries = _suffix_sums(queries)[:, :, :length].reshape(heads, len(ends), len(ends), -1)
    queries = jnp.einsum("hcct->hct", queries)
    keys, inner = in_chunks(state_keys), jnp.pad(sums.inner, [(0, 0), (0, len(ends) - sums.inner.shape[1])])
    before = jnp.cumsum(keys, -1) - keys + inner[..., None]
    entering = jnp.repeat(sums.entering, heads // len(sums.entering))
    states = queries + jnp.where(in_chunks(jnp.arange(length) < entering[:, None]), before, 0)
    return _suffix_sums(sums.queries[:, 0, :length] - window) + states.reshape(heads, length)


def query_states(operands, *, time, with_remainder, call):
    """Computes `query.query_states`."""
    query, scalars, states, norm, key, value, decay, scale = operands
    batch_time, layout, chunk, exact_window = _options(operands, time, call)
    heads = len(query)
    group, shape = heads // len(states), (states.shape[1], chunk)
    time = states.shape[1] * chunk
    query, scalars = reshaping.resized(query, time), reshaping.resized(scalars, time, 2)
    key, value = (in_heads(x, exact_window, exact_window + time) for x in (key, value))
    states, norm = states.astype(jnp.float32), reshaping.unsplit(norm)
    seen = _seen(len(states[0]), chunk, exact_window)
    scale = scale.reshape(len(scale), -1)[:, :time].reshape(len(scale), *shape)

    def one(query, scalar, state, matrix, key, value, decay, factor):
        features = scalar[:, layout.indices[..., 0]] * layout.weights.astype(scalar.dtype)
        features = (features * scalar[:, layout.indices[..., 1]]).astype(jnp.float32)
        query, key, value = _exact(query, key, value)
        scores, gamma = _pairs(query, key, decay, exact_window)
        weights = gamma * scores**2
        sums = factor[:, None] * jnp.einsum("xjp,jep->xe", features, state) + weights @ value
        total = factor * ((query @ matrix) * query).sum(1) + weights.sum(1)
        return jnp.where(total[:, None] <= 0, 0, sums / total[:, None]), total

    shared = (states, norm, key[:, seen], value[:, seen], decay, scale)
    shared = [jnp.repeat(x, group, 0) for x in shared]
    each = [x.reshape(heads, *shape, -1) for x in (query, jnp.swapaxes(scalars, 1, 2))]
    out, total = jax.vmap(jax.vmap(one))(*each, *shared)
    out = as_arguments(out.reshape(heads, time, -1), batch_time)
    means = reshaping.split(out[..., None, :])[..., : 1 + with_remainder, :]
    return *jnp.moveaxis(means, -2, 0), total.reshape(heads, time)


def _options(operands, time, call):
    """Returns (B, T), the layout, the chunk and the window."""
    layout = layouts.Layout(operands.query.shape[-1])
    return (len(operands.key), time), layout, call.chunk, call.exact_window


def in_heads(x, before, length):
    """Returns [B, T, N, ...] as [HN, `length`, ...], with `before` zeros in front."""
    return reshaping.resized(reshaping.pad(reshaping.heads_first(x), before, 0), length)


def as_arguments(x, batch_time, before=0):
    """Returns [HN, X, ...] as [B, T, N, ...], without `before` positions in front."""
    batch, time = batch_time
    return reshaping.from_heads_first(x, batch)[:, before : before + time]


def query_vjp(operands, *, time, call):
    """Computes `query_vjp.query_vjp`, one head and one chunk at a time."""
    query, _, dout, states, norm, key, value, decay, rows = operands
    batch_time, layout, chunk, exact_window = _options(operands, time, call)
    group, dtype, time = len(query) // len(states), query.dtype, states.shape[1] * chunk
    query = reshaping.resized(query, time)
    key, value = (in_heads(x, exact_window, exact_window + time) for x in (key, value))
    dout = in_heads(dout, 0, time)
    states, norm = states.astype(jnp.float32), reshaping.unsplit(norm)
    query, dout, key, value = _exact(query, dout, key, value)
    seen = _seen(states.shape[1], chunk, exact_window)

    def one(q, do, row, state, matrix, k, v, decay):
        row = query_kernel.Rows(*row[..., None])
        far = row.state * _far(q, do * row.narrow, state, layout)
        # The factor from the state to the query, without the power of two that divides dout.
        far -= 2 * row.state * row.narrow * row.delta * (q @ matrix)
        scores, gamma = _pairs(q, k, decay, exact_window)
        dscores = 2 * gamma * scores * (do @ v.T - row.delta)
        sums = (dscores * scores).sum(1, keepdims=True), (q * far).sum(1, keepdims=True)
        gradient = row.unit * row.unit_rest * row.inverse * (dscores @ k + far)
        return gradient, row.inverse * jnp.concatenate(sums, 1) / 2

    shared = [jnp.repeat(x, group, 0) for x in (states, norm, key[:, seen], value[:, seen], decay)]
    each = [_chunks_of_rows(x, chunk) for x in (query, dout)]
    gradient, sums = jax.vmap(jax.vmap(one))(*each, _vectors_in_chunks(rows, chunk), *shared)
    gradient = gradient.reshape(query.shape).astype(dtype)
    return as_arguments(gradient, batch_time), jnp.swapaxes(sums.reshape(len(query), -1, 2), 1, 2)


def key_vjp(operands, *, time, call):
    """Computes `key_vjp.key_vjp`, one head and one chunk at a time."""
    key, _, value, dual, dual_norm, query, dout, rows, columns = operands
    batch_time, layout, chunk, exact_window = _options(operands, time, call)
    heads, length, chunks = len(rows), rows.shape[1] * configs.BLOCK, dual.shape[1]
    group, dtype, narrow = len(query) // heads, key.dtype, dual.dtype
    # Positions after the last are empty.
    reach = max(length, chunks * chunk + exact_window)
    key, value = (in_heads(x, exact_window, reach) for x in (key, value))
    dout, query = in_heads(dout, 0, chunks * chunk), reshaping.resized(query, chunks * chunk)
    decay = _decay_of(rows, chunks, chunk, exact_window)
    dual, dual_norm = (jnp.flip(x, 1) for x in (dual.astype(jnp.float32), reshaping.unsplit(dual_norm)))
    key, value, query, dout = _exact(key, value, query, dout)
    seen = _seen(chunks, chunk, exact_window)

    def far(k, v, state, matrix, row):
        row = key_kernel.Rows(*row[..., None])
        unit = k * row.narrow_key
        gradient = row.state_key * _far(unit, v * row.narrow_value, state, layout)
        gradient += row.state_norm * (k @ matrix)
        # Operands of a product are rounded to its type.
        features = (_features(unit, layout) * layout.weights).astype(narrow).astype(jnp.float32)
        dvalue = row.state_value * jnp.einsum("xjp,jep->xe", features, state)
        return gradient, dvalue, jnp.stack([jnp.zeros(chunk), (k * gradient).sum(1) / 2], 1)

    def near(q, do, column, k, v, decay):
        column = window_queries.Columns(*column[..., None])
        scores, gamma = _pairs(q, k, decay, exact_window)
        gamma, dweights = gamma * column.inverse, do @ v.T - column.delta
        sums = (gamma * scores**2 * dweights).sum(0)
        dkey = (2 * gamma * scores * dweights).T @ q
        return dkey, (gamma * scores**2).T @ do, jnp.stack([sums, jnp.zeros_like(sums)], 1)

    old = [_chunks_of_rows(x[:, : chunks * chunk], chunk) for x in (key, value)]
    gradients = jax.vmap(jax.vmap(far))(*old, dual, dual_norm, _vectors_in_chunks(rows, chunk)[:, :chunks])
    shared = [jnp.repeat(x, group, 0) for x in (key[:, seen], value[:, seen], decay)]
    each = [_chunks_of_rows(x, chunk) for x in (query, dout)]
    added = jax.vmap(jax.vmap(near))(*each, _vectors_in_chunks(columns, chunk), *shared)
    results = []
    for total, x in zip(gradients, added, strict=True):
        result = jnp.zeros((heads, reach, x.shape[-1]))
        result = result.at[:, : chunks * chunk].add(total.reshape(heads, -1, x.shape[-1]))
        result = result.at[:, seen].add(x.reshape(heads, group, *x.shape[1:]).sum(1))
        results.append(result)
    dkey, dvalue = (as_arguments(x.astype(dtype), batch_time, exact_window) for x in results[:2])
    return dkey, dvalue, jnp.swapaxes(results[2], 1, 2)[..., :length]


def _pairs(query, key, decay, exact_window):
    """Returns scores and decays of a chunk's queries [C, D] and the keys [W + C, D] visible to them."""
    coarse, fine = decay[:2].reshape(2, -1)
    between = coarse[exact_window:, None] - coarse + (fine[exact_window:, None] - fine)
    seen = np.arange(len(query))[:, None] + exact_window >= np.arange(len(key))
    return query @ key.T, jnp.where(seen, jnp.exp2(between), 0)


def _exact(*arrays):
    return [x.astype(jnp.float32) for x in arrays]


def _seen(chunks, chunk, exact_window):
    return np.arange(chunks)[:, None] * chunk + np.arange(chunk + exact_window)


def _zeros(shape, operands):
    """Returns zeros that vary over the manual mesh axes of the operands, as the carry of a scan over these has to."""
    return sharding.same_variation((operands, jnp.zeros(shape)))[1]


def _suffix_sums(x):
    return jnp.flip(jnp.cumsum(jnp.flip(x, -1), -1), -1)


def _chunks_of_rows(x, chunk):
    """Reshapes [A, X, B] to [A, n, C, B]."""
    return x.reshape(len(x), -1, chunk, x.shape[-1])


def _vectors_in_chunks(rows, chunk):
    """Reshapes [A, X / 64, rows, 64] to [A, n, rows, C]."""
    rows = rows.reshape(len(rows), -1, chunk // rows.shape[-1], *rows.shape[2:])
    return jnp.swapaxes(rows, 2, 3).reshape(*rows.shape[:2], rows.shape[3], chunk)


def _features(x, layout):
    return x[:, layout.indices[..., 0]] * x[:, layout.indices[..., 1]]


def _far(x, y, state, layout):
    """Returns the gradient with respect to x [C, D] of the weighted features of x times state y^T, y [C, E]."""
    _, pull = jax.vjp(functools.partial(_features, layout=layout), x)
    return pull(jnp.einsum("xe,jep->xjp", y, state) * layout.weights)[0]


def _decay_of(rows, chunks, chunk, exact_window):
    """Returns the forward pass's decay from the rows of keys; zero for keys in no chunk."""
    rows = jnp.swapaxes(rows, 1, 2)[:, -4:].reshape(len(rows), 2, 2, -1)
    rows = jnp.pad(rows, [(0, 0)] * 3 + [(0, (chunks + 1) * chunk - rows.shape[-1])])
    rows = rows.reshape(*rows.shape[:3], chunks + 1, chunk)
    seen = jnp.concatenate([rows[:, 0, :, :-1], rows[:, 1, :, 1:, :exact_window]], -1)
    return jnp.swapaxes(seen, 1, 2).reshape(len(rows), chunks, 2, -1, configs.BLOCK)


def _in_chunks(x, chunks, chunk, heads, reverse):
    """Reshapes [HN, A, any length] to [H, n, A, G C], with the last chunk first or not."""
    x = reshaping.resized(x, chunks * chunk, 2)
    x = jnp.moveaxis(x.reshape(heads, -1, x.shape[1], chunks, chunk), 3, 1)
    x = jnp.swapaxes(x, 2, 3).reshape(*x.shape[:2], x.shape[3], -1)
    return jnp.flip(x, 1) if reverse else x


# Each stand-in, with the module in which it replaces the kernel of the same name: of all powers, and all at p = 2.
SHARED = (
    (units, in_units),
    (decays, chunk_decays),
    (decays, decay_gradient),
    (recurrences, recurrence),
    (recurrences, scales),
    (segments, add_arriving),
)
KERNELS = (
    (forward.update_kernel, update),
    (forward.norm_kernel, norms),
    (forward.query_kernel, query_states),
    (backward.query_kernel, query_vjp),
    (backward.key_kernel, key_vjp),
    *SHARED,
)
