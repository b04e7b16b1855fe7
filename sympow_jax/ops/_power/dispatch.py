"""Chooses form and implementation of an attention with a state and calls it."""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from sympow_jax.ops import _time_axis
from sympow_jax.ops._power import costs, reference, target, xla
from sympow_jax.ops._power import mean as means
from sympow_jax.ops._power import state as power_state
from sympow_jax.ops._power import step as xla_step
from sympow_jax.ops._shared import arguments, calls, nonfinite

__all__ = ["FORMS", "IMPLEMENTATIONS", "attend", "attend_step"]

FORMS = ("attention", "chunked", "recurrent")
IMPLEMENTATIONS = ("reference", "xla", "mosaic_gpu")


def attend(
    query,
    key,
    value,
    *,
    power,
    log_decay,
    segment_ids,
    form,
    implementation,
    chunk_size,
    window,
    initial_state,
    return_state,
    axis_name,
    division=means.Division.POSITIVE,
):
    """`power_attention` for any power >= 1 and any division of its sums; see there and `mean.Division`.

    Without division the result is sums [B, T, N, E + 1] in the dtype of states, those of weights last; E may be 0.
    """
    query, key, value, log_decay, segment_ids = arguments.to_arrays(
        query=query, key=key, value=value, log_decay=log_decay, segment_ids=segment_ids
    )
    no_values = division is means.Division.NONE
    sizes = arguments.check_attention(query, key, value, log_decay, segment_ids, may_lack_values=no_values)
    arguments.check_choice("form", form, (None, *FORMS))
    arguments.check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    window = arguments.check_integer("window", window, 0)
    if chunk_size is not None:
        chunk_size = arguments.check_integer("chunk_size", chunk_size, 1)
    return_state = arguments.check_flag("return_state", return_state)
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    if initial_state is not None:
        arguments.check_state(
            initial_state,
            power_state.PowerState,
            dtype,
            power=power,
            window=window,
            segment_ids=segment_ids,
            **sizes,
        )
    kept_keys = key.shape[1] > query.shape[1]
    if kept_keys and (initial_state is not None or form not in (None, "attention")):
        raise ValueError(
            f"key has {key.shape[1]} tokens and query {query.shape[1]}; more keys than queries need the attention "
            f"form without an initial state"
        )
    stateless = initial_state is None and not return_state
    if axis_name is not None:
        _require_divisible(axis_name, implementation, kept_keys=kept_keys, stateless=stateless)
    needs = {"power": power, "window": window, "chunk_size": chunk_size, "stateless": stateless}
    needs["division"] = division
    if form is None:
        time = query.shape[1] * (1 if axis_name is None else jax.lax.axis_size(axis_name))
        form = (
            "attention" if kept_keys else _cheapest_form(implementation, query, value, time, sizes, **needs)
        )
    if form != "attention" or return_state:
        costs.require_memory(power=power, itemsize=dtype.itemsize, **sizes)
    implementation = _implementation(implementation, form, query, value, **needs)
    plan = Plan(
        form=form,
        implementation=implementation,
        power=power,
        window=window,
        chunk=chunk_size,
        division=division,
        return_state=return_state,
        axis_name=axis_name,
        interpret=target.interpret(),
    )
    out, final = _attend(
        plan,
        query=query,
        key=key,
        value=value,
        log_decay=log_decay,
        segment_ids=segment_ids,
        state=initial_state,
    )
    return (out, final) if return_state else out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What an attention does, decided from shapes and options."""

    form: str
    implementation: str
    power: int
    window: int
    chunk: int | None
    division: means.Division
    return_state: bool
    axis_name: str | None
    interpret: Any


@calls.op(
    calls.ATTENTION, lambda plan: ("B T N E", power_state.PowerState.layout() if plan.return_state else None)
)
def _attend(plan, query, key, value, log_decay, segment_ids, state):
    leaf = functools.partial(
        _compute(plan),
        power=plan.power,
        window=plan.window,
        chunk=plan.chunk,
        return_state=plan.return_state,
    )

    def compute(query, key, value, *, log_decay, segment_ids):
        finite = nonfinite.remove(query, key, value, log_decay, segment_ids, state=state)
        out, final = leaf(
            finite.query,
            finite.key,
            finite.value,
            log_decay=finite.log_decay,
            segment_ids=segment_ids,
            state=finite.state,
        )
        out = nonfinite.restore(out, finite, segment_ids)
        return out, None if final is None else nonfinite.restore_state(final, finite)

    # Profiles and compiled programs say by this what ran.
    with jax.named_scope(f"{plan.form}_{plan.implementation}"):
        if plan.axis_name is not None and plan.form == "attention":
            return _attention_by_heads(
                compute, query, key, value, log_decay, segment_ids, plan.axis_name
            ), None
        if plan.axis_name is not None:
            # A bad token may be on another device: its NaN go where sums take them.
            arrays = nonfinite.without_padding(segment_ids, query, key, value, log_decay)
            query, key, value, log_decay = arrays
            options = {"log_decay": log_decay, "segment_ids": segment_ids}
            return leaf(query, key, value, **options, state=None, axis_name=plan.axis_name)
        return compute(query, key, value, log_decay=log_decay, segment_ids=segment_ids)


def _attention_by_heads(compute, query, key, value, log_decay, segment_ids, axis_name):
    def attend(query, key, value, log_decay, segment_ids):
        out, _ = compute(query, key, value, log_decay=log_decay, segment_ids=segment_ids)
        return out

    return _time_axis.by_heads(attend, query, key, value, log_decay, segment_ids, axis_name)


def attend_step(
    query,
    key,
    value,
    state,
    *,
    power,
    log_decay,
    segment_ids,
    implementation,
    division=means.Division.POSITIVE,
):
    """`power_attention_step` for any power >= 1 and any division, as `attend`; see there."""
    query, key, value, log_decay, segment_ids = arguments.to_arrays(
        query=query, key=key, value=value, log_decay=log_decay, segment_ids=segment_ids
    )
    no_values = division is means.Division.NONE
    sizes = arguments.check_attention(
        query, key, value, log_decay, segment_ids, step=True, may_lack_values=no_values
    )
    arguments.check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    arguments.check_state(state, power_state.PowerState, dtype, power=power, segment_ids=segment_ids, **sizes)
    if implementation == "reference":
        raise NotImplementedError(
            "implementation 'reference' has no step; call the op with one token and implementation='reference'"
        )
    kernels = _kernels(implementation, "mosaic_step", query, state, power=power, division=division)
    plan = Plan(
        form="step",
        implementation="mosaic_gpu" if kernels else "xla",
        power=power,
        window=state.window,
        chunk=None,
        division=division,
        return_state=True,
        axis_name=None,
        interpret=target.interpret(),
    )
    return _step(
        plan,
        query=query,
        key=key,
        value=value,
        log_decay=log_decay,
        segment_ids=segment_ids,
        state=state,
    )


@calls.op(calls.STEP, lambda plan: ("B N E", power_state.PowerState.layout()))
def _step(plan, query, key, value, log_decay, segment_ids, state):
    if plan.implementation == "mosaic_gpu":
        compute = importlib.import_module("sympow_jax.ops._power.mosaic_step").step
    else:
        compute = functools.partial(xla_step.step, division=plan.division)
    return compute(query, key, value, state, power=plan.power, log_decay=log_decay, segment_ids=segment_ids)


def _cheapest_form(implementation, query, value, time, sizes, *, stateless, **needs):
    needs["stateless"] = stateless
    kernels = ()
    if implementation in (None, "mosaic_gpu"):
        forms = ("attention", "chunked")
        named = implementation is not None
        kernels = tuple(
            form for form in forms if _kernels(None, "mosaic", query, value, form=form, named=named, **needs)
        )
    # With a state, the plain attention form computes with features too; named kernels leave no choice of their own.
    if len(kernels) == 1 and (not stateless or implementation == "mosaic_gpu"):
        return kernels[0]
    return costs.cheapest_form(
        time=time,
        heads=query.shape[2],
        power=needs["power"],
        chunk=needs["chunk_size"],
        window=needs["window"],
        kernels=kernels,
        **sizes,
    )


def _implementation(implementation, form, query, value, **needs):
    """The implementation that is taken."""
    if implementation == "reference":
        if form == "chunked":
            raise NotImplementedError(
                "implementation 'reference' has no chunked form; use 'attention' or 'recurrent'"
            )
        return "reference"
    return "mosaic_gpu" if _kernels(implementation, "mosaic", query, value, form=form, **needs) else "xla"


def _compute(plan):
    """The plan's function; all of them take the same arguments."""
    division, form = plan.division, plan.form
    if plan.implementation == "reference":
        compute = reference.attention if form == "attention" else reference.recurrent
        return lambda *arrays, chunk, **options: compute(*arrays, division=division, **options)
    if plan.implementation == "mosaic_gpu":
        kernels = importlib.import_module("sympow_jax.ops._power.mosaic")
        return kernels.attention if form == "attention" else kernels.chunked
    compute = xla.attention if form == "attention" else xla.chunked
    return lambda *arrays, chunk, **options: compute(
        *arrays, chunk=chunk or costs.default_chunk(form), division=division, **options
    )


def _kernels(implementation, module, *arrays, division, named=False, **needs):
    """The module of that name if its kernels do it; else None, or NotImplementedError if they were asked for.

    Kernels that were not `named` have to have been found right on this kind of machine.
    """
    if implementation == "xla":
        return None
    try:
        target.require_hopper()
        if division is not means.Division.POSITIVE:
            raise NotImplementedError(
                "implementation 'mosaic_gpu' has even powers of queries and keys, and no other denominator; use "
                "implementation='xla'"
            )
        # Pallas takes a second to import: only where a kernel may run.
        kernels = importlib.import_module(f"sympow_jax.ops._power.{module}")
        kernels.require_supported(*arrays, **needs)
        if not named and implementation is None and not target.trusts_kernels(kernels.family(**needs)):
            return None
    except NotImplementedError:
        if implementation == "mosaic_gpu":
            raise
        return None
    return kernels


def _require_divisible(axis_name, implementation, *, kept_keys, stateless) -> None:
    """Raises NotImplementedError, naming the constraint, for what needs all of the time on one device."""
    divided = f"time is divided over the mesh axis {axis_name!r}, which"
    if not stateless:
        raise NotImplementedError(
            f"{divided} goes without states; leave out initial_state and return_state, or axis_name"
        )
    if kept_keys:
        raise NotImplementedError(
            f"{divided} needs as many keys as queries; leave out kept keys, or axis_name"
        )
    if implementation == "reference":
        raise NotImplementedError(
            f"{divided} implementation 'reference' cannot; use implementation='xla', or leave out axis_name"
        )
