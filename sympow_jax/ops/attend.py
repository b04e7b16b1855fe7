"""Recurrent attention by its plan, compiled once per plan and shapes."""

import dataclasses
import importlib

import jax

from sympow_jax.ops import containment, means, power_state, preparation, sharding, time_axis
from sympow_jax.ops.backends import xla
from sympow_jax.ops.forms import channels, reference
from sympow_jax.ops.forms import step as xla_step
from sympow_jax.ops.precision import rounded
from sympow_jax.ops.tokens import ONE, SEQUENCE


@sharding.op(
    {"tokens": SEQUENCE},
    lambda plan: (
        "B T N E",
        power_state.PowerState.layout(per_channel=plan.per_channel) if plan.return_state else None,
    ),
)
def attend(plan, tokens, state=None):
    """Returns the output of `plans.make`'s plan, and the state after the last token or None.

    Without division the output is sums [B, T, N, E + 1] in the plan's dtype, those of weights last; E may be 0. In
    plain JAX, tokens that are not finite are taken out, and the outputs that they reach are marked.
    """
    if plan.axis_name is not None and plan.form == "attention":
        # Each device has all of the time for some of the heads.
        of_heads = dataclasses.replace(plan, axis_name=None)
        return time_axis.by_heads(lambda x: attend(of_heads, tokens=x)[0], tokens, plan.axis_name), None
    # The scope names form and implementation in profiles and compiled programs.
    with jax.named_scope(f"{plan.form}_{plan.implementation}"):
        query, key, value = rounded(tokens[:3])
        tokens = tokens._replace(query=query, key=key, value=value)
        # All but lengths and segment ids.
        stored, state = state, jax.tree.map(lambda x: x.astype(plan.dtype) if x.ndim > 1 else x, state)

        # Two cases take out only padding, so that a NaN in a token spreads to every sum that includes it. With kernels,
        # copies of keys, values and outputs would take up to a fifth of the time. With time over devices, the token may
        # be on an earlier one, and only outputs of this one could be set to NaN.
        on_kernels = plan.implementation == "mosaic_gpu"
        contains = not on_kernels and plan.axis_name is None
        if contains:
            finite = containment.remove(tokens, state=state)
            tokens, state = finite.tokens, finite.state
        else:
            tokens = containment.without_padding(tokens)
        # With jax 0.11, operations on an empty array, such as values of width 0, forget which mesh axes it varies over.
        tokens, state = sharding.same_variation((tokens, state))

        # Pallas takes a second to import, so import it only if a kernel runs.
        backend = importlib.import_module("sympow_jax.ops.backends.hopper") if on_kernels else xla
        # States hold p-th powers of unscaled keys. Shards of the time axis would have scales of their own.
        unscaled = state is not None or plan.return_state or plan.axis_name is not None
        if plan.implementation == "xla" and not unscaled and plan.division is not means.Division.NONE:
            tokens = tokens._replace(key=preparation.scaled_keys(tokens.key, plan.power))
        if plan.implementation == "reference":
            out, final = reference.attention(plan, tokens, state)
        elif plan.form == "attention":
            out, final = backend.attention(plan, tokens, state)
        else:
            prepared = preparation.prepare(plan, tokens, state)
            limited = plan
            if plan.axis_name is None and not on_kernels:
                # Limit the window to the number of positions: only `enters_state` determines which tokens enter the
                # state. Over devices the window is the length of a halo, and windows of kernels are whole blocks.
                window = min(plan.exact_window, prepared.rows.query.shape[1])
                limited = dataclasses.replace(plan, exact_window=window)
            chunked = channels.chunked if plan.per_channel else backend.chunked
            out, final = preparation.finish(plan, prepared, tokens, *chunked(limited, prepared.rows))

        if contains:
            out = containment.restore(out, finite)
            final = None if final is None else containment.restore_state(final, finite)
        if stored is not None and final is not None:
            final = jax.tree.map(lambda x, before: x.astype(before.dtype), final, stored)
        return out, final


@sharding.op(
    {"tokens": ONE}, lambda plan: ("B N E", power_state.PowerState.layout(per_channel=plan.per_channel))
)
def attend_step(plan, tokens, state):
    """Returns the output of one token by `plans.make_step`'s plan, and the state after it."""
    step = xla_step.step
    if plan.implementation == "mosaic_gpu":
        step = importlib.import_module("sympow_jax.ops.backends.hopper_step").step
    with jax.named_scope(f"step_{plan.implementation}"):
        return step(plan, tokens, state)
