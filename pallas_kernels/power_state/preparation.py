"""Operands of the kernels: layouts, decays and scales, in plain JAX.

The state kernels work in float16, which has three more bits than bfloat16 but a small range. Each key is therefore
divided by a power of two that brings its largest entry below 1, and the state before chunk c by 2^shift_c, chosen from
a bound on its entries. Both are exact for normal numbers, and undone where states are queried or returned.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hopper import numerics, results
from pallas_kernels.power_state import configs

_LOG2E = float(np.log2(np.e))
# Below this, exp counts as zero: the logarithm of the smallest normal float32.
_FLOOR = int(np.log(np.finfo(np.float32).tiny))
# Replaces log decays below the floor: exp of this is zero even where subnormal numbers are kept.
_FORGET = -105
# States, and products of a value and a key, stay below 2^13: float16 ends at 2^16.
HEADROOM = 13
# Base-2 logarithm of zero, finite so that differences are finite.
_NOTHING = -1e4
# Up to this number of chunks, bounds of all states are summed at once from those of all earlier ones.
_FEW_CHUNKS = 128
# Base-2 logarithm of a decay to zero between states: below _NOTHING, whatever the difference of their scales.
_NEVER = -1e5


class Arguments(NamedTuple):
    """Arguments of both passes."""

    query: jax.Array  # bfloat16 [B, T, N, D], N a multiple of K
    key: jax.Array  # bfloat16 [B, T, K, D]
    value: jax.Array  # bfloat16 [B, T, K, E]
    # float32 [B, T, K], at most 0; a value below -87 is a boundary that no pair crosses, as where a document starts
    log_decay: jax.Array
    # bool [B, T]; positions where it is False, the last ones of a row, never enter a state, nor does their decay
    enters_state: jax.Array

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, K, D and E."""
        batch, _, kv_heads, head_dim = self.key.shape
        return batch, kv_heads, head_dim, self.value.shape[-1]


class Saved(NamedTuple):
    """States before each chunk, read by its queries and the backward pass.

    They take 2 F E bytes per chunk and head. F is that of the kernels' layout: 2,560 for 2,080 distinct
    features at p = 2 and D = 64.
    """

    states: jax.Array  # float16 [B, K, n, ...] in the order of the layout, divided by 2^shift
    norms: jax.Array  # float32 [B, K, n, D, D], the normalizers Z, divided by 2^shift
    shifts: jax.Array  # int32 [B, K, n]

    @classmethod
    def of(cls, states, norms, shifts, batch):
        """Builds the saved states from arrays with B and K in one leading axis.

        The norms and shifts after the last chunk are dropped.
        """
        arrays = states, norms[:, :-1], shifts[:, :-1]
        return cls(*(x.reshape(batch, -1, *x.shape[1:]) for x in arrays))

    def by_head(self):
        """Returns the arrays with B and K in one axis."""
        return Saved(*(x.reshape(-1, *x.shape[2:]) for x in self))


class Chunks(NamedTuple):
    """Keys and values by chunk, and the base-2 logarithms of decays between them; _NOTHING stands for zero.

    H = B K heads, n chunks of C, X = n C, and W positions before the first.
    """

    key: jax.Array  # bfloat16 [B, at least T, K, D]
    value: jax.Array  # bfloat16 [B, at least T, K, E]
    old_key: jax.Array  # float32 [H, n, C, D], keys folded in chunk c, largest entries in [1/2, 1)
    old_exponent: jax.Array  # int32 [H, n, C, 1], exponent of its divisor
    old_value: jax.Array  # float32 [H, n, C, E]
    old_size: jax.Array  # float32 [H, n, C], its largest entry
    # float32 [H, n, 3, (W + C) / 64, 64]: running sums over a chunk's keys, in two parts, and the decay from each key
    # to the last one of its block of 64.
    decay: jax.Array
    log2_from_start: jax.Array  # float32 [H, n, C], from the state before the chunk to each query
    log2_to_end: jax.Array  # float32 [H, n, C], from each old key to the state after the chunk
    log2_across: jax.Array  # float32 [H, n], from one state to the next
    enters_state: jax.Array  # bool [H, n, C], which of the old keys update the state


class Carried(NamedTuple):
    """Growth of states along n chunks, with powers of two that keep them in range."""

    strength: jax.Array  # float32 [H, n, C], weight of tokens in the state after their chunk, in its scale
    carry: jax.Array  # float32 [H, n], factor from one state to the next, in their scales
    shift: jax.Array  # int32 [H, n + 1], exponents of the states' scales
    log2_carry: jax.Array  # float32 [H, n], finite


def carried_keys(tokens: Chunks, start_size, power) -> Carried:
    """Returns the growth of the states of keys.

    start_size: float32 [H], the largest entry of the state before the first chunk.
    """
    log2_strength = jnp.where(
        tokens.log2_to_end > _NOTHING, tokens.log2_to_end + power * tokens.old_exponent[..., 0], _NOTHING
    )
    return carry_along(log2_strength, tokens.old_size, tokens.log2_across, start_size)


def size_of(state, given):
    """Returns the largest entry of each head's state, float32 [H]; zero if `given` is None.

    state: [H, ...], with three axes after the first at all powers.
    """
    # XLA would constant-fold the maximum of many zeros at compile time, which takes seconds per layer.
    return jnp.zeros(len(state)) if given is None else jnp.abs(state).max((1, 2, 3))


def scale_of(tokens: Chunks, shift):
    """Returns the factor from states divided by 2^shift [H, n] to each query, float32 [H, X / 64, 64]."""
    scale = scaled_decay(tokens.log2_from_start, shift[..., None])
    return scale.reshape(len(scale), -1, configs.BLOCK)


def queries(query):
    """Returns queries with largest entries in [1/2, 1), [B N, T, D], and their exponents, int32 [B N, T, 1].

    query: [B, T, N, D]; time is padded to whole blocks.
    """
    # Only to whole blocks, not to whole chunks: with more padding, XLA would write a copy before the transposed one.
    query = results.whole(query)
    query, size = (heads_first(x) for x in (query, _sizes(query)))
    exponent = numerics.exponent(size)[..., None]
    return numerics.scaled(query, -exponent), exponent


def by_chunk(arguments: Arguments, call: configs.Call) -> Chunks:
    """Returns keys and values by chunk, with their decays."""
    _, key, value, log_decay, enters_state = arguments
    chunk, exact_window = call.chunk, call.exact_window
    extra = -key.shape[1] % chunk
    key, value = (
        results.whole(fill(x, size))
        for x, size in ((key, call.config.head_dim), (value, call.config.value_dim))
    )
    old_key, old_value, key_size, old_size = (
        _folded(pad(heads_first(x[:, : log_decay.shape[1]]), exact_window, extra), chunk, exact_window)
        for x in (key, value, _sizes(key), _sizes(value))
    )
    old_key, old_value = old_key.astype(jnp.float32), old_value.astype(jnp.float32)
    old_exponent = numerics.exponent(key_size)[..., None]
    block, enters_state = _decays(log_decay, enters_state, chunk, exact_window)
    coarse, fine = numerics.running_sums(block, -_FORGET * _LOG2E)
    block = jnp.where(enters_state, block[..., :chunk], 0)
    after = numerics.suffix_sums(block)
    to_end = jnp.pad(after[..., 1:], [(0, 0), (0, 0), (0, 1)])
    by_block = [x.reshape(*x.shape[:2], -1, configs.BLOCK) for x in (coarse, fine)]
    coarse_to_last, fine_to_last = (x[..., -1:] - x for x in by_block)
    return Chunks(
        key=key,
        value=value,
        old_key=numerics.scaled(old_key, -old_exponent),
        old_exponent=old_exponent,
        old_value=old_value,
        old_size=old_size,
        decay=jnp.stack([*by_block, jnp.exp2(coarse_to_last + fine_to_last)], 2),
        log2_from_start=_log2((coarse + fine)[..., exact_window:]),
        log2_to_end=jnp.where(enters_state, _log2(to_end), _NOTHING),
        log2_across=_log2(block.sum(-1)),
        enters_state=enters_state,
    )


def over_chunks(arguments: Arguments, call: configs.Call):
    """Returns log2 of the decay of the state over each chunk, float32 [H, n], as in `Chunks`."""
    block, enters_state = _decays(arguments.log_decay, arguments.enters_state, call.chunk, call.exact_window)
    return _log2(jnp.where(enters_state, block[..., : call.chunk], 0).sum(-1))


def _decays(log_decay, enters_state, chunk, exact_window):
    """Returns log2 of the decay at each position of a chunk and its window, and a mask of folded positions.

    The decays are [H, n, W + C]. The mask is of the first C of these positions.
    """
    heads, extra = log_decay.shape[2], -log_decay.shape[1] % chunk
    log_decay = pad(heads_first(log_decay.astype(jnp.float32)), exact_window, extra)
    enters_state = pad(jnp.repeat(enters_state, heads, 0), exact_window, extra)
    log2_decay = jnp.where(log_decay < _FLOOR, _FORGET, log_decay) * _LOG2E
    # A chunk's positions are those that it folds, followed by the first positions that the next chunk folds.
    own = _folded(log2_decay, chunk, exact_window)
    after = jnp.concatenate(
        [own[:, 1:, :exact_window], log2_decay[:, None, log2_decay.shape[1] - exact_window :]], 1
    )
    return jnp.concatenate([own, after], -1), _folded(enters_state, chunk, exact_window)


def _folded(x, chunk, exact_window):
    """Reshapes [H, W + X, ...] to [H, n, C, ...], the positions that each chunk folds.

    These are the first positions of the chunk and its window.
    """
    length = x.shape[1] - exact_window
    return x[:, :length].reshape(len(x), -1, chunk, *x.shape[2:])


def carry_along(log2_strength, size, log2_across, start_size) -> Carried:
    """Returns the growth of states from log2 of token weights [H, n, C] and of decays over chunks.

    size: largest entry of each token. start_size: float32 [H], the largest entry of the state before the first chunk.
    """

    def log2(x):
        return jnp.where(x > 0, jnp.log2(jnp.where(x > 0, x, 1)), _NOTHING)

    # Exponents whose powers of two bring the states below 2^HEADROOM. An empty state needs no scale.
    bound = _log2_recurrence(log2_across, _log2_sum(log2_strength + log2(size)), log2(start_size))
    shift = jnp.where(bound > _NOTHING / 2, jnp.ceil(bound) - HEADROOM, 0).astype(jnp.int32)
    difference = log2_across + (shift[:, :-1] - shift[:, 1:])
    log2_carry = jnp.where(log2_across > _NOTHING, difference, _NEVER)
    return Carried(
        strength=jnp.exp2(log2_strength - shift[:, 1:, None]),
        carry=jnp.exp2(log2_carry),
        shift=shift,
        log2_carry=log2_carry,
    )


def scaled_decay(log2_decay, exponent):
    """Returns decays [H, n, C] times 2^exponent, zero where the decay counts as zero."""
    return jnp.where(log2_decay > _NOTHING, jnp.exp2(log2_decay + exponent), 0)


def time_last(x):
    """Reshapes [H, n, C, D] to [H, D, X]."""
    return jnp.swapaxes(x, -1, -2).swapaxes(1, 2).reshape(len(x), x.shape[-1], -1)


def _log2_recurrence(log2_carry, new, start):
    """Returns log2 of x_0 = 2^start and x_{c+1} = 2^log2_carry_c x_c + 2^new_c, [H, n + 1], by sums of many terms.

    Many chunks are combined within runs of about sqrt(n), then the runs: all pairs at once would be sums of n^3 terms.
    """

    def add(weights, x):
        return _log2_sum(weights + x[..., None, :])

    heads, count = log2_carry.shape
    if count <= _FEW_CHUNKS:
        return add(_between(log2_carry), jnp.concatenate([start[:, None], new], 1))
    length = math.isqrt(count)
    runs = -(-count // length)

    # Chunks at the end, which no other chunk reads.
    def in_runs(x):
        return jnp.pad(x, [(0, 0), (0, runs * length - count)]).reshape(heads, runs, length)

    log2_carry, new = in_runs(log2_carry), in_runs(new)
    inside, across = _between(log2_carry), _between(log2_carry.sum(-1))
    added = add(inside[..., -1:, 1:], new)[..., 0]
    before = add(across, jnp.concatenate([start[:, None], added], 1))
    x = add(inside, jnp.concatenate([before[:, :-1, None], new], 2))
    every = x[:, :, :-1].reshape(heads, -1)
    return jnp.concatenate([every, before[:, -1:]], 1)[:, : count + 1]


def _between(log2_carry):
    """Returns sums of log2_carry [..., n] over j, ..., c - 1 at [c, j], [..., n + 1, n + 1].

    The entry is _NOTHING where j > c.
    """
    count = log2_carry.shape[-1]
    row, column = np.arange(count + 1)[:, None], np.arange(count + 1)
    step = np.arange(count)
    # A masked sum is one launch, a cumulative sum several.
    crossed = (step >= column[:, None]) & (step < row[..., None])
    sums = jnp.where(crossed, log2_carry[..., None, None, :], 0).sum(-1)
    return jnp.where(row >= column, sums, _NOTHING)


def _log2(decay):
    """Returns a base-2 log decay, replaced by _NOTHING where the decay counts as zero."""
    return jnp.where(decay < _FLOOR * _LOG2E, _NOTHING, decay)


def _log2_sum(x):
    """Returns log2 of the sum of 2^x along the last axis."""
    largest = x.max(-1, keepdims=True)
    return largest[..., 0] + jnp.log2(jnp.exp2(x - largest).sum(-1))


def _sizes(x):
    """Returns the largest entries of x [B, T, N, D], float32 [B, T, N]."""
    # Before any transpose: after it, XLA would read rows with a stride.
    return jax.lax.optimization_barrier(jnp.abs(x).max(-1)).astype(jnp.float32)


def heads_first(x):
    """Reshapes [B, T, N, ...] to [B N, T, ...]."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], *x.shape[3:])


def pad(x, front, back):
    """Pads the second axis with zeros before and after."""
    return jnp.pad(x, [(0, 0), (front, back)] + [(0, 0)] * (x.ndim - 2))


def tokens_second(x, batch):
    """Reshapes [B N, T, ...] to [B, T, N, ...], the inverse of `heads_first`."""
    return jnp.swapaxes(x.reshape(batch, -1, *x.shape[1:]), 1, 2)


def fill(x, size):
    """Pads the last axis with zeros to `size`."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def split(x):
    """Returns x [..., A, B] rounded to bfloat16, then the rounding errors in bfloat16: [..., 2 A, B]."""
    # The compiler may remove a conversion to the dtype and back, so use reduce_precision.
    rounded = jax.lax.reduce_precision(x, jnp.finfo(jnp.bfloat16).nexp, jnp.finfo(jnp.bfloat16).nmant)
    return jnp.concatenate([rounded.astype(jnp.bfloat16), (x - rounded).astype(jnp.bfloat16)], -2)
