"""The forward pass at p = 2: operands of the kernels, and states in canonical order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import numerics
from pallas_kernels.power_state import configs, preparation, segments
from pallas_kernels.power_state.square import layouts
from pallas_kernels.power_state.square import norms as norm_kernel
from pallas_kernels.power_state.square import query as query_kernel
from pallas_kernels.power_state.square import update as update_kernel


class Operands(NamedTuple):
    """Tokens of a walk over the chunks, for G heads of each of H states, as in `update.Operands`."""

    key: jax.Array  # float16 [H G, D, at most X]
    value: jax.Array  # float16 [H G, E, at most X], times its weight in the state after its chunk
    reverse: bool = False


def start_of(state, sizes, config: configs.Config):
    """Returns a state (kv, norm), or zeros for None, in the kernels' layout: [H, 16, E, P] and Z [H, D, D].

    sizes: B, K, D and E before padding.
    """
    batch, kv_heads, head_dim, _ = sizes
    layout, heads, width = layouts.Layout(config.head_dim), batch * kv_heads, config.head_dim
    if state is None:
        start = jnp.zeros((heads, layouts.TILE, config.value_dim, layout.width), jnp.float32)
        return start, jnp.zeros((heads, width, width), jnp.float32)
    kv, norm = (x.reshape(heads, *x.shape[2:]) for x in state)
    start = layouts.from_canonical(preparation.fill(kv, config.value_dim), layout, head_dim)
    norm = layouts.norm_from_canonical(norm, head_dim)
    return start, jnp.pad(norm, [(0, 0)] + [(0, width - head_dim)] * 2)


# States are stored as they are.
stored_start = start_of


def returned(state, norm, shift, sizes, config: configs.Config):
    """Converts a state [H, 16, E, P] and Z, both divided by 2^shift [H], to canonical order: inverts `start_of`."""
    batch, kv_heads, head_dim, value_dim = sizes
    kv = layouts.to_canonical(state[:, :, :value_dim], layouts.Layout(config.head_dim), head_dim)
    kv = numerics.scaled(kv, shift[:, None, None])
    norm = numerics.scaled(layouts.norm_to_canonical(norm[:, :head_dim, :head_dim]), shift[:, None])
    return kv.reshape(batch, kv_heads, *kv.shape[1:]), norm.reshape(batch, kv_heads, -1)


def operands_of_keys(tokens: preparation.Chunks, strength) -> Operands:
    """Returns the operands of the update with keys and values."""
    value = (tokens.old_value * strength[..., None]).astype(jnp.float16)
    return Operands(tokens.units.key_by_entry, preparation.time_last(value))


def states(operands: Operands, carried: preparation.Carried, start, call: configs.Call):
    """Returns the state before each chunk [H, n, 16, E, P] and the last one [H, 16, E, P], divided by 2^shift.

    start: [H, 16, E, P], the state before the walk.
    """
    layout = layouts.Layout(call.config.head_dim)
    start = numerics.scaled(start, -carried.shift[:, :1, None, None])
    start = jnp.swapaxes(start.reshape(*start.shape[:3], layout.sections, -1), 2, 3)
    arrays = update_kernel.Operands(operands.key, operands.value, carried.carry, start)
    found, finals = update_kernel.update(arrays, call=call, reverse=operands.reverse)
    finals = jnp.swapaxes(finals, 3, 4).reshape(*finals.shape[:3], -1, layout.width)
    return segments.join(found, finals, carried.log2_carry, interpret=call.interpret)


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
        norm=preparation.split(saved.norms),
        key=tokens.key,
        value=tokens.value,
        decay=tokens.decays.blocks,
        scale=preparation.scale_of(tokens, saved.shifts),
    )
    return query_kernel.query_states(operands, time=time, with_remainder=with_remainder, call=call)
