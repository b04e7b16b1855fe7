"""Plain-JAX stand-ins for the state kernels at p = 2, with the same roundings.

They run in seconds, where interpreting the kernels takes minutes, and test the code around the kernels. The order of
their sums may differ.
"""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

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
    start = jnp.swapaxes(start, 2, 3).reshape(heads, layouts.TILE, value_dim, layout.width)
    each = -(-chunks // segments)

    def step(state, inputs):
        key, value, carry, begins = inputs
        state = jnp.where(begins, 0, state)
        # [H, 16, P, C] times [H, E, C]; each product of two entries is rounded once.
        scalar, vector = key[:, layout.indices[..., 0]], key[:, layout.indices[..., 1]]
        scaled = (value[:, None, None] * scalar[:, :, :, None]).astype(key.dtype)
        new = jnp.einsum("hjpex,hjpx->hjep", scaled, vector, preferred_element_type=jnp.float32)
        after = carry[:, None, None, None] * state + new
        return after, (preparation.split(state, key.dtype, terms), after)

    by_chunk = (_in_chunks(key, chunk), _in_chunks(value, chunk), carry)
    by_chunk = tuple(jnp.moveaxis(x, 1, 0) for x in by_chunk)
    # Segments after the first begin with zeros.
    begins = (np.arange(chunks) % each == 0) & (np.arange(chunks) > 0)
    _, (states, after) = jax.lax.scan(step, start, (*by_chunk, begins))
    begin = np.arange(segments) * each
    finals = jnp.moveaxis(after[np.minimum(begin + each, chunks) - 1], 0, 1)
    finals = jnp.where((begin < chunks)[:, None, None, None], finals, 0)
    finals = finals.reshape(heads, segments, *start.shape[1:3], layout.sections, -1)
    return jnp.moveaxis(states, 0, 1), jnp.swapaxes(finals, 3, 4)


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
    group, value_dim, shape = heads // len(key), value.shape[-1], (time // chunk, chunk)
    seen = np.arange(time // chunk)[:, None] * chunk + np.arange(chunk + exact_window)
    states = state_vjp.whole(states.astype(jnp.float32), value_dim)
    norm = state_vjp.whole(norm.astype(jnp.float32), head_dim)
    scale = scale.reshape(len(scale), -1)[:, :time].reshape(len(scale), *shape)

    def one(query, scalar, state, matrix, key, value, decay, factor):
        features = scalar[:, layout.indices[..., 0]] * layout.weights.astype(scalar.dtype)
        features = (features * scalar[:, layout.indices[..., 1]]).astype(jnp.float32)
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        scores, gamma = state_vjp.pairs(query, key, decay, exact_window)
        weights = gamma * scores**2
        sums = factor[:, None] * jnp.einsum("xjp,jep->xe", features, state) + weights @ value
        total = factor * ((query @ matrix) * query).sum(1) + weights.sum(1)
        return jnp.where(total[:, None] > 0, sums / total[:, None], 0), total

    shared = (states, norm, key[:, seen], value[:, seen], decay, scale)
    shared = [jnp.repeat(x, group, 0) for x in shared]
    each = [x.reshape(heads, *shape, -1) for x in (query, jnp.swapaxes(scalars, 1, 2))]
    out, total = jax.vmap(jax.vmap(one))(*each, *shared)
    out = out.reshape(heads, time, -1).astype(value.dtype)
    return as_arguments(out, batch_time), total.reshape(heads, time)


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
