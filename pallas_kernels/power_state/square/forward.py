"""The forward pass at p = 2: operands of the kernels, and states in canonical order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import numerics
from pallas_kernels.power_state import configs, preparation, reshaping, segments
from pallas_kernels.power_state.square import layouts
from pallas_kernels.power_state.square import norms as norm_kernel
from pallas_kernels.power_state.square import query as query_kernel
from pallas_kernels.power_state.square import update as update_kernel


class Operands(NamedTuple):
    """Tokens of a walk over the chunks, for G heads of each of H states, as in `update.Operands`."""

    key: jax.Array  # float16 [HN, D, any length]
    value: jax.Array  # float16 [HN, E, any length], times its weight in the state after its chunk
    reverse: bool = False


def stored(state, sizes, config: configs.Config):
    """Returns a state (kv, norm) as stored states are, in float32 and its own scale: [H, 16, E, P] and Z [H, D, D].

    sizes: B, K, D and E before padding.
    """
    batch, kv_heads, head_dim, _ = sizes
    kv, norm = (x.reshape(batch * kv_heads, *x.shape[2:]) for x in state)
    kv = layouts.from_canonical(
        reshaping.fill(kv, config.value_dim), layouts.Layout(config.head_dim), head_dim
    )
    norm = layouts.norm_from_canonical(norm, head_dim)
    return kv, jnp.pad(norm, [(0, 0)] + [(0, config.head_dim - head_dim)] * 2)


def returned(state, norm, shift, sizes, config: configs.Config):
    """Converts a state [H, 16, E, P] and Z, both divided by 2^shift [H], to canonical order: inverts `stored`."""
    batch, kv_heads, head_dim, value_dim = sizes
    kv = layouts.to_canonical(state[:, :, :value_dim], layouts.Layout(config.head_dim), head_dim)
    kv = numerics.scaled(kv, shift[:, None, None])
    norm = numerics.scaled(layouts.norm_to_canonical(norm[:, :head_dim, :head_dim]), shift[:, None])
    return kv.reshape(batch, kv_heads, *kv.shape[1:]), norm.reshape(batch, kv_heads, -1)


def operands_of_keys(tokens: preparation.Chunks, strength) -> Operands:
    """Returns the operands of the update with keys and values."""
    value = (tokens.folded_value * strength[..., None]).astype(jnp.float16)
    return Operands(tokens.units.key_by_entry, reshaping.time_last(value))


def states(operands: Operands, carried: preparation.Carried, call: configs.Call):
    """Returns the state before each chunk, float16 [H, n, 16, E, P], and the last, float32 [H, 16, E, P].

    Both are divided by 2^shift.
    """
    layout = layouts.Layout(call.config.head_dim)
    arrays = update_kernel.Operands(operands.key, operands.value, carried.scales.carry)
    before, finals = update_kernel.update(arrays, call=call, reverse=operands.reverse)
    # From [H, segments, 16, sections, E, P / sections] to [H, segments, 16, E, P].
    finals = jnp.swapaxes(finals, 3, 4).reshape(*finals.shape[:3], -1, layout.width)
    return segments.join(before, finals, carried.scales, interpret=call.interpret)


def norms(operands: Operands, weights, interpret):
    """Returns Z of each chunk of the walk, float32 [H, n, D, D].

    weights: float32 [H, n, G C], at most 1, of either sign.
    """
    return norm_kernel.norms(operands.key, weights, reverse=operands.reverse, interpret=interpret)


def attend(tokens: preparation.Chunks, saved: preparation.Saved, time, with_remainder, call: configs.Call):
    """Returns the results of `query.query_states`."""
    operands = query_kernel.Operands(
        query=tokens.units.query,
        scalars=tokens.units.query_by_entry,
        states=saved.states,
        norm=saved.norms,
        key=tokens.key,
        value=tokens.value,
        decay=tokens.decays.of_keys,
        scale=preparation.scale_of(tokens, saved.shifts),
    )
    return query_kernel.query_states(operands, time=time, with_remainder=with_remainder, call=call)
