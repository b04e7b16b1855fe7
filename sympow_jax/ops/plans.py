"""Plan of a recurrent attention, decided once from shapes and options: form, implementation and sizes.

`make` lists the candidates, each a form by an implementation, with what each costs and what speaks against it, and
takes one.
"""

import dataclasses
import importlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.ops import arguments, cost, feature_maps, means, power_state, target

FORMS = ("attention", "chunked", "recurrent")
IMPLEMENTATIONS = ("reference", "xla", "mosaic_gpu")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A form of a recurrent attention by an implementation.

    Attributes:
        form: `attention`, `chunked` or `recurrent`; `step` for one token.
        implementation: `reference`, `xla` or `mosaic_gpu`.
        flops: predicted FLOPs of the forward pass; None for a step.
        reason: why it is not taken; None for the one that is.
    """

    form: str
    implementation: str
    flops: float | None
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.form} by {self.implementation}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Form and implementation of a recurrent attention, and the reasons for the choice.

    Attributes:
        form: `attention`, `chunked` or `recurrent`; `step` for one token.
        implementation: `reference`, `xla` or `mosaic_gpu`.
        power: the degree p of the weights.
        chunk: tokens per chunk, or per block of the attention form; None for a step, or where the implementation
            chooses or has none.
        exact_window: number of recent tokens that every query attends to exactly, if older ones are in a state.
        division: rule for dividing sums of weighted values by sums of weights.
        per_channel: whether decays are one per value channel instead of one per key head.
        return_state: whether the state after the last token is computed.
        axis_name: the manual mesh axis over which time is sharded, or None.
        dtype: the dtype of sums and states.
        precision: the precision of products.
        interpret: parameters of the GPU interpreter, or None.
        candidates: the form and implementation that is taken, and those that are not, with the reasons. Where a kernel
            supports a form, plain JAX is not among them.
    """

    form: str
    implementation: str
    power: int
    chunk: int | None
    exact_window: int
    dtype: Any
    precision: jax.lax.Precision
    division: means.Division
    per_channel: bool
    return_state: bool
    axis_name: str | None
    interpret: Any
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        lines = [f"{self.form} form by {self.implementation}, chunk {self.chunk}, window {self.exact_window}"]
        for candidate in self.candidates:
            flops = "" if candidate.flops is None else f"{candidate.flops:.3g} FLOPs"
            lines.append(f"  {candidate!s:<23}{flops:>15}  {candidate.reason or 'taken'}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """Checked arguments of a call, without form and implementation; most fields are those of `Plan`."""

    tokens: Any
    state: Any
    power: int
    sizes: arguments.Sizes
    dtype: Any
    per_channel: bool
    division: means.Division
    exact_window: int
    chunk_size: int | None = None
    return_state: bool = True
    axis_name: str | None = None

    @property
    def stateless(self) -> bool:
        return self.state is None and not self.return_state

    @property
    def more_keys(self) -> bool:
        return self.tokens.key.shape[1] > self.tokens.query.shape[1]

    @property
    def state_sizes(self) -> dict[str, Any]:
        return {
            "power": self.power,
            "itemsize": self.dtype.itemsize,
            "normalizers": self.sizes["value_dim"] if self.per_channel else 1,
            **self.sizes,
        }

    @property
    def rows(self) -> int:
        batch = self.sizes["batch"]
        return 1 if jax.export.is_symbolic_dim(batch) else batch

    @property
    def time(self) -> int:
        shards = 1 if self.axis_name is None else jax.lax.axis_size(self.axis_name)
        return shards * self.tokens.query.shape[1]

    @property
    def positions(self) -> int:
        """Length of the rows of the chunked form: the window of a state, that of the shard before, and the tokens."""
        windows = 2 * (self.state is not None) + (self.axis_name is not None)
        return windows * self.exact_window + self.tokens.query.shape[1]

    def candidates(self, forms: Iterable[str], implementation: str | None) -> list[Candidate]:
        """Returns these forms by the implementation; if that is None, by kernels, or else by plain JAX."""
        found = []
        for form in forms:
            flops = self.flops(form)
            for name in (implementation,) if implementation else ("mosaic_gpu", "xla"):
                reason = self.refusal(form, name, named=implementation is not None)
                found.append(Candidate(form, name, flops, reason))
                if reason is None:
                    break
        return found

    def flops(self, form: str) -> float | None:
        """Returns the predicted FLOPs of the forward pass; None for a step."""
        if form == "step":
            return None
        query, key = self.tokens.query, self.tokens.key
        per_token = cost.flops_per_token(
            form,
            time=self.time,
            key_time=self.time // query.shape[1] * key.shape[1],
            heads=query.shape[2],
            kv_heads=self.sizes["kv_heads"],
            head_dim=self.sizes["head_dim"],
            # Decays per value channel have a normalizer as large as the values.
            value_dim=self.sizes["value_dim"] * (2 if self.per_channel else 1),
            power=self.power,
            chunk=self.chunk_size or cost.default_chunk(form),
            exact_window=self.exact_window,
        )
        return self.rows * self.time * per_token

    def refusal(self, form: str, implementation: str, *, named: bool) -> str | None:
        """Returns why this form by this implementation cannot compute the request, or None if it can.

        Unless the kernels were `named`, a check must also have verified them on this kind of machine.
        """
        if form == "attention" and self.axis_name is not None and not self.stateless:
            return (
                f"time is sharded over the mesh axis {self.axis_name!r}, with which form 'attention' takes and returns "
                f"no state; use form='chunked', or leave out axis_name"
            )
        if implementation == "reference":
            if form == "step":
                return "implementation 'reference' has no step; call the op with one token"
            if form != "attention":
                return (
                    "implementation 'reference' has only the form 'attention'; leave form out, or use 'xla'"
                )
            return None
        if self.per_channel:
            if implementation == "mosaic_gpu":
                return "'mosaic_gpu' has one decay per key head; use implementation='xla' for one per value channel"
            if form in ("attention", "recurrent"):
                if self.more_keys:
                    return (
                        "log_decay is one per value channel and there are more keys than queries; only "
                        "implementation='reference' supports both"
                    )
                return (
                    f"form {form!r} has one decay per key head; use form='chunked' for one per value channel"
                )
        return None if implementation == "xla" else self._refusal_of_kernels(form, named)

    def _refusal_of_kernels(self, form: str, named: bool) -> str | None:
        if form == "step":
            module, arrays, needs = "hopper_step", (self.tokens.query, self.state), {"power": self.power}
        else:
            module, arrays = "hopper", (self.tokens.query, self.tokens.value)
            names = ("power", "exact_window", "chunk_size", "stateless", "positions")
            needs = {"form": form} | {name: getattr(self, name) for name in names}
        if not target.is_hopper():
            device = target.device()
            return (
                f"implementation 'mosaic_gpu' needs a Hopper GPU (compute capability 9.x), "
                f"not {device.device_kind or device.platform}"
            )
        if jax.export.is_symbolic_dim(self.sizes["batch"]):
            return "implementation 'mosaic_gpu' needs a number of rows, not a symbolic one"
        if self.division is not means.Division.POSITIVE:
            return (
                "implementation 'mosaic_gpu' supports only even powers without `rotate`; use implementation='xla' for "
                "others"
            )
        # Pallas takes a second to import, so import it only if a kernel may run.
        kernels = importlib.import_module(f"sympow_jax.ops.backends.{module}")
        try:
            kernels.require_supported(*arrays, **needs)
        except NotImplementedError as error:
            return str(error)
        if not named and not target.trusts_kernels(kernels.family(**needs)):
            return "no check has found the kernels right on this machine; run sympow check"
        return None

    def choose(self, candidates: list[Candidate]) -> tuple[Candidate, str]:
        """Returns the candidate to take, and the reason against others that could compute the request.

        Raises:
            NotImplementedError: there is none; the error is the reason against the one with fewest FLOPs.
        """
        possible = [candidate for candidate in candidates if candidate.reason is None]
        flops = {candidate.form: candidate.flops or 0 for candidate in candidates}
        if not possible:
            # `min` takes the first of equals: reversed, that is plain JAX.
            raise NotImplementedError(min(reversed(candidates), key=lambda c: flops[c.form]).reason)
        if len(possible) == 1:
            return possible[0], ""
        # Two: the attention and the chunked form.
        forms = {candidate.form: candidate for candidate in possible}
        # The scan holds the state, its decayed copy and its update.
        state_bytes = cost.state_bytes(**self.state_sizes)
        if cost.exceeds_memory(3 * state_bytes):
            return forms["attention"], f"three states of {state_bytes:,} bytes do not fit in memory"
        kernels = [candidate for candidate in possible if candidate.implementation == "mosaic_gpu"]
        # With a state, the plain attention form computes with features too.
        if len(kernels) == 1 and not self.stateless:
            return kernels[0], "it has no kernel"
        if len(kernels) == 2:
            heads = self.rows * self.tokens.query.shape[2] / target.device_count()
            return forms[cost.faster_kernel(flops, self.time, heads)], "its kernels are slower at this length"
        return forms[min(flops, key=flops.__getitem__)], "it takes more FLOPs"

    def plan(self, candidates: list[Candidate]) -> Plan:
        """Returns the plan of the candidate that is taken."""
        taken, reason = self.choose(candidates)
        chunk = self.chunk_size
        if taken.implementation == "xla" and taken.form in FORMS:
            chunk = chunk or cost.default_chunk(taken.form)
        return Plan(
            form=taken.form,
            implementation=taken.implementation,
            power=self.power,
            chunk=chunk,
            exact_window=self.exact_window,
            division=self.division,
            per_channel=self.per_channel,
            return_state=self.return_state,
            axis_name=self.axis_name,
            dtype=self.dtype,
            precision=cost.precision_of(self.tokens.key.dtype),
            interpret=target.interpret(),
            candidates=tuple(
                c if c is taken or c.reason else dataclasses.replace(c, reason=reason) for c in candidates
            ),
        )


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
    arguments.check_choice("form", form, (None, *FORMS))
    exact_window = arguments.check_integer("exact_window", exact_window, 0)
    if chunk_size is not None:
        chunk_size = arguments.check_integer("chunk_size", chunk_size, 1)
        if form == "recurrent":
            raise ValueError(
                f"chunk_size is {chunk_size} and form 'recurrent', which updates the state one token at a time; leave "
                f"out chunk_size, or use form='chunked'"
            )
    request = _request(
        tokens,
        state,
        implementation,
        power=power,
        division=division,
        exact_window=exact_window,
        chunk_size=chunk_size,
        return_state=arguments.check_flag("return_state", return_state),
        axis_name=axis_name,
    )
    if request.more_keys and (state is not None or form not in (None, "attention")):
        raise ValueError(
            f"key has {tokens.key.shape[1]} tokens and query {tokens.query.shape[1]}; more keys than queries need the "
            f"attention form without an initial state"
        )
    if axis_name is not None:
        _check_sharded_time(request, implementation)
    forms = (form,) if form else ("attention",) if request.more_keys else ("attention", "chunked")
    plan = request.plan(request.candidates(forms, implementation))
    if plan.form != "attention" or return_state:
        # Only a state that is returned has a window of its own.
        cost.require_memory(**request.state_sizes, exact_window=exact_window if return_state else 0)
    return plan


def make_step(tokens, state, *, power, implementation, division=means.Division.POSITIVE) -> Plan:
    """Returns the plan of `power_attention_step`, like `make`."""
    request = _request(tokens, state, implementation, step=True, power=power, division=division)
    return request.plan(request.candidates(("step",), implementation))


def _request(
    tokens, state, implementation, *, power, division, step=False, exact_window=None, **options
) -> _Request:
    """Checks arrays, state and implementation; a step has the window of its state."""
    sizes = arguments.check_attention(
        *tokens, step=step, may_be_per_channel=True, may_lack_values=division is means.Division.NONE
    )
    arguments.check_choice("implementation", implementation, (None, *IMPLEMENTATIONS))
    is_power_state = isinstance(state, power_state.PowerState)
    state_per_channel = state.per_channel if is_power_state else None
    if tokens.log_decay is None:
        per_channel = bool(state_per_channel)
    else:
        per_channel = tokens.log_decay.ndim == tokens.value.ndim
        if state_per_channel not in (None, per_channel):
            raise ValueError(
                f"log_decay has shape {tokens.log_decay.shape} and the state was made with "
                f"per_channel={state_per_channel}; make it with PowerState.zeros(..., per_channel={per_channel})"
            )
    dtype = np.promote_types(tokens.query.dtype, jnp.float32)
    if step or state is not None:
        window = state.exact_window if is_power_state else 0
        option = "" if exact_window is None else f", exact_window={exact_window}"
        option += ", per_channel=True" if per_channel else ""
        call = f"{', '.join(map(str, sizes.values()))}, power={power}{option}, dtype={dtype.name!r}"
        features = feature_maps.symmetric_power_dim(sizes["head_dim"], power)
        # States of two head sizes may have the same number of features: D = 2 at p = 14, and D = 5 at p = 2.
        shapes = {
            "kv": (sizes["batch"], sizes["kv_heads"], features, sizes["value_dim"]),
            "keys": (sizes["batch"], 2 * window, sizes["kv_heads"], sizes["head_dim"]),
        }
        arguments.check_state(state, power_state.PowerState, f"PowerState.zeros({call})", shapes, dtype)
        if exact_window not in (None, window):
            raise ValueError(
                f"exact_window is {exact_window} and the state has {window}; pass exact_window={window}"
            )
        arguments.check_ids_fit(tokens.segment_ids, state)
    return _Request(
        tokens=tokens,
        state=state,
        power=power,
        sizes=sizes,
        dtype=dtype,
        per_channel=per_channel,
        division=division,
        exact_window=state.exact_window if step else exact_window,
        **options,
    )


def _check_sharded_time(request: _Request, implementation: str | None) -> None:
    """Raises NotImplementedError for requests that need all of the time on one device, ValueError for no such axis."""
    for unsupported, message in (
        (request.more_keys, "needs equal numbers of keys and queries; leave out a KV cache, or axis_name"),
        (
            implementation == "reference",
            "implementation 'reference' does not support; use implementation='xla', or leave out axis_name",
        ),
        (
            request.per_channel,
            "needs one decay per key head, not one per value channel; leave out axis_name",
        ),
    ):
        if unsupported:
            raise NotImplementedError(
                f"time is sharded over the mesh axis {request.axis_name!r}, which {message}"
            )
    arguments.check_axis_name(request.axis_name)
