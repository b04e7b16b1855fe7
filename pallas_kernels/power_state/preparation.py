"""Operands of the main kernels: layouts and scales, from what `units`, `decays` and `recurrence` compute.

The state kernels work in float16, which has three more bits than bfloat16 but a small range. Each key is therefore
divided by a power of two that brings its largest entry below 1, and the state before chunk c by 2^shift_c, chosen from
a bound on its entries. Both are exact for normal numbers, and undone where states are queried or returned.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import numerics, results
from pallas_kernels.power_state import configs, decays, recurrence, reshaping, units

# Smaller values count as this in the scales of states, since normalizers, in float32, have the same scales.
LEAST_VALUE = 2.0**-90


class Arguments(NamedTuple):
    """Arguments of both passes."""

    query: jax.Array  # bfloat16 [B, T, N, D], N a multiple of K
    key: jax.Array  # bfloat16 [B, T, K, D]
    value: jax.Array  # bfloat16 [B, T, K, E]
    # [B, T, K], read in float32, at most 0; a value below -87 is a boundary that no pair crosses, as where a document
    # starts
    log_decay: jax.Array
    # bool [B, T]; positions where it is False, the last ones of a row, never enter a state, nor does their decay
    enters_state: jax.Array

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, K, D and E."""
        batch, _, kv_heads, head_dim = self.key.shape
        return batch, kv_heads, head_dim, self.value.shape[-1]


class Saved(NamedTuple):
    """States before each chunk, read by its queries and the backward pass, or gradients of states, last chunk first.

    They take 2 F E bytes per chunk and head. F is that of the kernels' layout: 2,560 for 2,080 distinct
    features at p = 2 and D = 64.
    """

    states: jax.Array  # float16 [B, K, n, ...] in the order of the layout, divided by 2^shift
    norms: jax.Array  # bfloat16 [B, K, n, 2 D, D] at p = 2, as `split`: the normalizers Z, divided by 2^shift
    shifts: jax.Array  # int32 [B, K, n]

    @classmethod
    def of(cls, states, norms, shifts, batch):
        """Builds the saved states from arrays with B and K in one leading axis."""
        return cls(*(x.reshape(batch, -1, *x.shape[1:]) for x in (states, norms, shifts)))

    def by_head(self):
        """Returns the arrays with B and K in one axis."""
        return Saved(*(x.reshape(-1, *x.shape[2:]) for x in self))


class Chunks(NamedTuple):
    """Tokens by chunk, and the decays between them.

    Axes are those of README.md. Chunk c folds the padded positions from c C on, which are tokens from c C - W on. No
    chunk folds the last W.
    """

    key: jax.Array  # bfloat16 [B, at least T, K, D]
    value: jax.Array  # bfloat16 [B, at least T, K, E]
    units: units.Units
    folded_exponent: jax.Array  # int32 [H, n, C], exponent of the divisor of each folded key
    folded_value: jax.Array  # float32 [H, n, C, E]
    folded_size: jax.Array  # float32 [H, n, C], the largest entry of each folded value
    decays: decays.Decays
    entering: jax.Array  # int32 [B], how many positions update the state, from W before the first token on


class Carried(NamedTuple):
    """Weights of tokens in the states of a walk over n chunks, and the scales of these states."""

    strength: jax.Array  # float32 [H, n, C], weight of tokens in the state after their chunk, in its scale
    scales: recurrence.Scales
    # float32 [H, n, C], weight of tokens in the chunk's own normalizer, at most 1 and so in the range of float16
    norm_weights: jax.Array
    log2_norm_unit: jax.Array  # float32 [H, n], base-2 logarithm of what these weights were divided by


def carried_keys(tokens: Chunks, call: configs.Call) -> Carried:
    """Returns the weights of keys in the states, and the scales."""
    to_end, exponent = tokens.decays.log2_to_end, tokens.folded_exponent
    enters = (to_end > decays.NOTHING) & (exponent > units.OF_ZEROS)
    log2_strength = jnp.where(enters, to_end + call.power * exponent, decays.NOTHING)
    size = jnp.maximum(tokens.folded_size, LEAST_VALUE)
    return carry_along(log2_strength, size, jnp.ones_like(size), tokens.decays.log2_across, call)


def scale_of(tokens: Chunks, shift):
    """Returns the factor from states divided by 2^shift [H, n] to each query, float32 [H, X / 64, 64]."""
    scale = scaled_decay(tokens.decays.log2_from_start, shift[..., None])
    return scale.reshape(len(scale), -1, configs.BLOCK)


def by_chunk(arguments: Arguments, call: configs.Call) -> Chunks:
    """Returns the tokens by chunk, with their decays.

    Both halves of a pass call this; in one program, the kernels run once.
    """
    query, key, value, log_decay, enters_state = arguments
    chunk, time = call.chunk, key.shape[1]
    query, key = (results.whole(reshaping.fill(x, call.config.head_dim)) for x in (query, key))
    value = results.whole(reshaping.fill(value, call.config.value_dim))
    in_units = units.in_units(query, key, value, call=call)
    log2_decay, entering = _by_head(log_decay, enters_state, call)
    folded_exponent, folded_value, folded_size = (
        reshaping.resized(x, time + -time % chunk).reshape(len(x), -1, chunk, *x.shape[2:])
        for x in (
            in_units.key_exponent,
            reshaping.pad(reshaping.heads_first(value), call.exact_window, 0),
            in_units.value_size,
        )
    )
    return Chunks(
        key=key,
        value=value,
        units=in_units,
        folded_exponent=folded_exponent,
        folded_value=folded_value.astype(jnp.float32),
        folded_size=folded_size,
        decays=decays.chunk_decays(log2_decay, entering, call=call),
        entering=entering,
    )


def log2_across(arguments: Arguments, call: configs.Call):
    """Returns log2 of the decay of the state over each chunk, float32 [H, n], as in `decays.Decays`."""
    log2_decay, entering = _by_head(arguments.log_decay, arguments.enters_state, call)
    return decays.chunk_decays(log2_decay, entering, call=call).log2_across


def _by_head(log_decay, enters_state, call: configs.Call):
    """Returns log2 of the decay at each position, float32 [H, W + X], and how many enter the state, int32 [B]."""
    time = log_decay.shape[1]
    padding = -time % call.chunk
    log_decay = jnp.where(log_decay < numerics.FLOOR, decays.FORGET, log_decay.astype(jnp.float32))
    log2_decay = reshaping.pad(reshaping.heads_first(log_decay) * decays.LOG2E, call.exact_window, padding)
    # Those before the first that does not. Padding after it is zeros, whatever the mask says there.
    count = jnp.where(enters_state, time, jnp.arange(time, dtype=jnp.int32)).min(1)
    # No chunk folds the last W positions.
    return log2_decay, jnp.minimum(call.exact_window + count, time + padding)


def carry_along(
    log2_strength, size, in_norm, log2_across, call: configs.Call, reverse: bool = False
) -> Carried:
    """Returns the weights of tokens in the states of a walk from zero, and the scales.

    log2_strength, size, in_norm: float32 [H, n, G C], in the order of the walk: log2 of a token's weight in the state
    after its chunk, its largest entry, and what its weight in normalizers is multiplied with, of either sign.
    log2_across: float32 [H, n], in the order of time. reverse: whether the walk begins at the last chunk.
    """
    log2_size = jnp.where(size > 0, jnp.log2(jnp.where(size > 0, size, 1)), decays.NOTHING)
    log2_new = log2_strength + log2_size
    exponent = numerics.exponent(in_norm)
    log2_in_norm = jnp.where(in_norm != 0, log2_strength + exponent, decays.NOTHING)
    largest, norm_unit = log2_new.max(-1), log2_in_norm.max(-1)
    sums = jnp.exp2(log2_new - largest[..., None]).sum(-1)
    segments = call.config.segments
    scales = recurrence.scales(
        log2_across, largest, sums, segments=segments, reverse=reverse, interpret=call.interpret
    )
    return Carried(
        strength=jnp.exp2(log2_strength - scales.shift[:, 1:, None]),
        scales=scales,
        norm_weights=numerics.scaled(in_norm, -exponent) * jnp.exp2(log2_in_norm - norm_unit[..., None]),
        log2_norm_unit=norm_unit,
    )


def scaled_decay(log2_decay, exponent):
    """Returns decays [H, n, C] times 2^exponent, zero where the decay counts as zero."""
    return jnp.where(log2_decay > decays.NOTHING, jnp.exp2(log2_decay + exponent), 0)
