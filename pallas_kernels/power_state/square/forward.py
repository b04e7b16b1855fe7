"""The forward pass at p = 2: operands of the kernels, and final steps on their results."""

import jax.numpy as jnp

from pallas_kernels.hopper import numerics
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state import recurrence, segments
from pallas_kernels.power_state.square import layout as layouts
from pallas_kernels.power_state.square import norms as norm_kernel
from pallas_kernels.power_state.square import query as query_kernel
from pallas_kernels.power_state.square import tiles
from pallas_kernels.power_state.square import update as update_kernel

__all__ = ["attend", "fold", "norms", "returned", "start_of", "stored_start", "walk"]


def fold(key, value, log_decay, folds, initial_state, call: configs.Call):
    """Computes `power_state.fold`."""
    batch, _, kv_heads, head_dim = key.shape
    layout, start, start_norm = start_of(initial_state, key, value)
    padded = tiles.padded(head_dim, value.shape[-1])
    of = preparation.tokens(key, value, log_decay, folds, sizes=padded, call=call)
    carried = preparation.carried_keys(of, preparation.size_of(start, initial_state), 2)
    key_operand = preparation.time_last(of.old_key.astype(jnp.float16))
    value_operand = preparation.time_last((of.old_value * carried.strength[..., None]).astype(jnp.float16))
    states, final = walk(key_operand, value_operand, carried, start, layout=layout, call=call)
    norm = norms(key_operand, carried.strength, carried, start_norm, call.interpret)
    saved = preparation.Saved.of(states, norm, carried.shift, batch)
    sizes = batch, kv_heads, head_dim, value.shape[-1]
    return saved, returned(final, norm[:, -1], carried.shift[:, -1], layout, sizes)


def attend(query, key, value, log_decay, folds, saved, with_remainder, call: configs.Call):
    """Computes `power_state.attend`."""
    batch, time, *_ = query.shape
    value_dim = value.shape[-1]
    padded = tiles.padded(query.shape[-1], value_dim)
    of = preparation.tokens(key, value, log_decay, folds, sizes=padded, call=call)
    unit, _ = preparation.queries(preparation.fill(query, padded[0]))
    states, norm, shift = saved.by_head()
    *means, denominator = query_kernel.query_states(
        unit,
        jnp.swapaxes(unit, 1, 2).astype(states.dtype),
        states,
        preparation.split(norm),
        of.key,
        of.value,
        of.decay,
        preparation.scale_of(of, shift),
        layout=layouts.Layout(padded[0]),
        batch_time=(batch, time),
        with_remainder=with_remainder,
        **call.kernel_options,
    )
    means = (x[..., :value_dim] for x in means)
    return *means, preparation.tokens_second(denominator, batch)[:, :time]


def norms(key, strength, carried, start, interpret, reverse=False):
    """Returns Z before each chunk and after the last, float32 [H, n + 1, D, D], scaled like the states.

    key: operand of the update, float16 [HN, D, X]; strength: float32 [H, n, G C], weights of either sign, of G heads;
    start: float32 [H, D, D]; reverse: as in `update.update`.
    """
    # Divided by the largest of their chunk, weights are in the range of float16.
    peak = jnp.abs(strength).max(-1, keepdims=True)
    relative = jnp.where(peak > 0, strength / jnp.where(peak > 0, peak, 1), 0)
    relative = relative.reshape(*strength.shape[:2], -1, configs.BLOCK)
    new = norm_kernel.norms(key, relative, reverse=reverse, interpret=interpret)
    start = numerics.scaled(start, -carried.shift[:, :1, None])
    return recurrence.recurrence(carried.carry, peak[..., 0], new, start, interpret=interpret)


def stored_start(state, key, value):
    """Converts a state (kv, norm) to the layout of stored states, but in float32 and in its own scale."""
    return start_of(state, key, value)[1:]


def returned(state, norm, shift, layout, sizes):
    """Converts a stored state and its normalizer to canonical order: the inverse of `start_of`.

    state: [H, 16, E, P] and norm: Z [H, D, D], both divided by 2^shift [H]. sizes: B, K, D and E before padding.
    """
    batch, kv_heads, head_dim, value_dim = sizes
    kv = layouts.to_canonical(state[:, :, :value_dim], layout, head_dim)
    kv = numerics.scaled(kv, shift[:, None, None])
    norm = numerics.scaled(layouts.norm_to_canonical(norm[:, :head_dim, :head_dim]), shift[:, None])
    return kv.reshape(batch, kv_heads, *kv.shape[1:]), norm.reshape(batch, kv_heads, -1)


def start_of(initial_state, key, value):
    """Returns the layout of features, and the initial state in it: [H, 16, E, P] and Z [H, D, D], with padded sizes."""
    batch, _, kv_heads, head_dim = key.shape
    width, value_width = tiles.padded(head_dim, value.shape[-1])
    layout, heads = layouts.Layout(width), batch * kv_heads
    if initial_state is None:
        start = jnp.zeros((heads, layouts.TILE, value_width, layout.width), jnp.float32)
        return layout, start, jnp.zeros((heads, width, width), jnp.float32)
    kv, norm = (x.reshape(heads, *x.shape[2:]) for x in initial_state)
    start = layouts.from_canonical(preparation.fill(kv, value_width), layout, head_dim)
    norm = layouts.norm_from_canonical(norm, head_dim)
    return layout, start, jnp.pad(norm, [(0, 0)] + [(0, width - head_dim)] * 2)


def walk(key, value, carried, start, *, layout, call: configs.Call, reverse=False):
    """Returns the state before each chunk [H, n, 16, E, P] and the last one [H, 16, E, P], divided by 2^shift.

    key, value: operands of the update kernel, of n chunks; start: [H, 16, E, P], the state before the walk; reverse: as
    in `update.update`.
    """
    start = numerics.scaled(start, -carried.shift[:, :1, None, None])
    start = jnp.swapaxes(start.reshape(*start.shape[:3], layout.sections, -1), 2, 3)
    states, finals = update_kernel.update(
        key,
        value,
        carried.carry,
        start,
        layout=layout,
        config=call.config,
        chunk=call.chunk,
        reverse=reverse,
        interpret=call.interpret,
    )
    finals = jnp.swapaxes(finals, 3, 4).reshape(*finals.shape[:3], -1, layout.width)
    return segments.join(states, finals, carried.log2_carry, interpret=call.interpret)
