"""The backward pass of power attention through states, on Hopper GPUs.

With R_c the gradient of the state after chunk c, and u = do / denominator,

    R_{c-1} = exp(decay over c) R_c + sum over queries q of c of exp(g) phi(q) u^T,

with g the log decay from the state before the chunk to the query.

This is the update run over the chunks in reverse, with queries for keys and u for values. From states and gradients of
states, one kernel computes the gradients of queries, another those of keys and values. Each also sums the gradients
with respect to the logarithms of weights, by query and by key, from which the gradient of the decays follows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.power_state import (
    configs,
    decays,
    degrees,
    forward,
    incoming,
    preparation,
    preparation_vjp,
    reshaping,
)


class Gradients(NamedTuple):
    """Gradients of the arguments with these names, in their dtypes."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array


def power_state_vjp(
    arguments: preparation.Arguments,
    results,
    saved: preparation.Saved,
    dout,
    dfinal=None,
    *,
    call: configs.Call,
) -> tuple[Gradients, tuple[jax.Array, jax.Array]]:
    """Returns the gradients of `power_state_fwd` and of its initial state.

    results: output and denominators of `power_state_fwd`. dout: bfloat16 [B, T, N, E]; dfinal: float32, like the final
    state; None means zero. Sums are float32 in a fixed order, so results are deterministic. Memory in addition to
    arguments and results: the gradients of the states, as large as the saved states.
    """
    dual, dinitial = fold_vjp(arguments, results, dout, dfinal, call=call)
    return attend_vjp(arguments, results, saved, dual, dout, call=call), dinitial


def fold_vjp(arguments: preparation.Arguments, results, dout, dfinal=None, *, call: configs.Call):
    """Returns the gradients of the states, last chunk first, and the gradient of the initial state.

    The latter has the shapes of `dfinal`. Arguments as in `power_state_vjp`.
    """
    power, (tokens, mean) = degrees.degree(call.power), _prepared(arguments, results, dout, call)
    walk = preparation_vjp.reverse_walk(tokens, mean, call)
    operands = power.backward.operands_of_queries(tokens.units, walk)
    dual, dinitial = forward.walk(operands, walk.carried, arguments.sizes, call)
    if dfinal is not None:
        dual, dinitial = incoming.add_incoming(dual, dinitial, dfinal, arguments, call=call, reverse=True)
    return dual, dinitial


def attend_vjp(
    arguments: preparation.Arguments, results, saved, dual, dout, *, call: configs.Call
) -> Gradients:
    """Returns the gradients of query, key, value and log_decay, from the states and their gradients."""
    tokens, mean = _prepared(arguments, results, dout, call)
    (batch, time, _, head_dim), value_dim = arguments.query.shape, arguments.value.shape[-1]
    # Whole chunks that cover the window in front and all keys.
    exact_window = call.exact_window
    key_length = -(-(time + exact_window) // call.chunk) * call.chunk
    power, saved, dual = degrees.degree(call.power).backward, saved.by_head(), dual.by_head()
    dquery, of_queries = power.query_vjp(tokens, mean, saved, time, call)
    dkey, dvalue, of_keys = power.key_vjp(tokens, mean, dual, time, key_length, call)
    in_time = preparation.Saved(*(jnp.flip(x, 1) for x in dual))
    inner = power.inner(tokens, saved, in_time)
    sums = preparation_vjp.sums_of(tokens, of_queries, of_keys, inner, exact_window)
    ddecay = decays.decay_gradient(sums, call=call)[:, exact_window : exact_window + time]
    ddecay = reshaping.from_heads_first(ddecay, batch).astype(arguments.log_decay.dtype)
    return Gradients(dquery[..., :head_dim], dkey[..., :head_dim], dvalue[..., :value_dim], ddecay)


def _prepared(arguments, results, dout, call):
    """Returns the tokens by chunk, and the mean's cotangents."""
    tokens = preparation.by_chunk(arguments, call)
    query_length = tokens.decays.log2_from_start[0].size
    return tokens, preparation_vjp.mean_cotangent(*results, dout, call.config.value_dim, query_length)
