"""Even-power attention: weights (q . k)^p in place of exp(q . k), and a recurrent state of finite size.

"Symmetric Power Transformers" (Buckman, Gelada, Zhang 2024); gates and learned rotations as in "Conformal
Transformations for Symmetric Power Transformers" (Kumar et al. 2025).
"""

import inspect

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops import arguments, attend, plans, power_state
from sympow_jax.ops.tokens import Tokens

Plan = plans.Plan
PowerState = power_state.PowerState


def power_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B S K D"],
    value: Float[Array, "B S K E"],
    *,
    power: int = 2,
    log_decay: Float[Array, "B S K"] | Float[Array, "B S K E"] | None = None,
    segment_ids: Int[Array, "B S"] | None = None,
    form: str | None = None,
    implementation: str | None = None,
    chunk_size: int | None = None,
    exact_window: int = 64,
    initial_state: PowerState | None = None,
    return_state: bool = False,
    axis_name: str | None = None,
) -> Float[Array, "B T N E"] | tuple[Float[Array, "B T N E"], PowerState]:
    """Computes causal attention with weights exp(G_i - G_j) (q_i . k_j)^p for j <= i.

    G is the running sum of log_decay. Returns the weighted mean of values in value's dtype, zero where every weight is
    zero. There is no scale argument: a scale cancels in the mean.

    Shapes are those of `jax.nn.dot_product_attention`, batch axis included. These of its other arguments have no
    counterpart: `bias` (if it grows with distance, use `log_decay`); `mask`, `query_seq_lengths` and
    `key_value_seq_lengths` (use `segment_ids`, negative for padding); `scale` (it cancels); `is_causal` (always true;
    `linear_attention` with feature map `symmetric` and `causal=False` is bidirectional); `local_window_size`
    (`exact_window` is not one, since older tokens still count; use `log_decay` to forget); `return_residual`.

    Args:
        query: N is a multiple of K; N / K query heads share a key head.
        key: S == T, or S >= T in the attention form without a state: the queries are the last T of S tokens.
        value: E may differ from D. Query, key and value have one dtype. Sums and states are float32 (float64 for
            float64), and products of float32 are computed at full precision on every device.
        power: p, positive and even.
        log_decay: natural logarithm of the gate, at most 0 (not checked), one per key head [B, S, K] or one per
            value channel [B, S, K, E]. A token's decay discounts earlier tokens, not its own key. Per-channel gates
            give each channel weights of its own. They support the chunked form by `xla`, the attention form by
            `reference` and a step, and cost about three times as much on a CPU. The state must be of the same kind.
        segment_ids: a document starts where the id changes; ids may recur. Negative ids are padding: their output is
            zero, and they leave state and decay unchanged. None continues the document of `initial_state`.
        form: `attention` costs O(T^2) and holds a few blocks of scores. `chunked` costs O(T F E) and, with its backward
            pass, holds memory linear in T. `recurrent` updates the state one token at a time. All agree to rounding.
            None chooses `attention` or `chunked`, the one with fewer FLOPs or the faster kernel; `explain` returns the
            choice and reasons.
        implementation: `reference` is the unoptimized formula. `xla` runs on any device. `mosaic_gpu` are the kernels
            for Hopper GPUs, for inputs of 16 bits, with further limits in the README's table; under a mesh, batch and
            heads are sharded. None uses a kernel on a Hopper GPU if one supports the request, and `xla` otherwise. It
            fails only for requests that `xla` does not support: per-channel gates in another form, and `axis_name` with
            what is named there. In the chunked form the kernels save their states for the backward pass, unless a
            policy of `jax.checkpoint` saves `power_attention_out` without `power_attention_states`; then the states are
            recomputed. Outputs and denominators have the first of these names in every form of `xla` too, and the final
            state of its chunked form the second. The kernels have gradients only; forward mode and derivatives of
            higher order need `xla`. The backward pass of the step is `xla`'s.
        chunk_size: tokens per chunk, or per block of the attention form; None chooses. Changes only speed. Must be None
            in the recurrent form.
        exact_window: every query attends exactly to at least this many of its last keys, and only to older ones through
            features, whose sum cancels if few keys carry weight. 0 is the papers' pure recurrence. Must be equal to
            that of the state.
        initial_state: state after the preceding tokens. Running a and then b from a's state equals running a and b
            together.
        return_state: return (output, state after the last token).
        axis_name: a manual mesh axis of a `jax.shard_map` over which time is sharded in order. Arguments and output are
            this device's shard, of equal length on all devices, and documents and windows continue from one shard to
            the next. In the chunked and recurrent forms, P > 1 devices send each other the tokens of a window, and one
            state per head 1 + ceil(log2(P - 1)) times, and once more if it is returned. The state before the first
            shard and the one after the last are whole on every device. Without an initial state, shards must be at
            least as long as the window. In the attention form, which takes no states then, each device computes a part
            of the heads over the whole time axis. Not supported with more keys than queries, per-channel gates, or
            `reference`.

    Raises:
        ValueError: for sizes, dtypes or names that do not match, and for a state larger than memory.
        NotImplementedError: if a named implementation, per-channel gates or `axis_name` do not support the request.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> query, key, value = jnp.ones((3, 1, 128, 4, 16))  # [B, T, N, D]
        >>> ops.power_attention(query, key, value, power=2).shape
        (1, 128, 4, 16)
        >>> first, state = ops.power_attention(query[:, :100], key[:, :100], value[:, :100], return_state=True)
        >>> state.kv.shape  # whatever the length: [B, K, F, E], F = D (D + 1) / 2
        (1, 4, 136, 16)
        >>> rest = ops.power_attention(query[:, 100:], key[:, 100:], value[:, 100:], initial_state=state)
        >>> rest.shape
        (1, 28, 4, 16)
    """
    tokens = Tokens.of(query, key, value, log_decay, segment_ids)
    call_plan = plans.make(
        tokens,
        initial_state,
        power=arguments.check_power(power),
        form=form,
        implementation=implementation,
        chunk_size=chunk_size,
        exact_window=exact_window,
        return_state=return_state,
        axis_name=axis_name,
    )
    out, state = attend.attend(call_plan, tokens=tokens, state=initial_state)
    return (out, state) if return_state else out


def explain(query, key, value, **options) -> Plan:
    """Returns the plan of `power_attention` for these arguments, with the reasons for it; computes nothing.

    Options are those of `power_attention`, with the same defaults and errors. Arrays may be abstract
    (`jax.ShapeDtypeStruct`).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> x = jax.ShapeDtypeStruct((1, 65536, 12, 64), jnp.float32)
        >>> plan = ops.explain(x, x, x)
        >>> plan.form, plan.chunk
        ('chunked', 128)
    """
    call = inspect.signature(power_attention).bind(query, key, value, **options)
    call.apply_defaults()
    tokens = Tokens(*arguments.to_shapes(**{name: call.arguments.pop(name) for name in Tokens._fields}))
    state = call.arguments.pop("initial_state")
    call.arguments["power"] = arguments.check_power(call.arguments["power"])
    return plans.make(tokens, state, **call.arguments)


def power_attention_step(
    query: Float[Array, "B N D"],
    key: Float[Array, "B K D"],
    value: Float[Array, "B K E"],
    state: PowerState,
    *,
    power: int = 2,
    log_decay: Float[Array, "B K"] | Float[Array, "B K E"] | None = None,
    segment_ids: Int[Array, " B"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B N E"], PowerState]:
    """Computes `power_attention` for the next token of each row; returns its output and the state after it.

    The window grows from the start of a document to 2W tokens. Then the state is updated with its oldest W tokens, so
    that W remain. All but one in W steps thus cost only a product with the state. `mosaic_gpu` takes inputs of float32
    or shorter and updates in place a state that is donated to `jax.jit`. Arguments and errors are those of
    `power_attention`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> query, key, value = jnp.ones((3, 1, 4, 16))  # one token: [B, N, D]
        >>> state = ops.PowerState.zeros(1, 4, 16, 16, power=2)
        >>> out, state = ops.power_attention_step(query, key, value, state)
        >>> out.shape, int(state.length[0])
        ((1, 4, 16), 1)
    """
    tokens = Tokens.of(query, key, value, log_decay, segment_ids)
    call_plan = plans.make_step(
        tokens, state, power=arguments.check_power(power), implementation=implementation
    )
    return attend.attend_step(call_plan, tokens=tokens, state=state)
