"""What the kernels are given: layouts, decays and scales.

The state kernels work in float16, which has three more bits than bfloat16 and a narrow range. So each key is divided
by a power of two that brings its largest entry below 1, and the state before chunk c by 2^shift_c, chosen from a bound
on its entries. Both are exact, and undone where states are queried or returned.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import numerics
from pallas_kernels.power_state import config as configs

__all__ = [
    "NEVER",
    "NOTHING",
    "Prepared",
    "Scaled",
    "heads_first",
    "log2_scale",
    "norms",
    "pad",
    "prepare",
    "scale_all",
    "shifts",
    "time_last",
]

_LOG2E = float(np.log2(np.e))
# Below this, exp counts as zero: the logarithm of the smallest normal float32.
_FLOOR = int(np.log(np.finfo(np.float32).tiny))
# What stands for decays below it: exp of this is zero even where subnormal numbers are kept.
_FORGET = -105
# States, and products of a value and a key, stay below 2^13: float16 ends at 2^16.
_HEADROOM = 13
# The base-2 logarithm of nothing, finite so that differences are.
NOTHING = -1e4
# That of a decay to zero: no difference of two scales makes up for it.
NEVER = -1e5


class Prepared(NamedTuple):
    """Arguments of the kernels; H = B K heads, n chunks of C, X = n C, and W positions in front of the first."""

    query: jax.Array  # bfloat16 [B N, X, D], largest entries in [1/2, 1)
    scalars: jax.Array  # 16-bit [B N, D, X], the same
    key: jax.Array  # bfloat16 [H, W + X, D]
    value: jax.Array  # bfloat16 [H, W + X, E]
    update_key: jax.Array  # 16-bit [H, R, X], time last, positions that chunk c folds at c
    update_value: jax.Array  # 16-bit [H, E, X], the same positions, scaled to the end of their chunk
    carry: jax.Array  # float32 [H, n]
    decay: jax.Array  # float32 [H, n, 2, (W + C) / 64, 64]
    scale: jax.Array  # float32 [H, X / 64, 64]
    shift: jax.Array  # int32 [H, n + 1]
    log2_carry: jax.Array  # float32 [H, n], finite
    norm: jax.Array  # float32 [H, n + 1, D, D], Z before each chunk times 2^-shift


class Scaled(NamedTuple):
    """What kernels of all powers start from."""

    query: jax.Array  # as in Prepared
    key: jax.Array
    value: jax.Array
    old_key: jax.Array  # float32 [H, n, C, D], what chunk c folds at c, largest entries in [1/2, 1)
    old_value: jax.Array  # float32 [H, n, C, E]
    strength: jax.Array  # float32 [H, n, C, 1], to the end of the chunk, in the scale of the state after it
    carry: jax.Array  # as in Prepared
    decay: jax.Array
    scale: jax.Array
    shift: jax.Array
    log2_carry: jax.Array


def prepare(
    query, key, value, log_decay, folds, start_size, start_norm, *, layout, chunk, window, state_dtype
) -> Prepared:
    """From query [B, T, N, D], key [B, T, K, D], value [B, T, K, E], log_decay [B, T, K], folds [B, T].

    start_size: float32 [H], the largest entry of the state before the first token; start_norm: float32 [H, D, D].
    """
    base = scale_all(query, key, value, log_decay, folds, start_size, power=2, chunk=chunk, window=window)
    update_key = time_last(base.old_key.astype(state_dtype))
    new = jnp.einsum(
        "hnxd,hnxe->hnde", base.old_key, base.strength * base.old_key, precision=jax.lax.Precision.HIGHEST
    )
    return Prepared(
        query=base.query,
        scalars=jnp.swapaxes(base.query, 1, 2).astype(state_dtype),
        key=base.key,
        value=base.value,
        update_key=jnp.concatenate([update_key, update_key[:, : layout.rows - layout.head_dim]], 1),
        update_value=time_last((base.old_value * base.strength).astype(state_dtype)),
        carry=base.carry,
        decay=base.decay,
        scale=base.scale,
        shift=base.shift,
        log2_carry=base.log2_carry,
        norm=norms(base.log2_carry, new, numerics.scaled(start_norm, -base.shift[:, :1, None])),
    )


def scale_all(query, key, value, log_decay, folds, start_size, *, power, chunk, window, shift=None) -> Scaled:
    """Decays and powers of two, from the arguments of `prepare`; `shift` is that of an earlier call, if known."""
    heads = key.shape[2]
    extra = -query.shape[1] % chunk
    query = pad(heads_first(query), 0, extra)
    query = numerics.scaled(query, -_exponent(query))
    key, value = (pad(heads_first(x), window, extra) for x in (key, value))
    log_decay = pad(heads_first(log_decay.astype(jnp.float32)), window, extra)
    folds = pad(jnp.repeat(folds, heads, 0), window, extra)
    chunks = query.shape[1] // chunk
    seen = np.arange(chunks)[:, None] * chunk + np.arange(window + chunk)
    block = jnp.where(log_decay < _FLOOR, _FORGET, log_decay)[:, seen] * _LOG2E

    coarse, fine = numerics.running_sums(block, -_FORGET * _LOG2E)
    folded = folds[:, seen[:, :chunk]]
    block = jnp.where(folded, block[..., :chunk], 0)
    carry = block.sum(-1)
    after = jnp.flip(jnp.cumsum(jnp.flip(block, -1), -1), -1)
    to_state = jnp.pad(after[..., 1:], [(0, 0), (0, 0), (0, 1)])

    old_key, old_value = (x[:, seen[:, :chunk]].astype(jnp.float32) for x in (key, value))
    exponent = _exponent(old_key)
    old_key = numerics.scaled(old_key, -exponent)
    strength = jnp.where(folded & (to_state >= _FLOOR * _LOG2E), to_state + power * exponent[..., 0], NOTHING)
    size = jnp.abs(old_value).max(-1)
    if shift is None:
        shift = shifts(strength, size, carry, start_size)
    log2_carry = jnp.where(carry < _FLOOR * _LOG2E, NEVER, carry + (shift[:, :-1] - shift[:, 1:]))
    return Scaled(
        query=query,
        key=key,
        value=value,
        old_key=old_key,
        old_value=old_value,
        strength=jnp.exp2(strength - shift[:, 1:, None])[..., None],
        carry=jnp.exp2(log2_carry),
        decay=jnp.stack([coarse, fine], 2).reshape(*coarse.shape[:2], 2, -1, configs.BLOCK),
        scale=_scale((coarse + fine)[..., window:], shift[:, :-1]).reshape(len(key), -1, configs.BLOCK),
        shift=shift,
        log2_carry=log2_carry,
    )


def time_last(x):
    """[H, n, C, D] -> [H, D, X]."""
    return jnp.swapaxes(x, -1, -2).swapaxes(1, 2).reshape(len(x), x.shape[-1], -1)


def norms(log2_carry, new, start):
    """Z before each chunk and after the last, scaled like the states, from what each chunk adds [H, n, D, D]."""

    def add(weights, x):
        return jnp.einsum("...cj,...jde->...cde", jnp.exp2(weights), x, precision=jax.lax.Precision.HIGHEST)

    return _recurrence(log2_carry, new, start, add)


def shifts(strength, size, carry, start):
    """Powers of two, int32 [H, n + 1], that bring the states before each chunk, and the last, below 2^_HEADROOM.

    strength: float32 [H, n, C], base-2 logarithms of the factors of what chunks add, of which values are size [H, n, C]
    at most; carry [H, n]: those of what states decay by; start [H]: the largest entry of the first.
    """
    size = jnp.where(size > 0, jnp.log2(jnp.where(size > 0, size, 1)), NOTHING)
    start = jnp.where(start > 0, jnp.log2(jnp.where(start > 0, start, 1)), NOTHING)

    def add(weights, x):
        return _log2_sum(weights + x[..., None, :])

    bound = _recurrence(carry, _log2_sum(strength + size), start, add)
    # Nothing at all needs no scale.
    return jnp.where(bound > NOTHING / 2, jnp.ceil(bound) - _HEADROOM, 0).astype(jnp.int32)


def _recurrence(log2_carry, new, start, add):
    """x_0 = start and x_{c+1} = 2^log2_carry_c x_c + new_c, [H, n + 1, ...], by sums of many terms at once.

    add(weights [..., c, j], x [..., j, *rest]) is the sum of 2^weights x over j, [..., c, *rest]. Pairs of chunks are
    met in runs of about sqrt(n) chunks, then pairs of runs: all of n^2 pairs would outgrow the states.
    """
    heads, count = log2_carry.shape
    length = max(1, math.isqrt(count))
    runs = -(-count // length)

    def in_runs(x):
        x = jnp.pad(x, [(0, 0), (0, runs * length - count)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(heads, runs, length, *x.shape[2:])

    log2_carry, new = in_runs(log2_carry), in_runs(new)
    inside, across = _between(log2_carry), _between(log2_carry.sum(-1))
    added = add(inside[..., -1:, 1:], new)[:, :, 0]
    before = add(across, jnp.concatenate([start[:, None], added], 1))
    x = add(inside, jnp.concatenate([before[:, :-1, None], new], 2))
    every = x[:, :, :-1].reshape(heads, -1, *x.shape[3:])
    return jnp.concatenate([every, before[:, -1:]], 1)[:, : count + 1]


def _between(log2_carry):
    """[..., n + 1, n + 1]: the sum of log2_carry [..., n] over j, ..., c - 1 at [c, j]; nothing where j > c."""
    count = log2_carry.shape[-1] + 1
    row, column = np.arange(count)[:, None], np.arange(count)
    steps = jnp.pad(log2_carry, [(0, 0)] * (log2_carry.ndim - 1) + [(1, 0)])[..., None]
    return jnp.where(row >= column, jnp.cumsum(jnp.where(row > column, steps, 0), -2), NOTHING)


def log2_scale(log2_decay):
    """From the state before a chunk to its queries, whose decays [H, n, C] may count as zero."""
    return jnp.where(log2_decay < _FLOOR * _LOG2E, NOTHING, log2_decay)


def _scale(log2_decay, shift):
    """From the states before chunks, divided by 2^shift, to their queries."""
    return jnp.where(log2_decay < _FLOOR * _LOG2E, 0, jnp.exp2(log2_decay + shift[..., None]))


def _log2_sum(x):
    """log2 of the sum of 2^x along the last axis."""
    largest = x.max(-1, keepdims=True)
    return largest[..., 0] + jnp.log2(jnp.exp2(x - largest).sum(-1))


def _exponent(x):
    """The power of two, int32 [..., 1], that divides x [..., D] to a largest entry in [1/2, 1)."""
    return numerics.exponent(jnp.abs(x).max(-1, keepdims=True))


def heads_first(x):
    """[B, T, N, ...] -> [B N, T, ...]."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def pad(x, front, back):
    """Zeros before and after the second axis."""
    return jnp.pad(x, [(0, 0), (front, back)] + [(0, 0)] * (x.ndim - 2))
