"""Power attention by the Pallas kernels for Hopper GPUs; imported only when they are requested.

Forward and backward, the kernels compute the same functions as the plain forms. `ops.preparation` moves
positions without a token to the end of the rows, and kernels convert states to their own order of features.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from pallas_kernels import power_attention as attention_kernel
from pallas_kernels import power_state as state_kernel
from sympow_jax.ops import derivatives, means, preparation, sharding, time_axis
from sympow_jax.ops.forms import context
from sympow_jax.ops.precision import rounded
from sympow_jax.ops.tokens import Tokens

# Chunks and windows of the state kernels are whole blocks of the tensor core.
_BLOCK = 64
# Results of the attention kernels that the backward pass reads, besides the output. Time is padded to whole blocks.
_WEIGHTS = ("weight_sum", "weight_exponent", "query_exponent", "key_exponent")
_ATTENTION_RESIDUALS = ("remainder", *_WEIGHTS, "unit_query", "unit_key")
# Checkpoint names, for policies of `jax.checkpoint`, of the results that the backward pass reads. Units of lengths are
# computed again: each takes one pass over queries or keys.
_SAVED_AS = dict.fromkeys(state_kernel.Saved._fields, means.STATES_SAVED_AS) | dict.fromkeys(
    ("out", "denominator", "remainder", *_WEIGHTS), means.SAVED_AS
)
_DIFFERENTIABLE = ("query", "key", "value", "log_decay")
# Leading axes of the kernels' inputs and outputs, for `sharding.per_device`.
_LAYOUTS = (
    dict.fromkeys(("query", "key", "value", "log_decay", "out", "remainder", "denominator", "dout"), "B T K")
    | dict.fromkeys(("unit_query", "unit_key"), "B 1 K")
    | dict.fromkeys(("kv", "norm", "final_kv", "final_norm", *state_kernel.Saved._fields), "B K")
    | dict.fromkeys(_WEIGHTS, "B K")
    | dict.fromkeys(("segment_ids", "enters_state"), "B")
)


def require_supported(query, value, *, form, power, exact_window, chunk_size, stateless, positions) -> None:
    """Raises NotImplementedError, naming the constraint, for requests that the kernels do not support.

    positions: length of the rows of the chunked form.
    """
    sizes = {"head_dim": query.shape[-1], "value_dim": value.shape[-1]}
    if form == "attention":
        if not stateless:
            raise NotImplementedError(
                "implementation 'mosaic_gpu' takes and returns states in the chunked form, not in the attention form"
            )
        attention_kernel.choose(**sizes, power=power, dtype=query.dtype)
    elif form == "chunked":
        heads = {"time": positions, "heads": value.shape[0] * value.shape[2]}
        chunk = _fitted(chunk_size, positions, exact_window)
        state_kernel.choose(
            **sizes, **heads, power=power, dtype=query.dtype, chunk=chunk, exact_window=exact_window
        )
    else:
        raise NotImplementedError(
            f"implementation 'mosaic_gpu' has the forms 'attention' and 'chunked', not {form!r}"
        )


def family(*, form, power, **_) -> str:
    """Returns the family of kernels that computes a form, one of `pallas_kernels.check.verdict.FAMILIES`."""
    if form == "attention":
        return "power_attention"
    return "power_state_quartic" if power == 4 else "power_state_square"


@functools.partial(derivatives.custom_vjp, static=1)
def attention(plan, tokens, state, differentiated=False):
    """Computes the attention form as `xla.attention` does, without a state.

    Saved for the backward pass, and also returned if `differentiated`: the output with what its rounding took, the
    arguments, and what the kernels computed of them. A rounded output alone would add as much to the error of gradients
    as their own rounding does.
    """
    assert state is None  # `require_supported`
    names = ("out", *_ATTENTION_RESIDUALS) if differentiated else ("out",)

    @_differentiable_once
    def compute(arrays):
        found = attention_kernel.power_attention(
            **arrays, power=plan.power, save_residuals=differentiated, interpret=plan.interpret
        )
        return {name: found[name] for name in names}

    results = sharding.per_device(compute, tokens._asdict(), _LAYOUTS, names)
    if not differentiated:
        return results["out"], None
    results = _named(results)
    return (results["out"], None), (tokens, results)


def attention_vjp(plan, residuals, cotangents):
    """Returns the gradients of `attention`."""
    tokens, saved = residuals
    dout, _ = cotangents
    arguments = tokens._asdict() | {"dout": rounded(dout)}

    @_differentiable_once
    def compute(arrays):
        given = {name: x for name, x in arrays.items() if name in arguments}
        kept = {name: x for name, x in arrays.items() if name in saved}
        gradients = attention_kernel.power_attention_vjp(
            **given, saved=kept, power=plan.power, interpret=plan.interpret
        )
        found = zip(_DIFFERENTIABLE, gradients)
        return {name: g.astype(arrays[name].dtype) for name, g in found if g is not None}

    differentiable = tuple(name for name in _DIFFERENTIABLE if arguments[name] is not None)
    gradients = sharding.per_device(compute, arguments | saved, _LAYOUTS, differentiable)
    return Tokens(*(gradients.get(name) for name in Tokens._fields)), None


attention.defvjp(functools.partial(attention.fun, differentiated=True), attention_vjp)


def _named(results):
    return {
        name: ad_checkpoint.checkpoint_name(x, _SAVED_AS[name]) if name in _SAVED_AS else x
        for name, x in results.items()
    }


def chunked(plan, rows: preparation.Rows):
    """Computes the chunked form; returns as `xla.chunked` does.

    If `plan.chunk` is None, the kernels choose the chunk.
    """
    (batch, length, kv_heads, head_dim), dtype = rows.key.shape, rows.query.dtype
    chunk = state_kernel.choose(
        power=plan.power,
        head_dim=head_dim,
        value_dim=rows.value.shape[-1],
        time=length,
        heads=batch * kv_heads,
        dtype=dtype,
        exact_window=plan.exact_window,
        chunk=_fitted(plan.chunk, length, plan.exact_window),
    ).chunk
    # The window of a state is float32, while the inputs have 16 bits.
    rows = rows._replace(**{name: getattr(rows, name).astype(dtype) for name in ("query", "key", "value")})
    results = _chunked(dataclasses.replace(plan, chunk=chunk), rows)
    return results if plan.return_state else (*results, None, None)


def _fitted(chunk: int | None, positions: int, exact_window: int) -> int | None:
    """Returns the chunk, no longer than a row and no shorter than the window."""
    # Queries of at most two chunks attend exactly to a key, so the window is at most one chunk.
    return chunk and max(min(chunk, -(-positions // _BLOCK) * _BLOCK), exact_window)


@functools.partial(derivatives.custom_vjp, static=1)
def _chunked(plan, rows, differentiated=False):
    """Computes the output of the kernels and, if the plan has one, the final state.

    Saved for the backward pass, and also returned if `differentiated`: the arguments, the output with what rounding it
    to 16 bits took away, the denominators and the states before each chunk. All have a `checkpoint_name`, so that a
    policy of `jax.checkpoint` can have the states recomputed instead.
    """
    of_mean = ("out", "remainder", "denominator") if differentiated else ("out", "denominator")

    @_differentiable_once
    def compute(arrays):
        initial = (arrays["kv"], arrays["norm"]) if "kv" in arrays else None
        arguments, call = _operands(plan, arrays)
        saved, final = state_kernel.fold(arguments, initial, call=call)
        if plan.axis_name is not None:
            saved, final = _add_incoming(saved, final, arguments, call, plan.axis_name)
        found = state_kernel.attend(arguments, saved, call=call, with_remainder=differentiated)
        kv, norm = final
        return dict(zip(of_mean, found)) | {"kv": kv, "norm": norm} | saved._asdict()

    names = (*of_mean, "kv", "norm", *state_kernel.Saved._fields)
    results = sharding.per_device(compute, rows._asdict(), _LAYOUTS, names)
    kv, norm = results.pop("kv"), results.pop("norm")
    saved = _named(results)
    results = (saved["out"], kv, norm) if plan.return_state else (saved["out"],)
    return (results, (rows, saved)) if differentiated else results


def chunked_vjp(plan, residuals, cotangents):
    """Returns the gradients of `_chunked`."""
    rows, saved = residuals

    @_differentiable_once
    def compute(arrays):
        arguments, call = _operands(plan, arrays)
        out = arrays["out"].astype(jnp.float32) + arrays["remainder"].astype(jnp.float32)
        results = (out, arrays["denominator"])
        states = state_kernel.Saved(*(arrays[name] for name in state_kernel.Saved._fields))
        dfinal = (arrays["final_kv"], arrays["final_norm"]) if plan.return_state else None
        dstates, initial = state_kernel.fold_vjp(arguments, results, arrays["dout"], dfinal, call=call)
        if plan.axis_name is not None:
            dstates, initial = _add_incoming(dstates, initial, arguments, call, plan.axis_name, reverse=True)
        gradients = state_kernel.attend_vjp(arguments, results, states, dstates, arrays["dout"], call=call)
        gradients = gradients._asdict() | dict(zip(("kv", "norm"), initial))
        return {name: gradients[name] for name in differentiable}

    arrays = rows._asdict() | saved | dict(zip(("dout", "final_kv", "final_norm"), rounded(cotangents)))
    differentiable = tuple(
        name for name, x in rows._asdict().items() if x is not None and name != "enters_state"
    )
    gradients = sharding.per_device(compute, arrays, _LAYOUTS, differentiable)
    return (preparation.Rows(**dict.fromkeys(preparation.Rows._fields) | gradients),)


_chunked.defvjp(functools.partial(_chunked.fun, differentiated=True), chunked_vjp)


def _add_incoming(saved, final, arguments, call, axis_name, reverse=False):
    """Adds the state that arrives from earlier devices to states computed from an empty one.

    reverse: adds gradients of states, which arrive from later devices.
    """
    decay = context.log_decay_over(arguments.log_decay, arguments.enters_state, arguments.key.shape[2])
    _, incoming = time_axis.exclusive_prefix(context.combined, (decay, final), axis_name, reverse=reverse)
    return state_kernel.add_incoming(saved, final, incoming, arguments, call=call, reverse=reverse)


def _operands(plan, arrays):
    """Returns the arrays that both passes of the kernels read, and the static options of a call on one device.

    The options have the tiles for its shapes. States are float16.
    """
    query, key, value = (arrays[name] for name in ("query", "key", "value"))
    decay = arrays.get("log_decay")
    if decay is None:
        decay = jnp.zeros(key.shape[:3], jnp.float32)
    call = state_kernel.call_for(
        key,
        value,
        power=plan.power,
        chunk=plan.chunk,
        exact_window=plan.exact_window,
        interpret=plan.interpret,
    )
    return state_kernel.Arguments(query, key, value, decay, arrays["enters_state"]), call


def _differentiable_once(f: Callable[[dict], dict]):
    """Gives f one clear error where JAX would differentiate it."""
    call = jax.custom_jvp(f)

    @call.defjvp
    def derivative(primals, tangents):
        raise NotImplementedError(
            "implementation 'mosaic_gpu' has gradients, and neither forward mode nor second derivatives; use "
            "implementation='xla'"
        )

    return call
