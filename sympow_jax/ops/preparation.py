"""Rows of tokens before and after a backend of the chunked form: `prepare`, then the backend, then `finish`.

Queries are scaled by a power of two, which cancels exactly in the mean, so that no power of a query overflows.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Bool, Float, Int
from sympow_jax.ops import decays, derivatives, layout, means, power_state, time_axis
from sympow_jax.ops.forms import context


class Rows(NamedTuple):
    """Whole rows for a core of the chunked form; positions without a token are last."""

    query: Float[Array, "B X N D"]  # zero where there is no token; scaled as by `masked_queries`
    key: Float[Array, "B X K D"]
    value: Float[Array, "B X K E"]
    log_decay: Float[Array, "B X K *channels"] | None  # from `decays.bounded`; None: no decay, no boundary
    # False where a position never enters the state; None among gradients.
    enters_state: Bool[Array, "B X"] | None
    kv: Float[Array, "B K F E"] | None  # the state before the first position, or None
    norm: Float[Array, "B K F *channels"] | None


class Prepared(NamedTuple):
    """Rows for a backend, and further inputs of `finish`.

    order: the position in `sequence` of each position of the rows, and its inverse; None if they are the same.
    """

    rows: Rows
    sequence: power_state.Sequence
    order: tuple[Int[Array, "B X"], Int[Array, "B X"]] | None


def prepare(plan, tokens, state) -> Prepared:
    """Prepends the window of the state to the tokens, and moves positions without a token to the end."""
    if state is not None and plan.axis_name is not None:
        # It comes before the first device's tokens; to the others it only says which document they may continue.
        is_first = jax.lax.axis_index(plan.axis_name) == 0
        own = {name: jnp.where(is_first, getattr(state, name), 0) for name in ("kv", "norm", "length")}
        state = dataclasses.replace(state, **own)
    sequence = power_state.Sequence.join(plan, tokens, state)
    ragged = state is not None or tokens.segment_ids is not None
    if plan.axis_name is not None:
        sequence, enters_state = context.with_halo(
            sequence, exact_window=plan.exact_window, ragged=ragged, axis_name=plan.axis_name
        )
    elif plan.return_state:
        enters_state = sequence.after >= plan.exact_window
    else:
        # Without a state to return, positions may enter it as soon as chunks allow.
        enters_state = jnp.ones_like(sequence.valid)
    arrays = {
        "query": masked_queries(plan, tokens.query, sequence),
        "key": sequence.key,
        "value": sequence.value,
        "enters_state": enters_state,
    }
    if ragged or tokens.log_decay is not None:
        start = layout.with_rank(sequence.start, sequence.log_decay.ndim)
        arrays["log_decay"] = decays.bounded(sequence.log_decay, start)
    order = None
    if ragged:
        # Move padding and empty slots to the end, so that windows and chunks count tokens only.
        tokens_first = jnp.argsort(~sequence.valid, axis=1, stable=True)
        order = tokens_first, jnp.argsort(tokens_first, axis=1)
        arrays = {name: _permuted(x, *order) for name, x in arrays.items()}
    kv, norm = (None, None) if state is None else (state.kv, state.norm)
    return Prepared(Rows(**{"log_decay": None} | arrays, kv=kv, norm=norm), sequence, order)


def finish(plan, prepared: Prepared, tokens, out, kv, norm):
    """Returns the output at the queries in the values' dtype, or sums, and the state after the last token or None."""
    if prepared.order is not None:
        out = _permuted(out, *reversed(prepared.order))
    out = out[:, -tokens.query.shape[1] :]
    if plan.division is not means.Division.NONE:
        out = out.astype(tokens.value.dtype)
    if not plan.return_state:
        return out, None
    state = state_after(plan, prepared.sequence, kv, norm)
    return out, state if plan.axis_name is None else time_axis.of_last(state, plan.axis_name)


def state_after(plan, sequence, kv, norm) -> power_state.PowerState:
    """Returns the state with these sums and the last tokens of the sequence."""
    # A document that fits into the window has not updated the state, so the sums belong to other documents.
    last = sequence.after < jnp.iinfo(jnp.int32).max
    keeps = (sequence.document[:, -1] == 0) | (last.sum(1) > plan.exact_window)
    return power_state.PowerState(
        kv=jnp.where(layout.with_rank(keeps, kv.ndim), kv, 0),
        norm=jnp.where(layout.with_rank(keeps, norm.ndim), norm, 0),
        **power_state.window_of(sequence, plan.exact_window, plan.dtype),
    )


def masked_queries(plan, query, sequence):
    """Returns queries at every position of the sequence, zero where there is no token.

    Queries of a mean get unit scale, unless they go to kernels, which scale them.
    """
    slots = sequence.valid.shape[1] - query.shape[1]
    if slots > 0:
        query = jnp.pad(query, [(0, 0), (slots, 0), (0, 0), (0, 0)])
    if plan.division is not means.Division.NONE and plan.implementation != "mosaic_gpu":
        query = unit_scale(query)
    return jnp.where(sequence.valid[:, -query.shape[1] :, None, None], query, 0)


def padded(rows: Rows, multiple: int) -> Rows:
    """Returns rows padded with positions without a token, to a multiple of `multiple` positions."""
    missing = -rows.query.shape[1] % multiple
    tokens = {
        name: jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
        for name, x in rows._asdict().items()
        if x is not None and name not in ("kv", "norm")
    }
    return rows._replace(**tokens)


def unit_scale(query: Float[Array, "*rest D"]) -> Float[Array, "*rest D"]:
    """Returns the query times the power of two that brings its largest entry into [1/2, 1)."""
    exponent = jnp.frexp(jax.lax.stop_gradient(jnp.abs(query).max(-1)))[1][..., None]
    # Two factors: the inverse of a large power of two would be subnormal, that of a subnormal one would overflow.
    half = exponent // 2
    return jnp.ldexp(jnp.ldexp(query, -half), half - exponent)


def scaled_keys(key: Float[Array, "B S K D"], power: int) -> Float[Array, "B S K D"]:
    """Returns the keys of each head times a power of two that keeps p-th powers of their scores in float32's range."""
    # Entries of a unit query are less than 1, so no score is larger than the largest sum of entries, 2^exponent.
    sizes = jnp.abs(jax.lax.stop_gradient(key)).sum(-1, dtype=jnp.promote_types(key.dtype, jnp.float32))
    finfo = jnp.finfo(sizes.dtype)
    _, exponent = jnp.frexp(jnp.minimum(sizes.max(1), finfo.max))
    # The largest weight is at most 2^112, which leaves room for sums; 2^6 is the sum of about 64 entries of unit size.
    largest = min(16, 112 // power)
    change = jnp.clip(exponent, min(6, largest), largest) - exponent
    # Small entries of float16 keys would be subnormal, so these become float32.
    one = jnp.ones((), jnp.promote_types(key.dtype, jnp.bfloat16))
    return key * jnp.ldexp(one, jnp.minimum(change, finfo.maxexp - 2))[:, None, :, None]


@derivatives.custom_vjp
def _permuted(x: Float[Array, "B X *rest"], order: Int[Array, "B X"], inverse: Int[Array, "B X"]):
    """Returns x in the given order of positions; its gradient is also a gather, not a scatter."""
    return layout.reordered(x, order)


_permuted.defvjp(
    lambda x, order, back: (_permuted(x, order, back), (order, back)),
    lambda orders, dx: (_permuted(dx, *reversed(orders)), None, None),
    lambda orders, changes: _permuted(changes[0], *orders),
)
