"""Recurrent attention by its plan: prepare, backend, finish, compiled once per plan and shapes."""

import dataclasses
import importlib

import jax

from sympow_jax.ops._recurrent import channels, reference, rows, xla
from sympow_jax.ops._recurrent import mean as means
from sympow_jax.ops._recurrent import state as power_state
from sympow_jax.ops._recurrent import step as xla_step
from sympow_jax.ops._shared import calls, nonfinite, time_axis
from sympow_jax.ops._shared.precision import rounded

__all__ = ["attend", "attend_step"]


def _outputs(plan):
    if not plan.return_state:
        return "B T N E", None
    return "B T N E", power_state.PowerState.layout(per_channel=plan.per_channel)


@calls.op(calls.ATTENTION, _outputs)
def attend(plan, query, key, value, log_decay, segment_ids, state):
    """Returns the output of `plan.make`'s plan, and the state after the last token or None.

    Without division the output is sums [B, T, N, E + 1] in the plan's dtype, those of weights last; E may be 0.
    """
    # The scope names form and implementation in profiles and compiled programs.
    with jax.named_scope(f"{plan.form}_{plan.implementation}"):
        query, key, value = rounded((query, key, value))
        if plan.axis_name is None and state is None:
            return _attend_whole_rows(plan, query, key, value, log_decay, segment_ids, None)
        if plan.axis_name is None:
            wide = jax.tree.map(lambda x: x.astype(plan.dtype) if x.ndim > 1 else x, state)
            out, final = _attend_whole_rows(plan, query, key, value, log_decay, segment_ids, wide)
            return out, final and jax.tree.map(lambda x, before: x.astype(before.dtype), final, state)
        if plan.form == "attention":

            def of_heads(*arrays):
                return _attend_whole_rows(plan, *arrays, None)[0]

            out = time_axis.by_heads(of_heads, query, key, value, log_decay, segment_ids, plan.axis_name)
            return out, None
        # Not contained: the bad token may be on an earlier device, and only outputs of this one could be set to NaN.
        return _attend_without_padding(plan, query, key, value, log_decay, segment_ids, None)


def _attend_without_padding(plan, query, key, value, log_decay, segment_ids, state):
    """Runs `_attend` with zeros for padding; a NaN in a token spreads to every sum that includes it."""
    arrays = nonfinite.without_padding(segment_ids, query, key, value, log_decay)
    return _attend(plan, *arrays, segment_ids, state)


def _attend_whole_rows(plan, query, key, value, log_decay, segment_ids, state):
    """Runs `_attend`; in plain JAX, only outputs that attend to a token that is not finite become NaN."""
    if plan.implementation == "mosaic_gpu":
        # Containing NaN would copy keys, values and outputs, which takes up to a fifth of the time of the kernels.
        return _attend_without_padding(plan, query, key, value, log_decay, segment_ids, state)
    finite = nonfinite.remove(query, key, value, log_decay, segment_ids, state=state)
    out, final = _attend(plan, *finite[:4], segment_ids, finite.state)
    out = nonfinite.restore(out, finite, segment_ids)
    return out, None if final is None else nonfinite.restore_state(final, finite)


def _attend(plan, query, key, value, log_decay, segment_ids, state):
    """Runs prepare, the backend and finish."""
    # With jax 0.11, operations on an empty array, such as values of width 0, forget which mesh axes it varies over.
    query, key, value, log_decay, state = calls.same_variation((query, key, value, log_decay, state))
    if plan.implementation == "reference":
        return reference.FORMS[plan.form](plan, query, key, value, log_decay, segment_ids, state)
    backend = _mosaic() if plan.implementation == "mosaic_gpu" else xla
    # States hold p-th powers of unscaled keys. Shards of the time axis would have scales of their own.
    stateless = state is None and not plan.return_state
    of_whole_rows = plan.axis_name is None or plan.form == "attention"
    if backend is xla and stateless and of_whole_rows and plan.division is not means.Division.NONE:
        key = rows.scaled_keys(key, plan.power)
    if plan.form == "attention":
        return backend.attention(plan, query, key, value, log_decay, segment_ids, state)
    prepared = rows.prepare(plan, query, key, value, log_decay, segment_ids, state)
    if plan.per_channel:
        chunked = channels.chunked
    elif plan.axis_name is not None and backend is xla:
        chunked = xla.chunked_over_devices
    else:
        chunked = backend.chunked
    if plan.axis_name is None:
        # Limit the window to the number of positions: only `enters_state` determines which tokens enter the state. Over
        # devices the window is the length of a halo.
        window = min(plan.exact_window, prepared.rows.query.shape[1])
        results = chunked(dataclasses.replace(plan, exact_window=window), prepared.rows)
    else:
        results = chunked(plan, prepared.rows)
    return rows.finish(plan, prepared, *results, query, value.dtype)


@calls.op(calls.STEP, lambda plan: ("B N E", power_state.PowerState.layout(per_channel=plan.per_channel)))
def attend_step(plan, query, key, value, log_decay, segment_ids, state):
    """Returns the output of one token by `plan.make_step`'s plan, and the state after it."""
    step = xla_step.step
    if plan.implementation == "mosaic_gpu":
        step = importlib.import_module("sympow_jax.ops._recurrent.mosaic_step").step
    with jax.named_scope(f"step_{plan.implementation}"):
        return step(plan, query, key, value, log_decay, segment_ids, state)


def _mosaic():
    # Pallas takes a second to import, so import it only if a kernel runs.
    return importlib.import_module("sympow_jax.ops._recurrent.mosaic")
