"""Power attention through states, on Hopper GPUs: update, then query."""

import jax
import jax.numpy as jnp

from pallas_kernels.power_state import configs, degrees, incoming, preparation, recurrence, reshaping


def power_state_fwd(arguments: preparation.Arguments, initial_state=None, *, call: configs.Call):
    """Computes the chunked form of power attention: exact near each query, through features for all older tokens.

    Query i's output is sum_j w_ij v_j / sum_j w_ij over j <= i with w_ij = exp(G_i - G_j) (q_i . k_j)^p, where G sums
    log_decay along time; it is zero if all weights are zero.

    It has no derivative of its own: use `power_state_vjp` in a custom_vjp. Sums are float32. States between chunks and
    the operands of products with them are float16, with separate power-of-two scales; the relative rounding error is
    2^-12, independent in each entry.

    Args:
        arguments: at p = 2, D is padded with zeros to 32, 64 or 128 and E to 64 or 128, at the cost of those sizes; at
            p = 4 to 16 or 32.
        initial_state: float32 kv [B, K, F, E] and norm [B, K, F] of the positions before the first. The features phi
            are in canonical order, non-decreasing indices lexicographically, with phi(q) . phi(k) = (q . k)^p. None
            means zero.
        call: from `call_for`, which refuses what is not supported.

    Returns:
        (output, denominators, final state), and the states before each chunk as `Saved`; the backward pass reads all
        but the final state. The output is float32 [B, T, N, E], before its rounding to bfloat16. The denominators
        sum_j w_ij, float32 [B, T, N], are of queries divided by the powers of two that bring their largest entries into
        [1/2, 1). The state is that of the positions where `enters_state` is True, like `initial_state`.
    """
    saved, final = fold(arguments, initial_state, call=call)
    out, remainder, denominator = attend(arguments, saved, call=call, with_remainder=True)
    return (out.astype(jnp.float32) + remainder.astype(jnp.float32), denominator, final), saved


def fold(arguments: preparation.Arguments, initial_state=None, *, call: configs.Call):
    """Returns the states before each chunk as `Saved`, and the final state (kv, norm)."""
    tokens = preparation.by_chunk(arguments, call)
    carried = preparation.carried_keys(tokens, call)
    operands = degrees.degree(call.power).forward.operands_of_keys(tokens, carried.strength)
    saved, final = walk(operands, carried, arguments.sizes, call)
    if initial_state is not None:
        saved, final = incoming.add_incoming(saved, final, initial_state, arguments, call=call)
    return saved, final


def walk(operands, carried: preparation.Carried, sizes, call: configs.Call):
    """Returns the states before each chunk of a walk from zero as `Saved`, and the state (kv, norm) after the last.

    operands: of the power's update.
    """
    power = degrees.degree(call.power).forward
    states, final = power.states(operands, carried, call)
    new = power.norms(operands, carried.norm_weights, call.interpret)
    norms, norm = recurrence.recurrence(carried.scales, carried.log2_norm_unit, new, interpret=call.interpret)
    shift = carried.scales.shift
    saved = preparation.Saved.of(states, norms, shift[:, :-1], sizes[0])
    return saved, power.returned(final, norm, shift[:, -1], sizes, call.config)


def attend(
    arguments: preparation.Arguments, saved, *, call: configs.Call, with_remainder: bool = False
) -> tuple[jax.Array, ...]:
    """Returns the output and the denominators, from the states before each chunk.

    The caller guarantees that queries fit the keys, as the op does.

    with_remainder: whether to return, between the two, what rounding the output took away. The backward pass reads
    their sum, because delta = <dO, O> of a query that sees few keys with small weights is divided by little: with the
    rounded output alone, its gradients are rounding errors.
    """
    query, _, value, *_ = arguments
    batch, time, *_ = query.shape
    tokens = preparation.by_chunk(arguments, call)
    power = degrees.degree(call.power).forward
    *outs, denominator = power.attend(tokens, saved.by_head(), time, with_remainder, call)
    outs = (x[..., : value.shape[-1]] for x in outs)
    return *outs, reshaping.from_heads_first(denominator, batch)[:, :time]
