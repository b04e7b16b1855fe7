"""What the backward kernels of `power_state` compute, in plain JAX: one head and one chunk at a time.

Takes and returns what `query_vjp.query_vjp` and `key_vjp.key_vjp` do, in float32 and, for results, unrounded.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.power_state import key_vjp as key_kernel
from pallas_kernels.power_state import query_vjp as query_kernel

__all__ = ["key_vjp", "query_vjp"]


def query_vjp(query, dout, states, norm, key, value, decay, rows, *, layout, chunk, window):
    """dq [HN, X, D] and sums [HN, 2, X]; arguments as in the kernel, but for the queries' second copy."""
    heads, time, head_dim = query.shape
    group, value_dim = heads // key.shape[0], value.shape[-1]
    query, dout, states, norm, key, value = _exact(query, dout, states, norm, key, value)
    states, norm = _whole(states, value_dim), _whole(norm, head_dim)
    rows = jnp.swapaxes(rows, 1, 2).reshape(heads, rows.shape[2], time)
    gradients, sums = [], []
    for head in range(heads):
        for c in range(time // chunk):
            own, seen = slice(c * chunk, (c + 1) * chunk), slice(c * chunk, (c + 1) * chunk + window)
            owner = head // group
            row = query_kernel.Rows(*rows[head, :, own, None])
            far = _far(query[head, own], dout[head, own] * row.narrow, states[owner, c], layout)
            far = row.far * far - row.far_norm * (query[head, own] @ norm[owner, c])
            scores, gamma = _near(query[head, own], key[owner, seen], decay[owner, c], window)
            dscores = 2 * gamma * scores * (dout[head, own] @ value[owner, seen].T - row.delta)
            near = dscores @ key[owner, seen]
            gradients.append(row.inverse * (near + far))
            near_sum = row.inverse[:, 0] * (dscores * scores).sum(1) / 2
            far_sum = row.inverse[:, 0] * (query[head, own] * far).sum(1) / 2
            sums.append(jnp.stack([near_sum, far_sum]))
    gradients = jnp.concatenate(gradients).reshape(heads, time, head_dim)
    return gradients, jnp.concatenate(sums, 1).reshape(2, heads, time).swapaxes(0, 1)


def key_vjp(key, value, dual, dual_norm, query, dout, decay, rows, columns, *, layout, chunk, window):
    """dk [H, Y, D], dv [H, Y, E] and sums [H, 2, Y]; `decay` [H, n, 2, (W + C) / 64, 64] as the forward pass has it."""
    heads, time, head_dim = key.shape
    chunks, value_dim = dual.shape[1], value.shape[-1]
    group = query.shape[0] // heads
    key, value, dual, dual_norm, query, dout = _exact(key, value, dual, dual_norm, query, dout)
    dual, dual_norm = _whole(dual, value_dim), _whole(dual_norm, head_dim)
    rows, columns = (jnp.swapaxes(x, 1, 2).reshape(x.shape[0], x.shape[2], -1) for x in (rows, columns))
    dkey, dvalue = jnp.zeros(key.shape), jnp.zeros(value.shape)
    sums = jnp.zeros((heads, 2, time))
    for head in range(heads):
        for c in range(chunks):
            old = slice(c * chunk, (c + 1) * chunk)
            row = key_kernel.Rows(*rows[head, :, old, None])
            k, v = key[head, old], value[head, old]
            r = dual[head, chunks - 1 - c]
            narrow = k * row.narrow_key
            far = row.far_key * _far(narrow, v * row.narrow_value, r, layout)
            far += row.far_norm * (k @ dual_norm[head, chunks - 1 - c])
            features = _features(narrow, layout) * layout.weights
            dkey = dkey.at[head, old].add(far)
            dvalue = dvalue.at[head, old].add(row.far_value * jnp.einsum("xjp,jep->xe", features, r))
            sums = sums.at[head, 1, old].add((k * far).sum(1) / 2)
            own, seen = old, slice(c * chunk, min((c + 1) * chunk + window, time))
            count = seen.stop - seen.start
            for member in range(head * group, (head + 1) * group):
                column = key_kernel.Columns(*columns[member, :, own, None])
                q, do = query[member, own], dout[member, own]
                scores, gamma = _near(q, key[head, seen], decay[head, c], window, count)
                weights = gamma * scores**2 * column.inverse
                dlog = weights * (do @ value[head, seen].T - column.delta)
                dscores = 2 * gamma * scores * column.inverse * (do @ value[head, seen].T - column.delta)
                dkey = dkey.at[head, seen].add(dscores.T @ q)
                dvalue = dvalue.at[head, seen].add(weights.T @ do)
                sums = sums.at[head, 0, seen].add(dlog.sum(0))
    return dkey, dvalue, sums


def _exact(*arrays):
    return [x.astype(jnp.float32) for x in arrays]


def _whole(x, size):
    """The sum of the terms that lie on top of each other in x [..., terms size, A]."""
    return x.reshape(*x.shape[:-2], -1, size, x.shape[-1]).sum(-3)


def _features(x, layout):
    return x[:, layout.indices[..., 0]] * x[:, layout.indices[..., 1]]


def _far(x, y, state, layout):
    """The gradient, with respect to x [C, D], of the weighted features of x times state y^T, y [C, E]."""
    _, pull = jax.vjp(lambda x: _features(x, layout), x)
    return pull(jnp.einsum("xe,jep->xjp", y, state) * layout.weights)[0]


def _near(query, key, decay, window, count=None):
    """Scores and decays of a chunk's queries and the keys that they see."""
    coarse, fine = decay.reshape(2, -1)
    between = coarse[window:, None] - coarse + (fine[window:, None] - fine)
    seen = jnp.arange(len(query))[:, None] + window >= jnp.arange(len(coarse))
    gamma = jnp.where(seen, jnp.exp2(between), 0)
    return query @ key.T, gamma[:, :count]
