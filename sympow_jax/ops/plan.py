"""Plan of a recurrent attention, decided once from shapes and options: form, implementation and sizes."""

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.ops import arguments, cost, target
from sympow_jax.ops import mean as means
from sympow_jax.ops import state as power_state

__all__ = ["FORMS", "IMPLEMENTATIONS", "Plan", "make", "make_step"]

FORMS = ("attention", "chunked", "recurrent")
IMPLEMENTATIONS = ("reference", "xla", "mosaic_gpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Form and implementation of a recurrent attention, and the reasons for the choice.

    Attributes:
        form: `attention`, `chunked` or `recurrent`; `step` for one token.
        implementation: `reference`, `xla` or `mosaic_gpu`.
        power: the degree p of the weights.
        chunk: tokens per chunk, or per block of the attention form; None for a step, or if the kernels choose.
        exact_window: number of recent tokens that every query attends to exactly, if older ones are in a state.
        division: rule for dividing sums of weighted values by sums of weights.
        per_channel: whether decays are one per value channel instead of one per key head.
        return_state: whether the state after the last token is computed.
        axis_name: the manual mesh axis over which time is sharded, or None.
        dtype: the dtype of sums and states.
        precision: the precision of products.
        interpret: parameters of the GPU interpreter, or None.
        flops: predicted FLOPs of the forward pass of each form that was compared.
        not_taken: pairs of a choice and the reason why it was not taken.
    """

    form: str
    implementation: str
    power: int
    chunk: int | None
    exact_window: int
    dtype: Any
    precision: jax.lax.Precision
    division: means.Division = means.Division.POSITIVE
    per_channel: bool = False
    return_state: bool = False
    axis_name: str | None = None
    interpret: Any = None
    flops: tuple[tuple[str, float], ...] = ()
    not_taken: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.form} form by {self.implementation}, chunk {self.chunk}, window {self.exact_window}"]
        lines += [f"  {form}: {flops:.3g} FLOPs in the forward pass" for form, flops in self.flops]
        lines += [f"  not {choice}: {reason}" for choice, reason in self.not_taken]
        return "\n".join(lines)


def make(
    tokens,
    state,
    *,
    power,
    form,
    implementation,
    chunk_size,
    exact_window,
    return_state,
    axis_name,
    division=means.Division.POSITIVE,
) -> Plan:
    """Checks the arguments of `power_attention`, which may be abstract, and decides how to compute them.

    Raises:
        ValueError: as `power_attention`.
        NotImplementedError: as `power_attention`.
    """
    sizes = arguments.check_attention(
        *tokens, per_channel=None, may_lack_values=division is means.Division.NONE
    )
    query, key, value, log_decay, segment_ids = tokens
    arguments.check_choice("form", form, (None, *FORMS))
    arguments.check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    exact_window = arguments.check_integer("exact_window", exact_window, 0)
    if chunk_size is not None:
        chunk_size = arguments.check_integer("chunk_size", chunk_size, 1)
        if form == "recurrent":
            raise ValueError(
                f"chunk_size is {chunk_size} and form 'recurrent', which updates the state one token at a time; leave "
                f"out chunk_size, or use form='chunked'"
            )
    return_state = arguments.check_flag("return_state", return_state)
    dtype = np.promote_types(query.dtype, jnp.float32)
    per_channel = _per_channel(log_decay, value, state)
    if state is not None:
        arguments.check_state(
            state,
            power_state.PowerState,
            dtype,
            power=power,
            exact_window=exact_window,
            segment_ids=segment_ids,
            **sizes,
        )
    more_keys = key.shape[1] > query.shape[1]
    if more_keys and (state is not None or form not in (None, "attention")):
        raise ValueError(
            f"key has {key.shape[1]} tokens and query {query.shape[1]}; more keys than queries need the attention "
            f"form without an initial state"
        )
    stateless = state is None and not return_state
    if axis_name is not None:
        _check_sharded_time(axis_name, implementation, more_keys=more_keys, stateless=stateless)
    if per_channel:
        _check_per_channel(form, implementation, axis_name, more_keys=more_keys)
    if axis_name is not None:
        arguments.check_axis_name(axis_name)

    # Check kernel support before choosing a form, because it may limit the choice.
    not_taken: dict[str, str] = {}
    kernels = []
    if implementation in (None, "mosaic_gpu") and not per_channel:
        for candidate in (form,) if form else ("attention", "chunked"):
            reason = _why_no_kernels(
                "hopper",
                query,
                value,
                named=implementation is not None,
                division=division,
                form=candidate,
                power=power,
                exact_window=exact_window,
                chunk_size=chunk_size,
                stateless=stateless,
            )
            if reason is None:
                kernels.append(candidate)
            else:
                not_taken[f"{candidate} by mosaic_gpu"] = reason

    flops: dict[str, float] = {}
    if form is None:
        shards = 1 if axis_name is None else jax.lax.axis_size(axis_name)
        time = shards * query.shape[1]
        batch = 1 if jax.export.is_symbolic_dim(sizes["batch"]) else sizes["batch"]
        flops = {
            candidate: batch
            * time
            * cost.flops_per_token(
                candidate,
                time=time,
                key_time=shards * key.shape[1],
                heads=query.shape[2],
                kv_heads=sizes["kv_heads"],
                head_dim=sizes["head_dim"],
                # Decays per value channel have a normalizer as large as the values.
                value_dim=sizes["value_dim"] * (2 if per_channel else 1),
                power=power,
                chunk=chunk_size or cost.default_chunk("chunked"),
                exact_window=exact_window,
            )
            for candidate in (("attention",) if more_keys else ("attention", "chunked"))
        }
        state_bytes = cost.state_bytes(power=power, itemsize=dtype.itemsize, per_channel=per_channel, **sizes)
        if more_keys:
            form, reason = "attention", "there are more keys than queries"
        elif implementation == "reference":
            form, reason = "attention", "implementation 'reference' has no chunked form"
        elif per_channel:
            form, reason = "chunked", "it has one decay per key head"
        # The scan holds the state, its decayed copy and its update.
        elif cost.exceeds_memory(3 * state_bytes):
            form, reason = "attention", f"three states of {state_bytes:,} bytes do not fit in memory"
        # With a state, the plain attention form computes with features too.
        elif len(kernels) == 1 and (not stateless or implementation == "mosaic_gpu"):
            form, reason = kernels[0], "it has no kernel"
        elif len(kernels) == 2:
            heads = batch * query.shape[2] / target.device_count()
            form, reason = cost.faster_kernel(flops, time, heads), "its kernels are slower at this length"
        else:
            form, reason = min(flops, key=flops.__getitem__), "it takes more FLOPs"
        not_taken["chunked" if form == "attention" else "attention"] = reason

    if form != "attention" or return_state:
        cost.require_memory(power=power, itemsize=dtype.itemsize, per_channel=per_channel, **sizes)
    if implementation == "mosaic_gpu" and form not in kernels:
        raise NotImplementedError(not_taken[f"{form} by mosaic_gpu"])
    if implementation == "reference" and form == "chunked":
        raise NotImplementedError(
            "implementation 'reference' has no chunked form; use 'attention' or 'recurrent'"
        )
    implementation = implementation or ("mosaic_gpu" if form in kernels else "xla")
    return Plan(
        form=form,
        implementation=implementation,
        power=power,
        chunk=chunk_size if implementation == "mosaic_gpu" else chunk_size or cost.default_chunk(form),
        exact_window=exact_window,
        division=division,
        per_channel=per_channel,
        return_state=return_state,
        axis_name=axis_name,
        dtype=dtype,
        precision=cost.precision_of(key.dtype),
        interpret=target.interpret(),
        flops=tuple(flops.items()),
        not_taken=tuple(not_taken.items()),
    )


def make_step(tokens, state, *, power, implementation, division=means.Division.POSITIVE) -> Plan:
    """Returns the plan of `power_attention_step`, like `make`."""
    sizes = arguments.check_attention(
        *tokens, step=True, per_channel=None, may_lack_values=division is means.Division.NONE
    )
    query, key, value, log_decay, segment_ids = tokens
    arguments.check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    dtype = np.promote_types(query.dtype, jnp.float32)
    per_channel = _per_channel(log_decay, value, state)
    arguments.check_state(state, power_state.PowerState, dtype, power=power, segment_ids=segment_ids, **sizes)
    if implementation == "reference":
        raise NotImplementedError(
            "implementation 'reference' has no step; call the op with one token and implementation='reference'"
        )
    not_taken = {}
    if implementation == "mosaic_gpu" and per_channel:
        raise NotImplementedError(_ONE_DECAY_PER_HEAD)
    if implementation != "xla" and not per_channel:
        reason = _why_no_kernels(
            "hopper_step", query, state, named=implementation is not None, division=division, power=power
        )
        if reason is None:
            implementation = "mosaic_gpu"
        elif implementation is None:
            not_taken["step by mosaic_gpu"] = reason
        else:
            raise NotImplementedError(reason)
    return Plan(
        form="step",
        implementation=implementation or "xla",
        power=power,
        chunk=None,
        exact_window=state.exact_window,
        division=division,
        per_channel=per_channel,
        return_state=True,
        dtype=dtype,
        precision=cost.precision_of(key.dtype),
        interpret=target.interpret(),
        not_taken=tuple(not_taken.items()),
    )


_ONE_DECAY_PER_HEAD = (
    "'mosaic_gpu' has one decay per key head; use implementation='xla' for one per value channel"
)


def _per_channel(log_decay, value, state) -> bool:
    """Returns True if decays are one per value channel; raises ValueError if the state is of the other kind."""
    if log_decay is None:
        return isinstance(state, power_state.PowerState) and state.per_channel
    per_channel = log_decay.ndim == value.ndim
    if isinstance(state, power_state.PowerState) and state.per_channel != per_channel:
        raise ValueError(
            f"log_decay has shape {log_decay.shape} and the state was made with per_channel={state.per_channel}; make "
            f"it with PowerState.zeros(..., per_channel={per_channel})"
        )
    return per_channel


def _check_per_channel(form, implementation, axis_name, *, more_keys) -> None:
    """Raises NotImplementedError, naming the constraint, for requests that support only one decay per key head."""
    if implementation == "mosaic_gpu":
        raise NotImplementedError(_ONE_DECAY_PER_HEAD)
    if axis_name is not None:
        raise NotImplementedError(
            f"time is sharded over the mesh axis {axis_name!r}, which needs one decay per key head, not one per value "
            f"channel; leave out axis_name"
        )
    if implementation == "reference":
        if form == "recurrent":
            raise NotImplementedError(
                "form 'recurrent' of the reference has one decay per key head; use form='attention' for one per value "
                "channel"
            )
    elif more_keys:
        raise NotImplementedError(
            "log_decay is one per value channel and there are more keys than queries; only implementation='reference' "
            "supports both"
        )
    elif form in ("attention", "recurrent"):
        raise NotImplementedError(
            f"form {form!r} has one decay per key head; use form='chunked' for one per value channel"
        )


def _why_no_kernels(module, *arrays, named, division, **needs) -> str | None:
    """Returns why the kernels of that module cannot be used, or None if they can.

    Unless the kernels were `named`, a check must also have verified them on this kind of machine.
    """
    try:
        target.require_hopper()
        if division is not means.Division.POSITIVE:
            raise NotImplementedError(
                "implementation 'mosaic_gpu' supports only even powers without `rotate`; use "
                "implementation='xla' for others"
            )
        # Pallas takes a second to import, so import it only if a kernel may run.
        kernels = importlib.import_module(f"sympow_jax.ops.backends.{module}")
        kernels.require_supported(*arrays, **needs)
        if not named and not target.trusts_kernels(kernels.family(**needs)):
            return "no check has found the kernels right on this machine; run sympow check"
    except NotImplementedError as error:
        return str(error)
    return None


def _check_sharded_time(axis_name, implementation, *, more_keys, stateless) -> None:
    """Raises NotImplementedError, naming the constraint, for requests that need all of the time on one device."""
    sharded = f"time is sharded over the mesh axis {axis_name!r}, which"
    if not stateless:
        raise NotImplementedError(
            f"{sharded} does not support states; leave out initial_state and return_state, or axis_name"
        )
    if more_keys:
        raise NotImplementedError(
            f"{sharded} needs equal numbers of keys and queries; leave out a KV cache, or axis_name"
        )
    if implementation == "reference":
        raise NotImplementedError(
            f"{sharded} implementation 'reference' does not support; use implementation='xla', or leave out axis_name"
        )
