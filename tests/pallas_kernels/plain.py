"""Plain-JAX stand-ins for the state kernels at p = 2, with the same roundings.

They run in seconds, where interpreting the kernels takes minutes, and test the code around the kernels. The order of
their sums may differ.
"""

import contextlib
from unittest import mock

import jax.numpy as jnp

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state import segments
from pallas_kernels.power_state.square import backward, forward
from pallas_kernels.power_state.square import layout as layouts
from tests.pallas_kernels import state_vjp

__all__ = ["add_arriving", "kernels", "norms", "query_states", "query_vjp", "update"]


@contextlib.contextmanager
def kernels(multiprocessors=20):
    """Replaces the kernels traced within this context; few multiprocessors make several segments of time."""
    with contextlib.ExitStack() as stack:
        for module, name, plain in (
            (forward.update_kernel, "update", update),
            (forward.norm_kernel, "norms", norms),
            (forward.query_kernel, "query_states", query_states),
            (backward.query_kernel, "query_vjp", query_vjp),
            (backward.key_kernel, "key_vjp", key_vjp),
            (segments, "add_arriving", add_arriving),
            (configs, "MULTIPROCESSORS", multiprocessors),
        ):
            stack.enter_context(mock.patch.object(module, name, plain))
        yield


def update(key, value, carry, start, *, layout, config, chunk, terms, interpret):
    """Computes `update.update`."""
    heads, chunks = carry.shape
    segments, value_dim = config.segments, value.shape[1]
    key, value = (_in_chunks(x, chunk) for x in (key, value))
    start = jnp.swapaxes(start, 2, 3).reshape(heads, layouts.TILE, value_dim, layout.width)
    each = -(-chunks // segments)
    states, finals = [], []
    for segment in range(segments):
        state = start if segment == 0 else jnp.zeros_like(start)
        for c in range(segment * each, min((segment + 1) * each, chunks)):
            states.append(preparation.split(state, key.dtype, terms))
            # [H, 16, P, C] times [H, E, C]; each product of two entries is rounded once.
            scalar, vector = key[:, c, layout.indices[..., 0]], key[:, c, layout.indices[..., 1]]
            scaled = (value[:, c, None, None] * scalar[:, :, :, None]).astype(key.dtype)
            new = jnp.einsum("hjpex,hjpx->hjep", scaled, vector, preferred_element_type=jnp.float32)
            state = carry[:, c, None, None, None] * state + new
        finals.append(state)
    finals = jnp.stack(finals, 1).reshape(heads, segments, *start.shape[1:3], layout.sections, -1)
    return jnp.stack(states, 1), jnp.swapaxes(finals, 3, 4)


def norms(key, weights, *, interpret):
    """Computes `norms.norms`."""
    heads, head_dim, _ = key.shape
    keys = key.reshape(heads, head_dim, *weights.shape[1:]).astype(jnp.float32)
    return jnp.einsum("hincx,hncx,hjncx->hnij", keys, weights, keys, precision="highest")


def add_arriving(states, arriving, factor, *, interpret):
    """Computes `segments.add_arriving`."""
    chunks = states.shape[1]
    more = jnp.repeat(arriving, -(-chunks // arriving.shape[1]), 1)[:, :chunks]
    factor = factor.reshape(*factor.shape, *[1] * (states.ndim - 2))
    return (states + factor * more).astype(states.dtype)


def query_states(
    query,
    scalars,
    states,
    norm,
    key,
    value,
    decay,
    scale,
    *,
    layout,
    config,
    chunk,
    exact_window,
    batch_time,
    interpret,
):
    """Computes `query.query_states`."""
    heads, time, head_dim = query.shape
    group, value_dim = heads // len(key), value.shape[-1]
    out, total = [], []
    for head in range(heads):
        held = head // group
        for c in range(time // chunk):
            own, seen = slice(c * chunk, (c + 1) * chunk), slice(c * chunk, (c + 1) * chunk + exact_window)
            scalar = scalars[head, :, own].T
            features = scalar[:, layout.indices[..., 0]] * layout.weights.astype(scalar.dtype)
            features = (features * scalar[:, layout.indices[..., 1]]).astype(jnp.float32)
            state = state_vjp.whole(states[held, c].astype(jnp.float32), value_dim)
            matrix = state_vjp.whole(norm[held, c].astype(jnp.float32), head_dim)
            q, k, v = (x.astype(jnp.float32) for x in (query[head, own], key[held, seen], value[held, seen]))
            factor = scale[held].reshape(-1)[own]
            scores, gamma = state_vjp.pairs(q, k, decay[held, c], exact_window)
            weights = gamma * scores**2
            sums = factor[:, None] * jnp.einsum("xjp,jep->xe", features, state) + weights @ v
            total.append(factor * ((q @ matrix) * q).sum(1) + weights.sum(1))
            out.append(jnp.where(total[-1][:, None] > 0, sums / total[-1][:, None], 0))
    shape = (heads, time)
    out = jnp.concatenate(out).reshape(*shape, -1).astype(value.dtype)
    return as_arguments(out, batch_time), jnp.concatenate(total).reshape(shape)


def as_arguments(x, batch_time, before=0):
    """Returns [B N, X, ...] as [B, T, N, ...], without `before` positions in front."""
    batch, time = batch_time
    return preparation.tokens_second(x, batch)[:, before : before + time]


def query_vjp(
    query,
    scalars,
    dout,
    states,
    norm,
    key,
    value,
    decay,
    rows,
    *,
    layout,
    config,
    chunk,
    exact_window,
    batch_time,
    interpret,
):
    """Computes `query_vjp.query_vjp`."""
    sizes = {"layout": layout, "chunk": chunk, "exact_window": exact_window}
    gradient, sums = state_vjp.query_vjp(query, dout, states, norm, key, value, decay, rows, **sizes)
    return as_arguments(gradient.astype(query.dtype), batch_time), sums


def key_vjp(
    key,
    scalars,
    value,
    dual,
    dual_norm,
    query,
    dout,
    rows,
    columns,
    *,
    layout,
    config,
    chunk,
    exact_window,
    batch_time,
    interpret,
):
    """Computes `key_vjp.key_vjp`."""
    sizes = {"layout": layout, "chunk": chunk, "exact_window": exact_window}
    decay = _decay_of(rows, dual.shape[1], chunk, exact_window)
    dkey, dvalue, sums = state_vjp.key_vjp(
        key, value, dual, dual_norm, query, dout, decay, rows, columns, **sizes
    )
    gradients = dkey.astype(key.dtype), dvalue.astype(value.dtype)
    return *(as_arguments(x, batch_time, exact_window) for x in gradients), sums


def _decay_of(rows, chunks, chunk, exact_window):
    """Returns the forward pass's decay from the rows of keys; zero for keys in no chunk."""
    rows = jnp.swapaxes(rows, 1, 2)[:, -4:].reshape(len(rows), 2, 2, -1)
    rows = jnp.pad(rows, [(0, 0)] * 3 + [(0, (chunks + 1) * chunk - rows.shape[-1])])
    rows = rows.reshape(*rows.shape[:3], chunks + 1, chunk)
    seen = jnp.concatenate([rows[:, 0, :, :-1], rows[:, 1, :, 1:, :exact_window]], -1)
    return jnp.swapaxes(seen, 1, 2).reshape(len(rows), chunks, 2, -1, configs.BLOCK)


def _in_chunks(x, chunk):
    """Reshapes [H, A, X] to [H, n, A, C]."""
    return jnp.swapaxes(x.reshape(*x.shape[:2], -1, chunk), 1, 2)
