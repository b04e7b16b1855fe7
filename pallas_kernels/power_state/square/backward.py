"""The backward pass at p = 2: operands of the kernels, and <R, S>."""

import jax.numpy as jnp

from pallas_kernels.hopper import numerics
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state import prepare_vjp as preparation_vjp
from pallas_kernels.power_state.square import forward
from pallas_kernels.power_state.square import key_vjp as key_kernel
from pallas_kernels.power_state.square import layout as layouts
from pallas_kernels.power_state.square import query_vjp as query_kernel

__all__ = ["attend_vjp", "fold_vjp"]


def fold_vjp(prepared, key, value, dfinal, call: configs.Call):
    """Computes `power_state.fold_vjp` from its prepared arrays."""
    of, unit, _, mean = prepared
    batch, _, kv_heads, head_dim = key.shape
    layout, end, end_norm = forward.start_of(dfinal, key, value)
    dual = preparation_vjp.dual_of(of, mean, preparation.size_of(end, dfinal))
    strength = preparation_vjp.forwards(dual.carried.strength, len(unit))[:, : dual.value.shape[1]]
    query, value_operand = (
        jnp.swapaxes(x, 1, 2).astype(jnp.float16) for x in (unit, dual.value * strength[..., None])
    )
    duals, first = forward.walk(
        query, value_operand, dual.carried, end, layout=layout, call=call, reverse=True
    )
    strength = dual.carried.strength * dual.dnorm
    norm = forward.norms(query, strength, dual.carried, end_norm, call.interpret, reverse=True)
    shift = dual.carried.shift
    sizes = batch, kv_heads, head_dim, value.shape[-1]
    saved = preparation.Saved.of(duals, norm, shift, batch)
    return saved, forward.returned(first, norm[:, -1], shift[:, -1], layout, sizes)


def attend_vjp(prepared, saved, dual, batch_time, length, call: configs.Call):
    """Returns the gradients of queries [B, T, N, D], keys and values [B, T, K, ...], the kernels' sums, and <R, S>.

    <R, S> is [H, n], as `_inner` returns it. saved, dual: with heads as the first axis; batch_time: B and T; length: of
    the sums by key.
    """
    of, unit, exponent, mean = prepared
    layout = layouts.Layout(unit.shape[-1])
    options = {"layout": layout, "batch_time": batch_time, **call.kernel_options}
    dquery, of_queries = query_kernel.query_vjp(
        unit,
        jnp.swapaxes(unit, 1, 2).astype(saved.states.dtype),
        mean.dout,
        saved.states,
        preparation.split(saved.norms),
        of.key,
        of.value,
        of.decay,
        _rows_of_queries(of, exponent, mean, saved.shifts),
        **options,
    )
    dkey, dvalue, of_keys = key_kernel.key_vjp(
        of.key,
        _scalars_of_keys(of, length).astype(dual.states.dtype),
        of.value,
        dual.states,
        preparation.split(dual.norms),
        unit,
        mean.dout,
        _rows_of_keys(of, dual.shifts, length // call.chunk),
        preparation_vjp.columns(of, mean, call.exact_window),
        **options,
    )
    return dquery, dkey, dvalue, of_queries, of_keys, _inner(of, saved, dual, layout)


def _rows_of_queries(of, query_exponent, mean, shift):
    """Returns the vectors of `query_vjp.Rows`, float32 [B N, X / 64, 6, 64]."""
    scale = preparation.scale_of(of, shift).reshape(len(shift), -1)
    scale = jnp.repeat(scale, len(mean.inverse) // len(shift), 0)
    exponent = numerics.exponent(mean.size)
    query_exponent = preparation_vjp.lengthened(query_exponent[..., 0], scale.shape[1])
    unit, unit_rest = numerics.factors(-query_exponent)
    rows = query_kernel.Rows(
        narrow=numerics.scaled(jnp.ones_like(scale), -exponent),
        state=numerics.scaled(scale, exponent),
        delta=mean.delta,
        inverse=mean.inverse,
        unit=unit,
        unit_rest=unit_rest,
    )
    return preparation_vjp.vectors(*rows)


def _scalars_of_keys(of, length):
    """Returns keys with largest entries in [1/2, 1), time last, [H, D, Y]; zeros after the last chunk with a state."""
    return preparation_vjp.lengthened(preparation.time_last(of.old_key), length, axis=2)


def _rows_of_keys(of, dual_shift, chunks):
    """Returns the vectors of `key_vjp.Rows`, float32 [H, Y / 64, 9, 64], for keys in `chunks` chunks."""
    heads, _, chunk, _ = of.old_key.shape
    shift = jnp.flip(dual_shift, 1)[..., None]
    key_exponent = of.old_exponent[..., 0]
    value_exponent = numerics.exponent(of.old_size)

    def met(exponent):
        x = preparation.scaled_decay(of.to_state, shift + exponent)
        return preparation_vjp.lengthened(x.reshape(heads, -1), chunks * chunk)

    def narrow(exponent):
        exponent = preparation_vjp.lengthened(exponent.reshape(heads, -1), chunks * chunk)
        return numerics.scaled(jnp.ones(exponent.shape, jnp.float32), -exponent)

    rows = key_kernel.Rows(
        narrow(key_exponent),
        narrow(value_exponent),
        met(key_exponent + value_exponent),
        2 * met(0),
        met(2 * key_exponent),
        *preparation_vjp.decays_of_keys(of, chunks),
    )
    return preparation_vjp.vectors(*rows)


def _inner(of, saved, dual, layout):
    """Returns <R, S> per chunk, float32 [H, n].

    S is the state before the chunk, decayed over it, and R the gradient of the state after it.
    """
    dual = preparation.Saved(*(jnp.flip(x, 1) for x in dual))
    inner = saved.states.astype(jnp.float32) * dual.states.astype(jnp.float32) * layout.weights
    inner = inner.sum((2, 3, 4))
    inner += (saved.norms * dual.norms).sum((2, 3))
    return preparation.scaled_decay(of.over_chunk, (saved.shifts + dual.shifts).astype(jnp.float32)) * inner
