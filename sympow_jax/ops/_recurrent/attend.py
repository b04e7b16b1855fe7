"""Recurrent attention by its plan: prepare, leaf, finish, compiled once for a plan and shapes."""

import dataclasses
import importlib

import jax

from sympow_jax.ops._recurrent import channels, reference, rows, xla
from sympow_jax.ops._recurrent import state as power_state
from sympow_jax.ops._recurrent import step as xla_step
from sympow_jax.ops._shared import calls, nonfinite, time_axis

__all__ = ["attend", "attend_step"]


def _outputs(plan):
    if not plan.return_state:
        return "B T N E", None
    return "B T N E", power_state.PowerState.layout(per_channel=plan.per_channel)


@calls.op(calls.ATTENTION, _outputs)
def attend(plan, query, key, value, log_decay, segment_ids, state):
    """The output of `plan.make`'s plan, and the state after the last token or None.

    Without division the output is sums [B, T, N, E + 1] in the plan's dtype, those of weights last; E may be 0.
    """
    # Profiles and compiled programs say by this what ran.
    with jax.named_scope(f"{plan.form}_{plan.implementation}"):
        if plan.axis_name is None:
            return _attend_finite(plan, query, key, value, log_decay, segment_ids, state)
        if plan.form == "attention":

            def of_heads(*arrays):
                return _attend_finite(plan, *arrays, None)[0]

            out = time_axis.by_heads(of_heads, query, key, value, log_decay, segment_ids, plan.axis_name)
            return out, None
        # A bad token may be on another device: its NaN go where sums take them.
        arrays = nonfinite.without_padding(segment_ids, query, key, value, log_decay)
        return _attend(plan, *arrays, segment_ids, None)


def _attend_finite(plan, query, key, value, log_decay, segment_ids, state):
    """`_attend`, NaN only where a token that is not finite is seen."""
    finite = nonfinite.remove(query, key, value, log_decay, segment_ids, state=state)
    out, final = _attend(plan, *finite[:4], segment_ids, finite.state)
    out = nonfinite.restore(out, finite, segment_ids)
    return out, None if final is None else nonfinite.restore_state(final, finite)


def _attend(plan, query, key, value, log_decay, segment_ids, state):
    """Prepare, leaf, finish."""
    if plan.implementation == "reference":
        return reference.LEAVES[plan.form](plan, query, key, value, log_decay, segment_ids, state)
    leaves = _mosaic() if plan.implementation == "mosaic_gpu" else xla
    if plan.form == "attention":
        return leaves.attention(plan, query, key, value, log_decay, segment_ids, state)
    prepared = rows.prepare(plan, query, key, value, log_decay, segment_ids, state)
    if plan.per_channel:
        leaf = channels.chunked
    elif plan.axis_name is not None and leaves is xla:
        leaf = xla.chunked_over_devices
    else:
        leaf = leaves.chunked
    if plan.axis_name is None:
        # No more keys than there are; `folds` alone says what enters the state. Over devices it is a halo's length.
        seen = min(plan.exact_window, prepared.rows.query.shape[1])
        results = leaf(dataclasses.replace(plan, exact_window=seen), prepared.rows)
    else:
        results = leaf(plan, prepared.rows)
    return rows.finish(plan, prepared, *results, query, value.dtype)


@calls.op(calls.STEP, lambda plan: ("B N E", power_state.PowerState.layout(per_channel=plan.per_channel)))
def attend_step(plan, query, key, value, log_decay, segment_ids, state):
    """The output of one token by `plan.make_step`'s plan, and the state after it."""
    leaf = xla_step.step
    if plan.implementation == "mosaic_gpu":
        leaf = importlib.import_module("sympow_jax.ops._recurrent.mosaic_step").step
    with jax.named_scope(f"step_{plan.implementation}"):
        return leaf(plan, query, key, value, log_decay, segment_ids, state)


def _mosaic():
    # Pallas takes a second to import: only where a kernel runs.
    return importlib.import_module("sympow_jax.ops._recurrent.mosaic")
