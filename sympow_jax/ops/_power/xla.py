"""Power attention in plain JAX, on any device: layouts, ragged rows and states around the two cores.

Queries are scaled by a power of two, which the mean cancels exactly, so that no power of a query overflows. Products
of float32 inputs are taken at the highest precision, those of bfloat16 inputs in float32 at the device's default.
"""

import functools

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops._power import chunked as chunked_core
from sympow_jax.ops._power import decay as decays
from sympow_jax.ops._power import features, quadratic
from sympow_jax.ops._power import mean as means
from sympow_jax.ops._power import state as power_state

__all__ = ["attention", "chunked", "kv_and_norm", "precision_of", "sums_of", "unit_scale"]

# Positions folded or queried at once where the attention form meets a state.
_STATE_CHUNK = 128


def chunked(query, key, value, *, power, log_decay, segment_ids, state, window, chunk, return_state):
    """The chunked form; with a chunk of 1, the recurrence. Returns the output and the state or None."""
    dtype, time = jnp.promote_types(query.dtype, jnp.float32), query.shape[1]
    sequence = power_state.Sequence.join(key, value, log_decay, segment_ids, state, dtype)
    ragged = state is not None or segment_ids is not None
    decayed = ragged or log_decay is not None
    arrays = {
        "query": _masked_queries(query, sequence),
        "key": sequence.key,
        "value": sequence.value,
        "decay": decays.bounded(sequence.log_decay, sequence.start[..., None]),
        "folds": (sequence.after >= window) if return_state else jnp.ones_like(sequence.valid),
    }
    if ragged:
        # Padding and empty slots go to the end, so that windows and chunks count tokens only.
        order = jnp.argsort(~sequence.valid, axis=1, stable=True)
        back = jnp.argsort(order, axis=1)
        arrays = {name: _permuted(x, order, back) for name, x in arrays.items()}

    chunk = min(chunk, arrays["query"].shape[1])
    arrays = {name: _pad_end(x, chunk) for name, x in arrays.items()}
    settings = chunked_core.Settings(power, chunk, window, precision_of(key.dtype))
    core = functools.partial(chunked_core.chunked, settings)
    over_heads = jax.vmap(core, in_axes=(0, 0, 0, 0 if decayed else None, None, 0))
    out, final = jax.vmap(over_heads, in_axes=(0, 0, 0, 0 if decayed else None, 0, 0))(
        _time_last(arrays["query"], key.shape[2]),
        jnp.moveaxis(arrays["key"], 1, 3),
        jnp.moveaxis(arrays["value"], 1, 3),
        jnp.moveaxis(arrays["decay"], 1, 2) if decayed else None,
        arrays["folds"],
        _first_sums(state, sequence, power, dtype),
    )
    out = _time_second(out)[:, : sequence.valid.shape[1]]
    if ragged:
        out = _permuted(out, back, order)
    out = out[:, -time:].astype(value.dtype)
    return out, _state_of(final, sequence, power, window, dtype) if return_state else None


def attention(query, key, value, *, power, log_decay, segment_ids, state, window, chunk, return_state):
    """The attention form. `key` may be longer than `query`; the queries are its last tokens."""
    dtype, time = jnp.promote_types(query.dtype, jnp.float32), query.shape[1]
    sequence = power_state.Sequence.join(key, value, log_decay, segment_ids, state, dtype)
    query = _time_last(_masked_queries(query, sequence)[:, -time:], key.shape[2])
    key, value_dtype = jnp.moveaxis(sequence.key, 1, 3), value.dtype
    value = jnp.moveaxis(sequence.value, 1, 3)
    value = jnp.concatenate([value, jnp.ones_like(value[..., :1, :])], -2)
    decay = jnp.moveaxis(decays.bounded(sequence.log_decay, sequence.start[..., None]), 1, 2)
    precision = precision_of(key.dtype)

    block = min(chunk, time)
    front = -(key.shape[-1] - time) % block
    back = -time % block
    first = (jnp.argmax(sequence.valid, axis=1).min() + front) // block
    core = functools.partial(quadratic.sums, quadratic.Settings(power, block, precision))
    sums = jax.vmap(jax.vmap(core, in_axes=(0, 0, 0, 0, None)), in_axes=(0, 0, 0, 0, None))(
        _pad_last(query, 0, back),
        _pad_last(key, front, back),
        _pad_last(value, front, back),
        _pad_last(decay, front, back),
        first.astype(jnp.int32),
    )[..., :time]
    if state is not None:
        from_start = decays.exp(jnp.cumsum(decay, -1))[..., -time:]
        far = functools.partial(_far, power=power, precision=precision)
        sums += from_start[:, :, None, None] * jax.vmap(jax.vmap(far))(sums_of(state, power), query)

    out = means.mean(sums[..., :-1, :], sums[..., -1:, :], -2)
    out = _time_second(out).astype(value_dtype)
    if not return_state:
        return out, None

    folds = (sequence.after >= window)[:, None]
    folded_decay = jnp.where(folds, decay, 0)
    behind = jnp.cumsum(folded_decay[..., ::-1], -1)[..., ::-1]
    weight = jnp.where(folds, decays.exp(jnp.pad(behind[..., 1:], [(0, 0), (0, 0), (0, 1)])), 0)
    fold = functools.partial(_fold_all, power=power, precision=precision)
    final = jax.vmap(jax.vmap(fold))(value * weight[:, :, None], key)
    if state is not None:
        carry = decays.exp(behind[..., 0])[..., None, None]
        final = tuple(carry * s + n for s, n in zip(sums_of(state, power), final))
    return out, _state_of(final, sequence, power, window, dtype)


def _masked_queries(query, sequence):
    """Queries at every position of the sequence, of unit scale, and zero where there is no token."""
    slots = sequence.valid.shape[1] - query.shape[1]
    if slots > 0:
        query = jnp.pad(query, [(0, 0), (slots, 0), (0, 0), (0, 0)])
    return jnp.where(sequence.valid[:, -query.shape[1] :, None, None], unit_scale(query), 0)


def unit_scale(query: Float[Array, "*rest D"]) -> Float[Array, "*rest D"]:
    """The query times the power of two that brings its largest entry into [1/2, 1)."""
    largest = jax.lax.stop_gradient(jnp.abs(query).max(-1, keepdims=True))
    _, exponent = jnp.frexp(largest)
    # Two factors, since the inverse of the smallest normal number overflows.
    half = exponent // 2
    return jnp.ldexp(jnp.ldexp(query, -half), half - exponent)


def precision_of(dtype) -> jax.lax.Precision:
    """Full precision for float32 and float64; the default (TF32 on Ampere and later) for shorter inputs."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else jax.lax.Precision.DEFAULT


@jax.custom_vjp
def _permuted(x: Float[Array, "B X *rest"], order: Int[Array, "B X"], back: Int[Array, "B X"]):
    """x in the given order of positions; its gradient is a gather too, not a scatter."""
    return jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), axis=1)


_permuted.defvjp(
    lambda x, order, back: (_permuted(x, order, back), (order, back)),
    lambda orders, dx: (_permuted(dx, *reversed(orders)), None, None),
)


def _far(state, query, *, power, precision):
    """Sums over the folded tokens for all queries of a head: state, [G, D, T] -> [G, E+1, T]."""
    dtype = state[0].dtype
    weighted = tuple(s * w for s, w in zip(state, features.weights(query.shape[1], power, dtype)))

    @jax.checkpoint
    def chunk(q):
        return features.query(weighted, q, power, precision)

    groups, head_dim, time = query.shape
    by_chunk = _in_chunks(jnp.moveaxis(query, 0, 1).reshape(head_dim, -1)).astype(dtype)
    out = jnp.moveaxis(jax.lax.map(chunk, by_chunk), 0, 1).reshape(state[0].shape[-1], -1)
    return jnp.moveaxis(out[:, : groups * time].reshape(-1, groups, time), 1, 0)


def _fold_all(value, key, *, power, precision):
    """The state of all keys of a head: [E+1, X], [D, X] -> state."""

    @jax.checkpoint
    def chunk(v, k):
        return features.fold(v, k, power, precision)

    def step(state, inputs):
        return tuple(s + n for s, n in zip(state, chunk(*inputs))), None

    inputs = (_in_chunks(value), _in_chunks(key).astype(value.dtype))
    start = features.zeros((), len(key), len(value), power, value.dtype)
    return jax.lax.scan(step, start, inputs)[0]


def sums_of(state: power_state.PowerState, power: int) -> features.Groups:
    """The state as the cores hold it, [B, K, F_g, E+1] a group, the normaliser a column of its own."""
    both = jnp.concatenate([state.kv, state.norm[..., None]], -1)
    return features.from_canonical(both, state.keys.shape[-1], power)


def _first_sums(state, sequence, power, dtype):
    if state is not None:
        return sums_of(state, power)
    batch, _, kv_heads, head_dim = sequence.key.shape
    return features.zeros((batch, kv_heads), head_dim, sequence.value.shape[-1] + 1, power, dtype)


def kv_and_norm(sums: features.Groups, head_dim: int, power: int) -> dict[str, Array]:
    """The inverse of `sums_of`."""
    both = features.to_canonical(sums, head_dim, power)
    return {"kv": both[..., :-1], "norm": both[..., -1]}


def _state_of(final, sequence, power, window, dtype):
    # A document that is all within the window has folded nothing: what was folded belongs to others.
    last = sequence.after < jnp.iinfo(jnp.int32).max
    keeps = (sequence.document[:, -1] == 0) | (last.sum(1) > window)
    final = tuple(jnp.where(keeps[:, None, None, None], s, 0) for s in final)
    return power_state.PowerState(
        **kv_and_norm(final, sequence.key.shape[-1], power),
        **power_state.window_of(sequence, window, dtype),
    )


def _time_last(query, kv_heads):
    """[B, X, N, D] -> [B, K, G, D, X]."""
    batch, time, heads, head_dim = query.shape
    return jnp.moveaxis(query.reshape(batch, time, kv_heads, heads // kv_heads, head_dim), 1, 4)


def _time_second(out):
    """[B, K, G, E, X] -> [B, X, N, E]."""
    batch, kv_heads, group, value_dim, time = out.shape
    return jnp.moveaxis(out, 4, 1).reshape(batch, time, kv_heads * group, value_dim)


def _pad_end(x, multiple):
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2))


def _pad_last(x, front, back):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(front, back)])


def _in_chunks(x):
    """[A, X] -> [n, A, C], the last chunk filled with zeros."""
    x = _pad_last(x, 0, -x.shape[-1] % _STATE_CHUNK)
    return jnp.moveaxis(x.reshape(len(x), -1, _STATE_CHUNK), 1, 0)
