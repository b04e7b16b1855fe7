"""Plain-JAX version of the backward kernels of `power_state`: one head and one chunk at a time.

Takes and returns the same arrays as `query_vjp.query_vjp` and `key_vjp.key_vjp`, in float32 and, for results,
unrounded.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.power_state.square import key_vjp as key_kernel
from pallas_kernels.power_state.square import query_vjp as query_kernel

__all__ = ["key_vjp", "pairs", "query_vjp", "whole"]


def query_vjp(query, dout, states, norm, key, value, decay, rows, *, layout, chunk, exact_window):
    """Returns dq [HN, X, D] and sums [HN, 2, X]; arguments as in the kernel, except the queries' second copy."""
    group = len(query) // len(key)
    query, dout, states, norm, key, value = _exact(query, dout, states, norm, key, value)
    states, norm = whole(states, value.shape[-1]), whole(norm, query.shape[-1])
    seen = _seen(states.shape[1], chunk, exact_window)

    def one(q, do, state, matrix, k, v, decay, row):
        row = query_kernel.Rows(*row[..., None])
        far = row.state * _far(q, do * row.narrow, state, layout)
        # The factor from the state to the query, without the power of two that divides dout.
        far -= 2 * row.state * row.narrow * row.delta * (q @ matrix)
        scores, gamma = pairs(q, k, decay, exact_window)
        dscores = 2 * gamma * scores * (do @ v.T - row.delta)
        sums = (dscores * scores).sum(1, keepdims=True), (q * far).sum(1, keepdims=True)
        gradient = row.unit * row.unit_rest * row.inverse * (dscores @ k + far)
        return gradient, row.inverse * jnp.concatenate(sums, 1) / 2

    shared = [states, norm, key[:, seen], value[:, seen], decay]
    shared = [jnp.repeat(x, group, 0) for x in shared]
    each = [_in_chunks(x, chunk) for x in (query, dout)]
    gradient, sums = jax.vmap(jax.vmap(one))(*each, *shared, _rows_in_chunks(rows, chunk))
    return gradient.reshape(query.shape), jnp.swapaxes(sums.reshape(len(query), -1, 2), 1, 2)


def key_vjp(key, value, dual, dual_norm, query, dout, decay, rows, columns, *, layout, chunk, exact_window):
    """Returns dk [H, Y, D], dv [H, Y, E] and sums [H, 2, Y].

    `decay` [H, n, 2 or 3, (W + C) / 64, 64] is as in the forward pass.
    """
    heads, length, head_dim = key.shape
    chunks, value_dim, group = dual.shape[1], value.shape[-1], len(query) // heads
    dual_type = dual.dtype
    key, value, dual, dual_norm, query, dout = _exact(key, value, dual, dual_norm, query, dout)
    dual, dual_norm = (jnp.flip(whole(x, n), 1) for x, n in ((dual, value_dim), (dual_norm, head_dim)))
    seen = _seen(chunks, chunk, exact_window)

    def far(k, v, state, matrix, row):
        row = key_kernel.Rows(*row[..., None])
        narrow = k * row.narrow_key
        gradient = row.state_key * _far(narrow, v * row.narrow_value, state, layout)
        gradient += row.state_norm * (k @ matrix)
        features = _features(narrow, layout) * layout.weights
        if dual_type.itemsize == 2:
            # Operands of a product are rounded to its type.
            features = features.astype(dual_type).astype(jnp.float32)
        dvalue = row.state_value * jnp.einsum("xjp,jep->xe", features, state)
        return gradient, dvalue, jnp.stack([jnp.zeros(chunk), (k * gradient).sum(1) / 2])

    def near(q, do, k, v, decay, column):
        column = key_kernel.Columns(*column[..., None])
        scores, gamma = pairs(q, k, decay, exact_window)
        gamma, dweights = gamma * column.inverse, do @ v.T - column.delta
        sums = (gamma * scores**2 * dweights).sum(0)
        dkey = (2 * gamma * scores * dweights).T @ q
        return dkey, (gamma * scores**2).T @ do, jnp.stack([sums, jnp.zeros_like(sums)])

    old = [_in_chunks(x[:, : chunks * chunk], chunk) for x in (key, value)]
    of_rows = _rows_in_chunks(rows, chunk)[:, :chunks]
    gradients = jax.vmap(jax.vmap(far))(*old, dual, dual_norm, of_rows)
    # Positions after Y are empty.
    reach = max(length, chunks * chunk + exact_window)
    ends = [jnp.pad(x, [(0, 0), (0, reach - length), (0, 0)])[:, seen] for x in (key, value)]
    shared = [jnp.repeat(x, group, 0) for x in (*ends, decay)]
    each = [_in_chunks(x, chunk) for x in (query, dout)]
    added = jax.vmap(jax.vmap(near))(*each, *shared, _rows_in_chunks(columns, chunk))
    results = []
    for total, x, axis in zip(gradients, added, (0, 0, 1), strict=True):
        x = x.reshape(heads, group, *x.shape[1:]).sum(1)
        total, x = (jnp.moveaxis(y, 2 + axis, 2) for y in (total, x))
        result = jnp.zeros((heads, reach, x.shape[-1]))
        result = result.at[:, : chunks * chunk].add(total.reshape(heads, -1, x.shape[-1]))
        results.append(result.at[:, seen].add(x)[:, :length])
    return results[0], results[1], jnp.swapaxes(results[2], 1, 2)


def pairs(query, key, decay, exact_window):
    """Returns scores and decays of a chunk's queries [C, D] and the keys [W + C, D] visible to them."""
    coarse, fine = decay[:2].reshape(2, -1)
    between = coarse[exact_window:, None] - coarse + (fine[exact_window:, None] - fine)
    seen = np.arange(len(query))[:, None] + exact_window >= np.arange(len(key))
    return query @ key.T, jnp.where(seen, jnp.exp2(between), 0)


def whole(x, size):
    """Returns the sum of the terms concatenated in x [..., terms size, A]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1]).sum(-3)


def _exact(*arrays):
    return [x.astype(jnp.float32) for x in arrays]


def _seen(chunks, chunk, exact_window):
    return np.arange(chunks)[:, None] * chunk + np.arange(chunk + exact_window)


def _in_chunks(x, chunk):
    """Reshapes [A, X, B] to [A, n, C, B]."""
    return x.reshape(len(x), -1, chunk, x.shape[-1])


def _rows_in_chunks(rows, chunk):
    """Reshapes [A, X / 64, rows, 64] to [A, n, rows, C]."""
    rows = rows.reshape(len(rows), -1, chunk // rows.shape[-1], *rows.shape[2:])
    return jnp.swapaxes(rows, 2, 3).reshape(*rows.shape[:2], rows.shape[3], chunk)


def _features(x, layout):
    return x[:, layout.indices[..., 0]] * x[:, layout.indices[..., 1]]


def _far(x, y, state, layout):
    """Returns the gradient with respect to x [C, D] of the weighted features of x times state y^T, y [C, E]."""
    _, pull = jax.vjp(functools.partial(_features, layout=layout), x)
    return pull(jnp.einsum("xe,jep->xjp", y, state) * layout.weights)[0]
