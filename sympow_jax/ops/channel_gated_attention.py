"""Even-power attention in which every value channel forgets at a rate of its own.

The gate of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025) is one number a head and
token; gates of vectors are what that paper leaves to future work. The normaliser decays as its channel does, so that
each channel stays a mean of values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops._channel_gated import chunked, reference
from sympow_jax.ops._channel_gated import state as channel_state
from sympow_jax.ops._channel_gated import step as channel_step
from sympow_jax.ops._power import dispatch, xla
from sympow_jax.ops._shared import arguments, calls, nonfinite

__all__ = ["ChannelGatedState", "channel_gated_attention", "channel_gated_attention_step"]

ChannelGatedState = channel_state.ChannelGatedState

# Tokens of a chunk: measured as fast as 64 on two cores at T = 1,024, with half the states saved.
DEFAULT_CHUNK = 128


def channel_gated_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K E"],
    log_decay: Float[Array, "B T K E"],
    *,
    power: int = 2,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
    window: int = 64,
    initial_state: ChannelGatedState | None = None,
    return_state: bool = False,
    axis_name: str | None = None,
) -> Float[Array, "B T N E"] | tuple[Float[Array, "B T N E"], ChannelGatedState]:
    """Causal attention whose weight in channel e is exp(G_ie - G_je) (q_i . k_j)^p, G the running sum of log_decay.

    Returns for every channel the weighted mean of its values, y_ie = sum_j w_ije v_je / sum_j w_ije for j <= i, in
    value's dtype, zero where every weight is zero. With equal channels it is `power_attention`, whose arguments,
    numerics and errors these are; there is no scale argument, since a scale cancels.

    Cost: about three times that of `power_attention` in the chunked form, forward and backward, on a CPU (D = E = 32,
    p = 2). Normalisers are as many as values, so states, and products with them, are twice those of one decay a head;
    decays take (W + C) / 16 + 16 exponentials a token and channel, for windows W and chunks C. The backward pass holds
    memory linear in T: the arguments, and a state and a window for each chunk.

    Args:
        query: N is a multiple of K; N / K query heads share a key head and its decays.
        key: as many tokens as queries.
        value: E may differ from D. Query, key and value have one dtype; sums and states are float32 (float64 for
            float64), and products of float32 are taken at full precision on every device.
        log_decay: natural logarithm of the gate of each value channel, at most 0 (not checked); -1e4 and beyond
            forgets. A token's decay discounts what came before it, not its own key.
        power: p, positive and even.
        segment_ids: a document starts where the id changes; ids may recur. Negative ids are padding: output zero,
            and state and decay pass through. None continues the document of `initial_state`.
        implementation: `reference` is the formula in T x T x E numbers, without states; `xla`, the chunked form, runs
            on any device. None is `xla`.
        chunk_size: tokens of a chunk, rounded up to a multiple of 16; None chooses. Changes speed and memory alone.
        window: every query sees at least this many of its last keys exactly, and only older ones through features,
            whose sum cancels where few keys count. Must be that of the state.
        initial_state: what came before; running a and then b from a's state equals running a and b together.
        return_state: return (output, state after the last token).
        axis_name: not supported: time divided over devices is for `power_attention`.

    Raises:
        ValueError: for sizes, dtypes or names that do not fit, and for a state larger than memory.
        NotImplementedError: for `axis_name`, for `mosaic_gpu`, and for states with `reference`.

    Example:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> query, key, value = jnp.ones((3, 1, 32, 4, 16))  # [B, T, N, D]
        >>> ops.channel_gated_attention(query, key, value, log_decay=-0.1 * value).shape
        (1, 32, 4, 16)
    """
    power = arguments.check_power(power)
    query, key, value, log_decay, segment_ids = arguments.to_arrays(
        query=query, key=key, value=value, log_decay=log_decay, segment_ids=segment_ids
    )
    sizes = arguments.check_attention(query, key, value, log_decay, segment_ids, per_channel=True)
    arguments.check_choice("implementation", implementation, (None, *dispatch.IMPLEMENTATIONS))
    arguments.check_same_length(query, key)
    window = arguments.check_integer("window", window, 0)
    if chunk_size is not None:
        chunk_size = arguments.check_integer("chunk_size", chunk_size, 1)
    return_state = arguments.check_flag("return_state", return_state)
    if implementation == "mosaic_gpu":
        raise NotImplementedError(
            "implementation 'mosaic_gpu' has one decay a head; use implementation='xla' for one a value channel"
        )
    if axis_name is not None:
        raise NotImplementedError(
            f"channel_gated_attention cannot divide time over the mesh axis {axis_name!r}; leave out axis_name, or use "
            f"power_attention with one decay a head"
        )
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    if initial_state is not None:
        arguments.check_state(
            initial_state,
            ChannelGatedState,
            dtype,
            power=power,
            window=window,
            segment_ids=segment_ids,
            **sizes,
        )
    if implementation == "reference":
        if initial_state is not None or return_state:
            raise NotImplementedError(
                "implementation 'reference' computes whole sequences; leave out initial_state and return_state, or use "
                "implementation='xla'"
            )
    else:
        channel_state.require_memory(power=power, itemsize=dtype.itemsize, **sizes)
    plan = _Plan(power, implementation or "xla", chunk_size or DEFAULT_CHUNK, window, return_state)
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


class _Plan(NamedTuple):
    """What is static of a call."""

    power: int
    implementation: str
    chunk: int
    window: int
    return_state: bool


@calls.op(
    calls.ATTENTION, lambda plan: ("B T N E", ChannelGatedState.layout() if plan.return_state else None)
)
def _attend(plan, query, key, value, log_decay, segment_ids, state):
    finite = nonfinite.remove(query, key, value, log_decay, segment_ids, state=state)
    if plan.implementation == "reference":
        out = reference.attention(*finite[:4], power=plan.power, segment_ids=segment_ids)
        return nonfinite.restore(out, finite, segment_ids), None
    with jax.named_scope("channel_gated_xla"):
        out, final = xla.chunked(
            finite.query,
            finite.key,
            finite.value,
            power=plan.power,
            log_decay=finite.log_decay,
            segment_ids=segment_ids,
            state=finite.state,
            window=plan.window,
            chunk=plan.chunk,
            return_state=plan.return_state,
            core=chunked.core,
            state_type=ChannelGatedState,
        )
    out = nonfinite.restore(out, finite, segment_ids)
    return out, None if final is None else nonfinite.restore_state(final, finite)


def channel_gated_attention_step(
    query: Float[Array, "B N D"],
    key: Float[Array, "B K D"],
    value: Float[Array, "B K E"],
    log_decay: Float[Array, "B K E"],
    state: ChannelGatedState,
    *,
    power: int = 2,
    segment_ids: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B N E"], ChannelGatedState]:
    """`channel_gated_attention` for the next token of each row; returns its output and the state behind it.

    The window holds between W and 2W tokens; when it is full, its oldest W are folded. Errors are those of
    `channel_gated_attention`.

    Example:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> query, key, value = jnp.ones((3, 1, 4, 16))  # one token: [B, N, D]
        >>> state = ops.ChannelGatedState.zeros(1, 4, 16, 16, power=2)
        >>> out, state = ops.channel_gated_attention_step(query, key, value, -0.1 * value, state)
        >>> out.shape
        (1, 4, 16)
    """
    power = arguments.check_power(power)
    query, key, value, log_decay, segment_ids = arguments.to_arrays(
        query=query, key=key, value=value, log_decay=log_decay, segment_ids=segment_ids
    )
    sizes = arguments.check_attention(query, key, value, log_decay, segment_ids, step=True, per_channel=True)
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    arguments.check_state(state, ChannelGatedState, dtype, power=power, segment_ids=segment_ids, **sizes)
    return _step(
        power, query=query, key=key, value=value, log_decay=log_decay, segment_ids=segment_ids, state=state
    )


@calls.op(calls.STEP, lambda power: ("B N E", ChannelGatedState.layout()))
def _step(power, query, key, value, log_decay, segment_ids, state):
    return channel_step.step(query, key, value, log_decay, state, power=power, segment_ids=segment_ids)
