"""Rows of tokens before and after a leaf of the chunked form: `prepare`, then the leaf, then `finish`.

Queries are scaled by a power of two, which the mean cancels exactly, so that no power of a query overflows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Bool, Float, Int
from sympow_jax.ops._recurrent import context
from sympow_jax.ops._recurrent import mean as means
from sympow_jax.ops._recurrent import state as power_state
from sympow_jax.ops._shared import decay as decays

__all__ = ["Prepared", "Rows", "finish", "masked_queries", "padded", "prepare", "state_after", "unit_scale"]


class Rows(NamedTuple):
    """Whole rows, positions without a token last: what a core of the chunked form works on."""

    query: Float[Array, "B X N D"]  # of unit scale, unless sums are wanted; zero where there is no token
    key: Float[Array, "B X K D"]
    value: Float[Array, "B X K E"]
    log_decay: Float[Array, "B X K *channels"] | None  # `decay.bounded`; None is no decay and no boundary
    folds: Bool[Array, "B X"] | None  # False where a position never enters the state; None among gradients
    kv: Float[Array, "B K F E"] | None  # the state before the first position; None is nothing
    norm: Float[Array, "B K F *channels"] | None


class Prepared(NamedTuple):
    """Rows for a leaf, and what `finish` needs besides.

    order: the position in `sequence` of each position of the rows, and its inverse; None where they are the same.
    """

    rows: Rows
    sequence: power_state.Sequence
    order: tuple[Int[Array, "B X"], Int[Array, "B X"]] | None


def prepare(plan, query, key, value, log_decay, segment_ids, state) -> Prepared:
    """Puts the window of the state in front of the tokens, and positions without a token last."""
    sequence = power_state.Sequence.join(plan, key, value, log_decay, segment_ids, state)
    ragged = state is not None or segment_ids is not None
    folds = (sequence.after >= plan.exact_window) if plan.return_state else jnp.ones_like(sequence.valid)
    arrays = {
        "query": masked_queries(plan, query, sequence),
        "key": sequence.key,
        "value": sequence.value,
        "folds": folds,
    }
    if ragged or log_decay is not None:
        start = _with_rank(sequence.start, sequence.log_decay.ndim)
        arrays["log_decay"] = decays.bounded(sequence.log_decay, start)
    valid = sequence.valid
    if plan.axis_name is not None:
        arrays, valid = context.with_halo(
            arrays, valid, exact_window=plan.exact_window, ragged=ragged, axis_name=plan.axis_name
        )
    order = None
    if ragged:
        # Padding and empty slots go to the end, so that windows and chunks count tokens only.
        there = jnp.argsort(~valid, axis=1, stable=True)
        order = there, jnp.argsort(there, axis=1)
        arrays = {name: _permuted(x, *order) for name, x in arrays.items()}
    kv, norm = (None, None) if state is None else (state.kv, state.norm)
    return Prepared(Rows(**{"log_decay": None} | arrays, kv=kv, norm=norm), sequence, order)


def finish(plan, prepared: Prepared, out, kv, norm, query, dtype):
    """The output at the queries in the dtype, and the state after the last token, if it is wanted."""
    if prepared.order is not None:
        out = _permuted(out, *reversed(prepared.order))
    out = out[:, -query.shape[1] :]
    if plan.division is not means.Division.NONE:
        out = out.astype(dtype)
    return out, state_after(plan, prepared.sequence, kv, norm) if plan.return_state else None


def state_after(plan, sequence, kv, norm) -> power_state.PowerState:
    """The state that holds these sums and the last tokens of the sequence."""
    # A document that is all within the window has folded nothing: what was folded belongs to others.
    last = sequence.after < jnp.iinfo(jnp.int32).max
    keeps = (sequence.document[:, -1] == 0) | (last.sum(1) > plan.exact_window)
    return power_state.PowerState(
        kv=jnp.where(_with_rank(keeps, kv.ndim), kv, 0),
        norm=jnp.where(_with_rank(keeps, norm.ndim), norm, 0),
        **power_state.window_of(sequence, plan.exact_window, plan.dtype),
    )


def masked_queries(plan, query, sequence):
    """Queries at every position of the sequence, zero where there is no token; of unit scale, if for a mean."""
    slots = sequence.valid.shape[1] - query.shape[1]
    if slots > 0:
        query = jnp.pad(query, [(0, 0), (slots, 0), (0, 0), (0, 0)])
    if plan.division is not means.Division.NONE:
        query = unit_scale(query)
    return jnp.where(sequence.valid[:, -query.shape[1] :, None, None], query, 0)


def padded(rows: Rows, multiple: int) -> Rows:
    """Rows with positions without a token behind them, up to a multiple of positions."""
    tokens = {
        name: _pad_end(x, multiple)
        for name, x in rows._asdict().items()
        if x is not None and name not in ("kv", "norm")
    }
    return rows._replace(**tokens)


def unit_scale(query: Float[Array, "*rest D"]) -> Float[Array, "*rest D"]:
    """The query times the power of two that brings its largest entry into [1/2, 1)."""
    exponent = _unit_exponent(query)[..., None]
    # Two factors, since the inverse of the smallest normal number overflows.
    half = exponent // 2
    return jnp.ldexp(jnp.ldexp(query, -half), half - exponent)


def _unit_exponent(query: Float[Array, "*rest D"]) -> Int[Array, "*rest"]:
    """The power of two by which `unit_scale` divides."""
    return jnp.frexp(jax.lax.stop_gradient(jnp.abs(query).max(-1)))[1]


@jax.custom_vjp
def _permuted(x: Float[Array, "B X *rest"], order: Int[Array, "B X"], back: Int[Array, "B X"]):
    """x in the given order of positions; its gradient is a gather too, not a scatter."""
    return jnp.take_along_axis(x, _with_rank(order, x.ndim), axis=1)


_permuted.defvjp(
    lambda x, order, back: (_permuted(x, order, back), (order, back)),
    lambda orders, dx: (_permuted(dx, *reversed(orders)), None, None),
)


def _with_rank(x, rank):
    """x with axes of size 1 behind it."""
    return x.reshape(x.shape + (1,) * (rank - x.ndim))


def _pad_end(x, multiple):
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % multiple)] + [(0, 0)] * (x.ndim - 2))
