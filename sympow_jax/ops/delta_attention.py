"""Attention by the delta rule on power features: a token overwrites what the state holds for its key."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax.array_types import Array, Float, Int
from sympow_jax.ops import arguments, containment, cost, decays, documents, feature_maps, sharding
from sympow_jax.ops.forms import delta as delta_form
from sympow_jax.ops.pytree import State
from sympow_jax.ops.tokens import ONE, SEQUENCE, Tokens

_FORMS = ("attention", "chunked", "recurrent")


class DeltaState(State):
    """State of `delta_attention` after a prefix of a document; a pytree that the caller holds.

    Attributes:
        kv: S, whose product with the features of a key is the key's value. The F features are those of
            `feature_maps.symmetric_power`.
        segment: segment id of the document, -1 before the first token.
    """

    kv: Float[Array, "B K F E"]
    segment: Int[Array, " B"]

    @classmethod
    def zeros(
        cls, batch: int, kv_heads: int, head_dim: int, value_dim: int, *, power: int, dtype=jnp.float32
    ) -> "DeltaState":
        """Returns the state before any token.

        Raises:
            ValueError: the power is below 1, a size is negative, or the state would exceed the device's
                memory.
        """
        power = arguments.check_power(power, even=False)
        sizes = arguments.check_sizes(batch=batch, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
        arguments.check_dtype("dtype", dtype)
        cost.require_memory(power=power, normalizers=0, itemsize=jnp.dtype(dtype).itemsize, **sizes)
        shape = (batch, kv_heads, feature_maps.symmetric_power_dim(head_dim, power), value_dim)
        return cls(jnp.zeros(shape, dtype), jnp.full(batch, documents.NO_SEGMENT, jnp.int32))

    @classmethod
    def layout(cls) -> "DeltaState":
        """Returns the axes of each array."""
        return cls("B K F E", "B")  # type: ignore[arg-type]


class _Plan(NamedTuple):
    power: int
    chunk: int | None
    return_state: bool


def delta_attention(
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K E"],
    delta: Float[Array, "B T K"],
    *,
    power: int = 2,
    log_decay: Float[Array, "B T K"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    form: str | None = None,
    chunk_size: int | None = None,
    initial_state: DeltaState | None = None,
    return_state: bool = False,
) -> Float[Array, "B T N E"] | tuple[Float[Array, "B T N E"], DeltaState]:
    """Computes o_i = S_i^T phi(q_i), where S_i = g_i (I - d_i phi(k_i) phi(k_i)^T) S_(i-1) + d_i phi(k_i) v_i^T.

    phi(q)^T phi(k) = (q . k)^p, of queries and keys that the op first divides by their lengths, so that phi(k)^T phi(k)
    = 1. d is `delta` and g the exponential of `log_decay`. With d = 1 the state then returns v_i for k_i, whatever it
    has returned before; with d = 0 it is unchanged. With orthogonal keys and no decay, the output is the sum of
    d_j (q . k_j)^p v_j. There is no division by a sum of weights, which has no meaning where values are subtracted. For
    d in [0, 2] no step amplifies the state, since I - d_i phi(k_i) phi(k_i)^T has eigenvalues from -1 to 1. The source
    is "Gated Delta Networks" (Yang et al. 2025), where p = 1 and d is beta. Computed in float32, or in float64 for
    float64 inputs; the output has the dtype of `value`.

    Args:
        query: N is a multiple of K.
        key: one for each query.
        value: E may differ from D.
        delta: d, the write strengths, from 0 to 1, or to 2 for negative eigenvalues.
        power: p, at least 1; 1 is the rule of DeltaNet.
        log_decay: natural logarithm of the decay g, at most 0. A token's own decay applies to the state before it.
        segment_ids: documents, as in `ops.documents`. Padding outputs zero and leaves the state as it is.
        form: `attention` has no state and is quadratic in T; `chunked` takes F E operations per token; `recurrent` goes
            token by token. None chooses `chunked` with a state or a `chunk_size`, and else what should be faster on a
            CPU.
        chunk_size: tokens per chunk of the chunked form. Changes speed, and memory: a gradient keeps a state per chunk.
        initial_state: state after the preceding tokens. Running a and then b from a's state equals running a and b
            together.
        return_state: return (output, state after the last token).

    Raises:
        ValueError: for sizes, dtypes or names that do not match, and for a state larger than memory.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> key = jnp.eye(4)[None, jnp.array([0, 1, 0, 2]), None]  # [B, T, K, D]; the third token has the first's key
        >>> value = jnp.arange(1.0, 5)[None, :, None, None]
        >>> out = ops.delta_attention(key[:, [0, 0, 0, 0]], key, value, jnp.ones((1, 4, 1)))
        >>> out[0, :, 0, 0].tolist()
        [1.0, 1.0, 3.0, 3.0]
    """
    tokens = Tokens.of(query, key, value, log_decay, segment_ids)
    delta = arguments.to_array("delta", delta)
    sizes = arguments.check_attention(*tokens)
    arguments.check_same_length(*tokens[:2])
    power = _check(tokens, delta, initial_state, power, sizes)
    arguments.check_choice("form", form, (None, *_FORMS))
    time = tokens.key.shape[1]
    has_state = arguments.check_flag("return_state", return_state) or initial_state is not None
    if form == "attention" and has_state:
        raise ValueError("form is 'attention', which has no state; use 'chunked'")
    if form not in (None, "chunked") and chunk_size is not None:
        raise ValueError(f"chunk_size is {chunk_size}, but form {form!r}; leave one of them out")
    per_chunk = (
        delta_form.CHUNK if chunk_size is None else arguments.check_integer("chunk_size", chunk_size, 1)
    )
    itemsize = np.promote_types(tokens.query.dtype, jnp.float32).itemsize
    if form is None:
        heads, kv_heads = tokens.query.shape[2], sizes["kv_heads"]
        shape = {"head_dim": sizes["head_dim"], "value_dim": sizes["value_dim"], "power": power}
        is_faster = delta_form.prefers_pairs(time, heads=heads, kv_heads=kv_heads, **shape)
        pairs = tokens.key.shape[0] * (heads + kv_heads) * time**2 * itemsize
        may_compare = chunk_size is None and not has_state and not cost.exceeds_memory(pairs)
        form = "attention" if is_faster and may_compare else "chunked"
    chunk = {"attention": None, "chunked": min(per_chunk, time), "recurrent": 1}[form]
    if chunk is not None:
        cost.require_memory(power=power, normalizers=0, itemsize=itemsize, **sizes)
    out, state = _attend(_Plan(power, chunk, return_state), tokens=tokens, delta=delta, state=initial_state)
    return (out, state) if return_state else out


def delta_attention_step(
    query: Float[Array, "B N D"],
    key: Float[Array, "B K D"],
    value: Float[Array, "B K E"],
    delta: Float[Array, "B K"],
    state: DeltaState,
    *,
    power: int = 2,
    log_decay: Float[Array, "B K"] | None = None,
    segment_ids: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B N E"], DeltaState]:
    """Computes `delta_attention` for the next token of each row; returns its output and the state after it.

    Arguments and errors are those of `delta_attention`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from sympow_jax import ops
        >>> query, key, value = jnp.ones((3, 1, 4, 16))  # one token: [B, N, D]
        >>> state = ops.DeltaState.zeros(1, 4, 16, 16, power=2)
        >>> out, state = ops.delta_attention_step(query, key, value, jnp.ones((1, 4)), state)
        >>> out.shape, state.kv.shape
        ((1, 4, 16), (1, 4, 136, 16))
    """
    tokens = Tokens.of(query, key, value, log_decay, segment_ids)
    delta = arguments.to_array("delta", delta)
    sizes = arguments.check_attention(*tokens, step=True)
    power = _check(tokens, delta, state, power, sizes)
    return _step(_Plan(power, 1, True), tokens=tokens, delta=delta, state=state)


def _check(tokens, delta, state, power, sizes) -> int:
    """Returns the power; raises ValueError unless `delta` and the state match the tokens."""
    power = arguments.check_power(power, even=False)
    if delta.shape != tokens.key.shape[:-1]:
        raise ValueError(
            f"delta has shape {delta.shape}; it must be {tokens.key.shape[:-1]}, one per token and key head"
        )
    arguments.check_floating("delta", delta)
    if state is None:
        return power
    dtype = np.promote_types(tokens.query.dtype, jnp.float32)
    batch, kv_heads, head_dim, value_dim = sizes.values()
    shape = (batch, kv_heads, feature_maps.symmetric_power_dim(head_dim, power), value_dim)
    make = (
        f"DeltaState.zeros({batch}, {kv_heads}, {head_dim}, {value_dim}, power={power}, dtype={dtype.name!r})"
    )
    arguments.check_state(state, DeltaState, make, {"kv": shape}, dtype)
    arguments.check_ids_fit(tokens.segment_ids, state)
    return power


@sharding.op(
    {"tokens": SEQUENCE, "delta": "B S K", "state": DeltaState.layout()},
    lambda plan: ("B T N E", DeltaState.layout() if plan.return_state else None),
)
def _attend(plan, tokens, delta, state=None):
    return _contained(plan, tokens, delta, state)


@sharding.op(
    {"tokens": ONE, "delta": "B K", "state": DeltaState.layout()},
    lambda plan: ("B N E", DeltaState.layout()),
)
def _step(plan, tokens, delta, state):
    tokens, delta = jax.tree.map(lambda x: x[:, None], (tokens, delta))
    out, state = _contained(plan, tokens, delta, state)
    return out[:, 0], state


def _contained(plan, tokens, delta, state):
    """Runs the form on finite tokens of unit length, and marks what tokens that are not finite reach."""
    dtype, out_dtype = np.promote_types(tokens.query.dtype, jnp.float32), tokens.value.dtype
    # A write strength that is not finite makes its token's value so.
    value = jnp.where(jnp.isfinite(delta)[..., None], tokens.value, jnp.nan)
    finite = containment.remove(tokens._replace(value=value), state=state)
    query, key, value, log_decay, segment_ids = finite.tokens
    delta = jnp.where(jnp.isfinite(delta), delta, 0).astype(dtype)
    log_decay = jnp.zeros_like(delta) if log_decay is None else log_decay.astype(dtype)
    previous = jnp.full(delta.shape[0], documents.NO_SEGMENT, jnp.int32) if state is None else state.segment
    start, segment = False, documents.continued(previous)
    if segment_ids is not None:
        starts, valid, segment = documents.boundaries(segment_ids, previous)
        start, delta = starts[..., None], jnp.where(valid[..., None], delta, 0)
    out, kv = delta_form.attend(
        plan.power,
        plan.chunk,
        _unit(query.astype(dtype)),
        _unit(key.astype(dtype)),
        value.astype(dtype),
        delta,
        decays.bounded(log_decay, start),
        None if state is None else finite.state.kv.astype(dtype),
        return_state=plan.return_state,
    )
    out = containment.restore(out.astype(out_dtype), finite)
    if not plan.return_state:
        return out, None
    after = DeltaState(kv.astype(dtype if state is None else state.kv.dtype), segment)
    return out, containment.restore_state(after, finite)


def _unit(x):
    """Returns vectors divided by their lengths; zero stays zero."""
    largest = jnp.abs(jax.lax.stop_gradient(x)).max(-1, keepdims=True)
    x = x / jnp.where(largest == 0, 1, largest)
    square = (x * x).sum(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.where(square == 0, 1, square))
