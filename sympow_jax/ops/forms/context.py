"""The chunked form under context parallelism: state and tokens passed between time shards.

A device's positions are the last W tokens before its own, whose queries it does not compute, and its own. It updates
its state with all of them except its own last W, which the next device uses. All devices together thus use every token
once, at the same time, the first from the initial state and the others from an empty one. The resulting states are
combined over the preceding devices. The incoming state is then added to the sums of the queries, or by the kernels to
the states before its chunks.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Bool, Float
from sympow_jax.ops import decays, derivatives, layout, power_state, time_axis
from sympow_jax.ops.forms import features

# Number of positions per product with the state.
_CHUNK = 128


def with_halo(
    sequence: power_state.Sequence, *, exact_window: int, ragged: bool, axis_name: str
) -> tuple[power_state.Sequence, Bool[Array, "B W+X"]]:
    """Prepends the last W tokens before this shard; also returns which positions this device folds into its state.

    ragged: whether any position is invalid. If so, the W tokens may come from several devices and are right-aligned in
    W positions; invalid positions hold zeros.

    Raises:
        ValueError: a shard, with the window of a state, is shorter than the window.
    """
    valid = sequence.valid
    time = valid.shape[1]
    if time < exact_window:
        devices = jax.lax.axis_size(axis_name)
        raise ValueError(
            f"each of {devices} devices along {axis_name!r} holds {time} of {devices * time} positions, fewer than the "
            f"window of {exact_window}; use a longer sequence, fewer devices along that axis or a smaller window"
        )
    names = ("key", "value", "log_decay", "start", "valid")
    tokens = {name: getattr(sequence, name) for name in names}
    if ragged:
        halo = _tokens_before(tokens, exact_window, axis_name)
        valid = jnp.concatenate([halo["valid"], valid], 1)
        following = jnp.cumsum(valid[:, ::-1], 1)[:, ::-1] - valid
        enters_state = following >= exact_window
    else:
        # The first device receives zeros, whose weight is zero.
        halo = time_axis.from_left(
            {name: x[:, time - exact_window :] for name, x in tokens.items()}, axis_name
        )
        enters_state = jnp.broadcast_to(
            jnp.arange(exact_window + time) < time, (len(valid), exact_window + time)
        )
    joined = {name: jnp.concatenate([halo[name], x], 1) for name, x in tokens.items()}
    return dataclasses.replace(sequence, **joined), enters_state


def _tokens_before(tokens, exact_window, axis_name):
    """Returns the last W valid tokens before this shard, zero-padded at the front.

    A prefix scan over devices whose operation keeps the last W of two runs of tokens, since a shard may hold fewer than
    W.
    """
    valid = tokens["valid"]
    newest = jnp.argsort(valid, axis=1, stable=True)[:, valid.shape[1] - exact_window :]

    def last_of_both(earlier, later):
        """Returns the last W tokens of two right-aligned runs: `earlier` moves up to the first token of `later`."""
        count = later["valid"].sum(1, dtype=jnp.int32)[:, None]
        steps = jnp.arange(exact_window, dtype=jnp.int32)
        is_later = steps >= exact_window - count
        moved = jnp.minimum(steps + count, exact_window - 1)
        return {
            name: jnp.where(layout.with_rank(is_later, x.ndim), x, layout.reordered(earlier[name], moved))
            for name, x in later.items()
        }

    own = {name: layout.reordered(x, newest) for name, x in tokens.items()}
    return time_axis.exclusive_prefix(last_of_both, own, axis_name)


def log_decay_over(log_decay: Float[Array, "B X K"] | None, enters_state, kv_heads: int):
    """Returns the sum of the log decays of the tokens that update the state, [B, K]."""
    if log_decay is None:
        return jnp.zeros_like(enters_state, jnp.float32, shape=(len(enters_state), kv_heads))
    return jnp.where(enters_state[..., None], log_decay, 0).sum(1)


def combined(earlier, later):
    """Combines the (sum of log decays [B, K], state) of two consecutive runs of tokens.

    Array axes begin with [B, K]. Gradients of the states before two runs combine in the same way, in reverse order.
    """
    (earlier_decay, earlier_state), (later_decay, later_state) = earlier, later
    decay = decays.exp(later_decay)
    state = jax.tree.map(lambda x, y: layout.with_rank(decay, x.ndim) * x + y, earlier_state, later_state)
    return earlier_decay + later_decay, state


@functools.partial(derivatives.custom_vjp, static=2)
def sums_from_earlier_state(
    power: int,
    precision: jax.lax.Precision,
    state: features.Groups,
    query: Float[Array, "G D T"],
    log_decay: Float[Array, " X"] | None,
) -> Float[Array, "G E+1 T"]:
    """Returns what an earlier state contributes to the sums of a head's queries.

    The state is from before X positions, and the queries are at the last T of them.

    log_decay: of the X positions, bounded; None means no decay.

    Differentiable in all three arrays. Only the arguments are saved, and neither pass computes a product twice.
    """
    weighted = features.weighted(state, features.weights(query.shape[1], power, state[0].dtype))
    parts = _in_chunks(query.astype(state[0].dtype))
    sums = jax.lax.map(lambda q: features.query(weighted, q, power, precision), parts)
    return _since_start(log_decay, query) * _joined(sums, query.shape)


def sums_from_earlier_state_vjp(power, precision, arguments, dsums):
    """Computes the gradients; as in `chunked`, q . dq / p sums the gradients of the log weights of a query."""
    state, query, log_decay = arguments
    weights = features.weights(query.shape[1], power, state[0].dtype)
    weighted = features.weighted(state, weights)
    wide = query.astype(state[0].dtype)

    def step(dstate, inputs):
        q, cotangent = inputs
        dquery = features.query_vjp(weighted, q, cotangent, power, precision)
        new = features.fold(cotangent, q, power, precision)
        return tuple(s + n for s, n in zip(dstate, new, strict=True)), dquery

    inputs = _in_chunks(wide), _in_chunks(_since_start(log_decay, query) * dsums)
    dstate, dquery = jax.lax.scan(step, tuple(map(jnp.zeros_like, state)), inputs)
    dquery = _joined(dquery, query.shape)
    dlog = None
    if log_decay is not None:
        at_queries = (wide * dquery).sum((0, 1)) / power
        at_positions = jnp.pad(at_queries, (len(log_decay) - len(at_queries), 0))
        dlog = jax.lax.cumsum(at_positions, reverse=True)
    return features.weighted(dstate, weights), dquery.astype(query.dtype), dlog


sums_from_earlier_state.defvjp(None, sums_from_earlier_state_vjp)


def _since_start(log_decay, query):
    """Returns the decay from before the positions to each query."""
    if log_decay is None:
        return 1
    return decays.exp(jnp.cumsum(log_decay))[len(log_decay) - query.shape[-1] :]


def _in_chunks(x):
    """Reshapes [G, A, X] to [n, A, C]: positions of all heads are concatenated and zero-padded."""
    return layout.split_chunks(layout.merge_heads(x), _CHUNK)


def _joined(chunks, shape):
    """Inverts `_in_chunks`; `shape` gives the number of heads (first) and positions (last)."""
    groups, time = shape[0], shape[-1]
    return layout.split_heads(layout.join_chunks(chunks)[:, : groups * time], groups)
