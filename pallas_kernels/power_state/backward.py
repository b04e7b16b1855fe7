"""The backward pass of power attention through states, on Hopper GPUs.

With R_c the gradient of the state after chunk c, and u = do / denominator,

    R_{c-1} = exp(decay over c) R_c + sum over queries of c of exp(g) phi(q) u^T.

This is the update run over the chunks in reverse, with queries for keys and u for values. From states and gradients of
states, one kernel computes the gradients of queries, another those of keys and values. Each also sums the gradients
with respect to the logarithms of weights, by query and by key, from which the gradient of the decays follows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import numerics
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import forward
from pallas_kernels.power_state import prepare as preparation
from pallas_kernels.power_state import prepare_vjp as preparation_vjp
from pallas_kernels.power_state.quartic import backward as quartic_vjp
from pallas_kernels.power_state.square import key_vjp as key_kernel
from pallas_kernels.power_state.square import layout as layouts
from pallas_kernels.power_state.square import query_vjp as query_kernel

__all__ = ["Gradients", "attend_vjp", "fold_vjp", "power_state_vjp"]


class Gradients(NamedTuple):
    """Gradients of the arguments of `power_state` with these names, in their dtypes."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array


def power_state_vjp(
    query, key, value, log_decay, folds, out, denominator, saved, dout, dfinal=None, **options
) -> tuple[Gradients, tuple[jax.Array, jax.Array]]:
    """Returns the gradients of `power_state` and of its initial state.

    The inputs are the arguments of `power_state` and the results of `power_state_fwd`. dout: bfloat16 [B, T, N, E];
    dfinal: float32, like the final state; None means zero. Sums are float32 in a fixed order, so results are
    deterministic. Memory in addition to arguments and results: the gradients of the states, as large as the saved
    states.
    """
    arrays = query, key, value, log_decay, folds
    dual, dinitial = fold_vjp(*arrays, out, denominator, dout, dfinal, **options)
    return attend_vjp(*arrays, out, denominator, saved, dual, dout, **options), dinitial


def fold_vjp(
    query,
    key,
    value,
    log_decay,
    folds,
    out,
    denominator,
    dout,
    dfinal=None,
    *,
    power,
    chunk,
    exact_window,
    state_dtype,
    interpret,
):
    """Returns the gradients of the states, last chunk first, and the gradient of the initial state.

    The latter has the shapes of `dfinal`.
    """
    config = forward.chosen(
        key, value, power=power, chunk=chunk, exact_window=exact_window, state_dtype=state_dtype
    )
    prepared = _prepared(
        query,
        key,
        value,
        log_decay,
        folds,
        out,
        denominator,
        dout,
        power=power,
        chunk=chunk,
        exact_window=exact_window,
    )
    if power == 4:
        return quartic_vjp.fold_vjp(prepared, key, value, dfinal, config, interpret)
    of, unit, _, mean = prepared
    batch, _, kv_heads, head_dim = key.shape
    operand, terms = configs.operands(state_dtype)
    layout, end, end_norm = forward.start_of(dfinal, key, value)
    dual = preparation_vjp.dual_of(of, unit, mean, preparation.size_of(end, dfinal))
    duals, first = forward.walk(
        *preparation.update_operands(dual.query, dual.value, dual.carried, operand),
        dual.carried,
        end,
        layout=layout,
        config=config,
        chunk=dual.query.shape[2],
        terms=terms,
        interpret=interpret,
    )
    strength = dual.carried.strength * dual.dnorm
    norm, shift = preparation.square_norms(dual.query, strength, dual.carried, end_norm), dual.carried.shift
    sizes = batch, kv_heads, head_dim, value.shape[-1]
    saved = preparation.Saved.of(duals, norm, shift, batch)
    return saved, forward.returned(first, norm[:, -1], shift[:, -1], layout, sizes)


def attend_vjp(
    query,
    key,
    value,
    log_decay,
    folds,
    out,
    denominator,
    saved,
    dual,
    dout,
    *,
    power,
    chunk,
    exact_window,
    state_dtype,
    interpret,
):
    """Returns the gradients of query, key, value and log_decay, from the states and their gradients."""
    config = forward.chosen(
        key, value, power=power, chunk=chunk, exact_window=exact_window, state_dtype=state_dtype
    )
    batch, time, _, head_dim = query.shape
    prepared = _prepared(
        query,
        key,
        value,
        log_decay,
        folds,
        out,
        denominator,
        dout,
        power=power,
        chunk=chunk,
        exact_window=exact_window,
    )
    of, _, exponent, _ = prepared
    saved, dual = saved.by_head(), dual.by_head()
    # Whole chunks that cover the window in front and all keys.
    length = -(-(time + exact_window) // chunk) * chunk
    compute = quartic_vjp.attend_vjp if power == 4 else _attend_vjp
    dquery, dkey, dvalue, *sums = compute(
        prepared,
        saved,
        dual,
        config,
        chunk=chunk,
        exact_window=exact_window,
        length=length,
        interpret=interpret,
    )
    ddecay = preparation_vjp.decay_gradient(
        of, preparation_vjp.sums_of(of, *sums, exact_window), exact_window
    )
    own = slice(exact_window, exact_window + time)
    dquery = numerics.scaled(dquery, -exponent)[:, :time, :head_dim]
    dkey, dvalue = dkey[:, own, :head_dim], dvalue[:, own, : value.shape[-1]]
    gradients = (dquery, query), (dkey, key), (dvalue, value), (ddecay[:, own], log_decay)
    return Gradients(*(preparation.tokens_second(g, batch).astype(x.dtype) for g, x in gradients))


def _attend_vjp(prepared, saved, dual, config, *, chunk, exact_window, length, interpret):
    """Returns the gradients of scaled queries [HN, X, D], keys and values [H, Y, ...], the kernels' sums, and <R, S>.

    <R, S> is [H, n], as `_inner` returns it. saved, dual: with heads as the first axis; length: Y.
    """
    of, unit, _, mean = prepared
    layout = layouts.Layout(unit.shape[-1])
    options = {
        "layout": layout,
        "config": config,
        "chunk": chunk,
        "exact_window": exact_window,
        "interpret": interpret,
    }
    dquery, of_queries = query_kernel.query_vjp(
        unit,
        jnp.swapaxes(unit, 1, 2).astype(saved.states.dtype),
        mean.dout,
        saved.states,
        preparation.split(saved.norms, jnp.bfloat16, 2),
        of.key,
        of.value,
        of.decay,
        _rows_of_queries(of, mean, saved.shifts),
        **options,
    )
    dkey, dvalue, of_keys = key_kernel.key_vjp(
        preparation_vjp.lengthened(of.key, max(length, of.key.shape[1])),
        _scalars_of_keys(of, length).astype(dual.states.dtype),
        preparation_vjp.lengthened(of.value, max(length, of.value.shape[1])),
        dual.states,
        preparation.split(dual.norms, jnp.bfloat16, 2),
        unit,
        mean.dout,
        _rows_of_keys(of, dual.shifts, length // chunk),
        preparation_vjp.columns(of, mean, exact_window),
        **options,
    )
    return dquery, dkey, dvalue, of_queries, of_keys, _inner(of, saved, dual, layout)


def _prepared(query, key, value, log_decay, folds, out, denominator, dout, *, power, chunk, exact_window):
    """Returns tokens, scaled queries, the exponents of their scales, and the mean's cotangent.

    The largest entries of scaled queries are in [1/2, 1).
    """
    width, value_width = configs.filled(key.shape[-1], value.shape[-1], power)
    query, key = (preparation.fill(x, width) for x in (query, key))
    value, out, dout = (preparation.fill(x, value_width) for x in (value, out, dout))
    of = preparation.tokens(key, value, log_decay, folds, chunk=chunk, exact_window=exact_window)
    unit, exponent = preparation.queries(query, chunk)
    return of, unit, exponent, preparation_vjp.mean_of(out, denominator, dout, unit.shape[1])


def _rows_of_queries(of, mean, shift):
    """Returns the vectors of `query_vjp.Rows`, float32 [B N, X / 64, 4, 64]."""
    scale = preparation.scale_of(of, shift).reshape(len(shift), -1)
    scale = jnp.repeat(scale, len(mean.dout) // len(shift), 0)
    exponent = preparation.exponent_of(mean.dout)[..., 0]
    rows = query_kernel.Rows(
        narrow=numerics.scaled(jnp.ones_like(scale), -exponent),
        far=numerics.scaled(scale, exponent),
        delta=mean.delta,
        inverse=mean.inverse,
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
    value_exponent = preparation.exponent_of(of.old_value)[..., 0]

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
    terms = saved.states.shape[3] // of.value.shape[-1]
    dual = preparation.Saved(*(jnp.flip(x, 1) for x in dual))
    inner = forward.whole(saved.states, terms) * forward.whole(dual.states, terms) * layout.weights
    inner = inner.sum((2, 3, 4))
    inner += (saved.norms * dual.norms).sum((2, 3))
    return preparation.scaled_decay(of.over_chunk, (saved.shifts + dual.shifts).astype(jnp.float32)) * inner
