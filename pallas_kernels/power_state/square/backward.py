"""The backward pass at p = 2: operands of the kernels, and <R, S>."""

import jax.numpy as jnp

from pallas_kernels.hopper import numerics
from pallas_kernels.power_state import configs, preparation, preparation_vjp, reshaping
from pallas_kernels.power_state import units as units_kernel
from pallas_kernels.power_state.square import forward, layouts
from pallas_kernels.power_state.square import key_vjp as key_kernel
from pallas_kernels.power_state.square import query_vjp as query_kernel


def operands_of_queries(units: units_kernel.Units, walk: preparation_vjp.ReverseWalk) -> forward.Operands:
    """Returns the operands of the walk that computes the gradients of states, from scaled queries."""
    strength = preparation_vjp.in_time(walk.carried.strength, len(units.query))[:, : walk.value.shape[1]]
    value = jnp.swapaxes(walk.value * strength[..., None], 1, 2).astype(jnp.float16)
    return forward.Operands(units.query_by_entry, value, reverse=True)


def query_vjp(
    tokens: preparation.Chunks,
    mean: preparation_vjp.MeanCotangent,
    saved: preparation.Saved,
    time,
    call: configs.Call,
):
    """Returns the gradients of queries [B, T, N, D] and the kernel's sums, [HN, 2, X]; `saved` is by head."""
    units = tokens.units
    scale = preparation.scale_of(tokens, saved.shifts).reshape(len(saved.shifts), -1)
    scale = jnp.repeat(scale, len(units.query) // len(saved.shifts), 0)
    dout_exponent = numerics.exponent(mean.size)
    first, second = numerics.factors(-reshaping.resized(units.query_exponent, scale.shape[1]))
    rows = query_kernel.Rows(
        narrow=numerics.scaled(jnp.ones_like(scale), -dout_exponent),
        state=numerics.scaled(scale, dout_exponent),
        delta=mean.delta,
        inverse=mean.inverse,
        unit=first,
        unit_rest=second,
    )
    operands = query_kernel.Operands(
        query=units.query,
        scalars=units.query_by_entry,
        dout=mean.dout,
        states=saved.states,
        norm=saved.norms,
        key=tokens.key,
        value=tokens.value,
        decay=tokens.decays.of_keys,
        rows=preparation_vjp.vectors(*rows),
    )
    return query_kernel.query_vjp(operands, time=time, call=call)


def key_vjp(
    tokens: preparation.Chunks,
    mean: preparation_vjp.MeanCotangent,
    dual: preparation.Saved,
    time,
    length,
    call: configs.Call,
):
    """Returns the gradients of keys and values [B, T, K, ...] and the kernel's sums, [H, 2, `length`].

    dual: the gradients of states by head.
    """
    shift = jnp.flip(dual.shifts, 1)[..., None]
    key_exponent, value_exponent = tokens.folded_exponent, numerics.exponent(tokens.folded_size)

    def state_factor(exponent):
        """Returns the decay to the state after the chunk, times 2^(exponent + shift)."""
        factor = preparation.scaled_decay(tokens.decays.log2_to_end, shift + exponent)
        return reshaping.resized(factor.reshape(len(factor), -1), length)

    def narrow(exponent):
        # At least that of the smallest normal number: 2^300, for a key of zeros, would be infinite.
        exponent = jnp.maximum(reshaping.resized(exponent, length), jnp.finfo(jnp.float32).minexp)
        return numerics.scaled(jnp.ones(exponent.shape, jnp.float32), -exponent)

    coarse, fine, coarse_before, fine_before = preparation_vjp.decays_of_keys(tokens, length // call.chunk)
    rows = key_kernel.Rows(
        narrow_key=narrow(tokens.units.key_exponent),
        narrow_value=narrow(numerics.exponent(tokens.units.value_size)),
        state_key=state_factor(key_exponent + value_exponent),
        state_norm=2 * state_factor(0),
        state_value=state_factor(2 * key_exponent),
        coarse=coarse,
        fine=fine,
        coarse_before=coarse_before,
        fine_before=fine_before,
    )
    operands = key_kernel.Operands(
        key=tokens.key,
        scalars=tokens.units.key_by_entry,
        value=tokens.value,
        dual=dual.states,
        norm=dual.norms,
        query=tokens.units.query,
        dout=mean.dout,
        rows=preparation_vjp.vectors(*rows),
        columns=preparation_vjp.columns(tokens, mean, call.exact_window),
    )
    return key_kernel.key_vjp(operands, time=time, call=call)


def inner(tokens: preparation.Chunks, saved: preparation.Saved, dual: preparation.Saved):
    """Returns <R, S> per chunk, float32 [H, n].

    S is the state before the chunk, decayed over it, and R the gradient of the state after it, both in order of time.
    """
    weights = layouts.Layout(saved.norms.shape[-1]).weights
    product = (saved.states.astype(jnp.float32) * dual.states.astype(jnp.float32) * weights).sum((2, 3, 4))
    return preparation_vjp.inner_of(tokens, saved, dual, product)
