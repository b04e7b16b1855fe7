"""Power attention in plain JAX, on any device: layouts, ragged rows and states around the two cores.

Queries are scaled by a power of two, which the mean cancels exactly, so that no power of a query overflows. Products
of float32 inputs are taken at the highest precision, those of bfloat16 inputs in float32 at the device's default.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Bool, Float, Int
from sympow_jax.ops import _time_axis
from sympow_jax.ops._power import chunked as chunked_core
from sympow_jax.ops._power import decay as decays
from sympow_jax.ops._power import features, quadratic, shares
from sympow_jax.ops._power import mean as means
from sympow_jax.ops._power import state as power_state

__all__ = [
    "Rows",
    "attention",
    "chunked",
    "fold_all",
    "kv_and_norm",
    "padded",
    "precision_of",
    "time_last",
    "time_second",
    "unit_scale",
]

# Positions folded or queried at once where the attention form meets a state.
_STATE_CHUNK = 128


class Rows(NamedTuple):
    """Whole rows, positions without a token last: what a core of the chunked form works on."""

    query: Float[Array, "B X N D"]  # of unit scale, unless sums are wanted; zero where there is no token
    key: Float[Array, "B X K D"]
    value: Float[Array, "B X K E"]
    log_decay: Float[Array, "B X K *channels"] | None  # `decay.bounded`; None is no decay and no boundary
    folds: Bool[Array, "B X"] | None  # False where a position never enters the state; None among gradients
    kv: Float[Array, "B K F E"] | None  # the state before the first position; None is nothing
    norm: Float[Array, "B K F *channels"] | None


def chunked(
    query,
    key,
    value,
    *,
    power,
    log_decay,
    segment_ids,
    state,
    window,
    chunk,
    return_state,
    axis_name=None,
    core=None,
    division=means.Division.POSITIVE,
    state_type=power_state.PowerState,
):
    """The chunked form; with a chunk of 1, the recurrence. Returns the output and the state or None.

    core: what computes (out [B, X, N, E], kv, norm) from (settings, rows, return_state, axis_name); by default plain
    JAX. With an axis name the rows are those of `shares`, and there are no states.
    state_type: the state's class, which has the fields of `PowerState`.
    """
    dtype, time = jnp.promote_types(query.dtype, jnp.float32), query.shape[1]
    sequence = power_state.Sequence.join(key, value, log_decay, segment_ids, state, dtype, axis_name)
    ragged = state is not None or segment_ids is not None
    arrays = {
        "query": _masked_queries(query, sequence, division),
        "key": sequence.key,
        "value": sequence.value,
        "folds": (sequence.after >= window) if return_state else jnp.ones_like(sequence.valid),
    }
    if ragged or log_decay is not None:
        arrays["log_decay"] = decays.bounded(
            sequence.log_decay, _with_rank(sequence.start, sequence.log_decay.ndim)
        )
    valid = sequence.valid
    if axis_name is not None:
        arrays, valid = shares.with_halo(arrays, valid, window=window, ragged=ragged, axis_name=axis_name)
    if ragged:
        # Padding and empty slots go to the end, so that windows and chunks count tokens only.
        order = jnp.argsort(~valid, axis=1, stable=True)
        back = jnp.argsort(order, axis=1)
        arrays = {name: _permuted(x, order, back) for name, x in arrays.items()}
    first = {"kv": None, "norm": None} if state is None else {"kv": state.kv, "norm": state.norm}
    rows = Rows(**{"log_decay": None} | arrays | first)

    # No more keys than there are; `folds` alone says what enters the state. Over devices it is the length of a halo.
    seen = window if axis_name is not None else min(window, rows.query.shape[1])
    settings = chunked_core.Settings(power, chunk, seen, precision_of(key.dtype), division)
    out, kv, norm = (core or _core)(settings, rows, return_state, axis_name)
    if ragged:
        out = _permuted(out, back, order)
    out = _result(out[:, -time:], value, division)
    return out, _state_of(state_type, kv, norm, sequence, window, dtype) if return_state else None


def _core(settings, rows, return_state, axis_name):
    if axis_name is not None:
        return _core_of_share(settings, rows, axis_name), None, None
    length = rows.query.shape[1]
    settings, rows = _in_whole_chunks(settings, rows)
    out, final = _over_heads(chunked_core.chunked, settings, rows)(*_by_head(rows, settings.power))
    out = time_second(out)[:, :length]
    if not return_state:
        return out, None, None
    return out, *kv_and_norm(final, rows.key.shape[-1], settings.power).values()


def _core_of_share(settings, rows, axis_name):
    division = settings.division
    length, kv_heads = rows.query.shape[1], rows.key.shape[2]
    decay = shares.log_decay_over(rows.log_decay, rows.folds, kv_heads)
    settings, rows = _in_whole_chunks(settings._replace(division=means.Division.NONE), rows)
    arguments = _by_head(rows, settings.power)
    sums, final = _over_heads(chunked_core.chunked, settings, rows)(*arguments)
    _, before = _time_axis.exclusive_prefix(shares.combined, (decay.astype(sums.dtype), final), axis_name)
    add = functools.partial(shares.arriving_sums, settings.power, settings.precision)
    axes = (0, 0, None if rows.log_decay is None else 0)
    query, log_decay = arguments[0], arguments[3]
    sums += jax.vmap(jax.vmap(add, in_axes=axes), in_axes=axes)(before, query, log_decay)
    return time_second(means.of_sums(sums, -2, division))[:, :length]


def _in_whole_chunks(settings, rows):
    """Rows as long as a number of chunks, and chunks no longer than the rows."""
    settings = settings._replace(chunk=min(settings.chunk, rows.query.shape[1]))
    return settings, padded(rows, settings.chunk)


def padded(rows: Rows, multiple: int) -> Rows:
    """Rows with positions without a token behind them, up to a multiple of positions."""
    tokens = {
        name: _pad_end(x, multiple)
        for name, x in rows._asdict().items()
        if x is not None and name not in ("kv", "norm")
    }
    return rows._replace(**tokens)


def _by_head(rows, power):
    """The arguments of `chunked_core.chunked` for all heads: time last, the state in its features."""
    batch, _, kv_heads, head_dim = rows.key.shape
    if rows.kv is None:
        dtype = jnp.promote_types(rows.query.dtype, jnp.float32)
        state = features.zeros(
            rows.value, (batch, kv_heads), head_dim, rows.value.shape[-1] + 1, power, dtype
        )
    else:
        state = _groups_of(rows.kv, rows.norm, head_dim, power)
    return (
        time_last(rows.query, kv_heads),
        jnp.moveaxis(rows.key, 1, 3),
        jnp.moveaxis(rows.value, 1, 3),
        None if rows.log_decay is None else jnp.moveaxis(rows.log_decay, 1, 2),
        rows.folds,
        state,
    )


def _over_heads(f, settings, rows):
    """f of one head, for a batch of heads; arguments are those of `_by_head`."""
    decay = None if rows.log_decay is None else 0
    f = jax.vmap(functools.partial(f, settings), in_axes=(0, 0, 0, decay, None, 0))
    return jax.vmap(f, in_axes=(0, 0, 0, decay, 0, 0))


def attention(
    query,
    key,
    value,
    *,
    power,
    log_decay,
    segment_ids,
    state,
    window,
    chunk,
    return_state,
    division=means.Division.POSITIVE,
):
    """The attention form. `key` may be longer than `query`; the queries are its last tokens."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    sequence = power_state.Sequence.join(key, value, log_decay, segment_ids, state, dtype)
    query = _masked_queries(query, sequence, division)[:, -query.shape[1] :]
    sums = _sums(query, sequence, power=power, state=state, chunk=chunk, precision=precision_of(key.dtype))
    out = _result(time_second(means.of_sums(sums, -2, division)), value, division)
    if not return_state:
        return out, None
    final = _folded(sequence, power=power, state=state, window=window, precision=precision_of(key.dtype))
    return out, _state_of(power_state.PowerState, *final, sequence, window, dtype)


def _sums(query, sequence, *, power, state, chunk, precision):
    """Weighted sums of values and, last, of weights for every query, [B, K, G, E+1, T]."""
    time = query.shape[1]
    key, value, decay = _keys_time_last(sequence)
    query = time_last(query, key.shape[1])
    if time == 1:
        sums = _sums_of_last(query[..., 0], sequence, decay, power, precision)
    else:
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
    if state is None:
        return sums
    far = functools.partial(shares.arriving_sums, power, precision)
    groups = _groups_of(state.kv, state.norm, key.shape[2], power)
    return sums + jax.vmap(jax.vmap(far))(groups, query, decay)


def _sums_of_last(query, sequence, decay, power, precision):
    """Those of the last position's queries [B, K, G, D], as in decoding: all keys in one product, where they lie."""
    query, key, value = (x.astype(decay.dtype) for x in (query, sequence.key, sequence.value))
    scores = jnp.einsum("bkgd,bxkd->bkgx", query, key, precision=precision)
    weights = decays.exp(_sums_from(decay)[..., 1:])[:, :, None] * jax.lax.integer_pow(scores, power)
    values = jnp.einsum("bkgx,bxke->bkge", weights, value, precision=precision)
    return jnp.concatenate([values, weights.sum(-1, keepdims=True)], -1)[..., None]


def _folded(sequence, *, power, state, window, precision):
    """kv and norm after all of the sequence but its window."""
    key, value, decay = _keys_time_last(sequence)
    folds = (sequence.after >= window)[:, None]
    folded_decay = jnp.where(folds, decay, 0)
    sums = _sums_from(folded_decay)
    weight = jnp.where(folds, decays.exp(sums[..., 1:]), 0)
    fold = functools.partial(fold_all, power=power, precision=precision)
    final = jax.vmap(jax.vmap(fold))(value * weight[:, :, None], key)
    if state is not None:
        carry = decays.exp(sums[..., 0])[..., None, None]
        groups = _groups_of(state.kv, state.norm, key.shape[2], power)
        final = tuple(carry * s + n for s, n in zip(groups, final))
    return kv_and_norm(final, key.shape[2], power).values()


def _sums_from(decay):
    """Sums over each position and those behind it, and the empty one behind the last: [B, K, X] -> [B, K, X + 1]."""
    return jnp.pad(jnp.cumsum(decay[..., ::-1], -1)[..., ::-1], [(0, 0), (0, 0), (0, 1)])


def _keys_time_last(sequence):
    """Keys [B, K, D, X], values with a row of ones [B, K, E+1, X], and decays [B, K, X]."""
    value = jnp.moveaxis(sequence.value, 1, 3)
    value = jnp.pad(value, [(0, 0), (0, 0), (0, 1), (0, 0)], constant_values=1)
    decay = decays.bounded(sequence.log_decay, sequence.start[..., None])
    return jnp.moveaxis(sequence.key, 1, 3), value, jnp.moveaxis(decay, 1, 2)


def _masked_queries(query, sequence, division):
    """Queries at every position of the sequence, zero where there is no token; of unit scale, if for a mean."""
    slots = sequence.valid.shape[1] - query.shape[1]
    if slots > 0:
        query = jnp.pad(query, [(0, 0), (slots, 0), (0, 0), (0, 0)])
    if division is not means.Division.NONE:
        query = unit_scale(query)
    return jnp.where(sequence.valid[:, -query.shape[1] :, None, None], query, 0)


def _result(out, value, division):
    """Means are of the dtype of values, and sums of their own."""
    return out if division is means.Division.NONE else out.astype(value.dtype)


def unit_scale(query: Float[Array, "*rest D"]) -> Float[Array, "*rest D"]:
    """The query times the power of two that brings its largest entry into [1/2, 1)."""
    exponent = _unit_exponent(query)[..., None]
    # Two factors, since the inverse of the smallest normal number overflows.
    half = exponent // 2
    return jnp.ldexp(jnp.ldexp(query, -half), half - exponent)


def _unit_exponent(query: Float[Array, "*rest D"]) -> Int[Array, "*rest"]:
    """The power of two by which `unit_scale` divides."""
    return jnp.frexp(jax.lax.stop_gradient(jnp.abs(query).max(-1)))[1]


def precision_of(dtype) -> jax.lax.Precision:
    """Full precision for float32 and float64; the default (TF32 on Ampere and later) for shorter inputs."""
    return jax.lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else jax.lax.Precision.DEFAULT


@jax.custom_vjp
def _permuted(x: Float[Array, "B X *rest"], order: Int[Array, "B X"], back: Int[Array, "B X"]):
    """x in the given order of positions; its gradient is a gather too, not a scatter."""
    return jnp.take_along_axis(x, _with_rank(order, x.ndim), axis=1)


_permuted.defvjp(
    lambda x, order, back: (_permuted(x, order, back), (order, back)),
    lambda orders, dx: (_permuted(dx, *reversed(orders)), None, None),
)


def fold_all(value, key, *, power, precision):
    """The state of all keys of a head: [E+1, X], [D, X] -> state."""

    @jax.checkpoint
    def chunk(v, k):
        return features.fold(v, k, power, precision)

    def step(state, inputs):
        return tuple(s + n for s, n in zip(state, chunk(*inputs))), None

    inputs = (_in_chunks(value), _in_chunks(key).astype(value.dtype))
    start = features.zeros(value, (), len(key), len(value), power, value.dtype)
    return jax.lax.scan(step, start, inputs)[0]


def _groups_of(kv, norm, head_dim: int, power: int) -> features.Groups:
    """A state as the cores hold it, [B, K, F_g, E+1] a group, the normaliser a column of its own."""
    return features.from_canonical(jnp.concatenate([kv, norm[..., None]], -1), head_dim, power)


def kv_and_norm(sums: features.Groups, head_dim: int, power: int) -> dict[str, Array]:
    """The inverse of `_groups_of`."""
    both = features.to_canonical(sums, head_dim, power)
    return {"kv": both[..., :-1], "norm": both[..., -1]}


def _state_of(state_type, kv, norm, sequence, window, dtype):
    # A document that is all within the window has folded nothing: what was folded belongs to others.
    last = sequence.after < jnp.iinfo(jnp.int32).max
    keeps = (sequence.document[:, -1] == 0) | (last.sum(1) > window)
    return state_type(
        kv=jnp.where(_with_rank(keeps, kv.ndim), kv, 0),
        norm=jnp.where(_with_rank(keeps, norm.ndim), norm, 0),
        **power_state.window_of(sequence, window, dtype),
    )


def time_last(query, kv_heads):
    """[B, X, N, D] -> [B, K, G, D, X]."""
    batch, time, heads, head_dim = query.shape
    return jnp.moveaxis(query.reshape(batch, time, kv_heads, heads // kv_heads, head_dim), 1, 4)


def time_second(out):
    """[B, K, G, E, X] -> [B, X, N, E]."""
    batch, kv_heads, group, value_dim, time = out.shape
    return jnp.moveaxis(out, 4, 1).reshape(batch, time, kv_heads * group, value_dim)


def _with_rank(x, rank):
    """x with axes of size 1 behind it."""
    return x.reshape(x.shape + (1,) * (rank - x.ndim))


def _pad_end(x, multiple):
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2))


def _pad_last(x, front, back):
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(front, back)])


def _in_chunks(x):
    """[A, X] -> [n, A, C], the last chunk filled with zeros."""
    x = _pad_last(x, 0, -x.shape[-1] % _STATE_CHUNK)
    return jnp.moveaxis(x.reshape(len(x), -1, _STATE_CHUNK), 1, 0)
