"""Collectives for context parallelism, where time is sharded over a manual mesh axis in order and equally.

States, of megabytes, go through `exclusive_prefix`, in log2 P steps, and `of_last`. Summaries of a few bytes per row go
through `carried`, with a single all-gather. Attention that compares all pairs exchanges time for heads, in `by_heads`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Float
from sympow_jax.ops import sharding
from sympow_jax.ops.tokens import Tokens


def from_left(tree, axis_name: str):
    """Returns the arrays of the device before this one; zeros on the first."""
    return _shifted(tree, axis_name, 1, reverse=False)


def exclusive_prefix(combine: Callable, tree, axis_name: str, *, reverse: bool = False):
    """Returns the combination of the arrays of all devices before this one; zeros on the first.

    `combine(earlier, later)` is associative and zeros are its identity; in reverse, `later` comes from earlier devices.
    reverse: combine the arrays of all devices after this one.

    The scan is a shift by one, then shifts by 1, 2, 4, ... below P - 1. Each device sends its arrays 1 + ceil(log2(P -
    1)) times and holds two copies. An all-gather would send them P - 1 times and hold P copies: as much up to P = 4, 7
    against 4 at P = 8 and 63 against 7 at P = 64.
    """
    devices = jax.lax.axis_size(axis_name)
    tree = _shifted(tree, axis_name, 1, reverse)
    distance = 1
    while distance < devices - 1:
        tree = combine(_shifted(tree, axis_name, distance, reverse), tree)
        distance *= 2
    return tree


def carried(step: Callable, initial, summary, axis_name: str, *, reverse: bool = False):
    """Returns `initial` after `carry = step(carry, summary)` over the devices before this one, in order.

    For summaries of a few bytes per row: one all-gather, after which every device runs all of the steps.
    reverse: run over the devices after this one, from the last.
    """

    def emit_carry(carry, shard):
        return step(carry, shard), carry

    shards = jax.lax.all_gather(summary, axis_name)
    # Within `shard_map` with its checks, the carry must vary over the mesh axes from the start.
    carry_type = jax.eval_shape(step, initial, jax.tree.map(lambda x: x[0], shards))
    initial = jax.tree.map(
        # Without the checks there is no such type.
        lambda x, like: (
            x if like.manual_axis_type is None else sharding.varying_over(x, like.manual_axis_type.varying)
        ),
        initial,
        carry_type,
    )
    _, before = jax.lax.scan(emit_carry, initial, shards, reverse=reverse, unroll=8)
    index = jax.lax.axis_index(axis_name)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), before)


def of_last(tree, axis_name: str):
    """Returns the arrays of the last device, on all devices."""
    is_last = jax.lax.axis_index(axis_name) == jax.lax.axis_size(axis_name) - 1
    return jax.lax.psum(jax.tree.map(lambda x: jnp.where(is_last, x, 0), tree), axis_name)


def by_heads(
    attend: Callable[[Tokens], Float[Array, "B T N E"]], tokens: Tokens, axis_name: str | None
) -> Float[Array, "B T N E"]:
    """Computes `attend` over the whole time axis, with heads instead of time sharded over devices.

    With an axis of None, time is not sharded, and this is `attend(tokens)`.

    Each array is sent once, all to all, 1 / P of it to each device; segment ids are gathered. A ring of keys and values
    would send these P - 1 times. In causal attention its last device would also have P blocks of pairs where the first
    has one, whereas heads are equal work. Code for whole sequences is used unchanged.

    If P does not divide the number of key heads, each key head is repeated for the smallest number of parts of its
    queries that makes P divide them, at most once per query head. If P does not divide the number of query heads
    either, heads of zeros pad the last device.

    Raises:
        NotImplementedError: there are more keys than queries.
    """
    if axis_name is None:
        return attend(tokens)
    query, key, value, log_decay, segment_ids = tokens
    if key.shape[1] > query.shape[1]:
        raise NotImplementedError(
            f"time is sharded over the mesh axis {axis_name!r}, which needs equal numbers of keys and queries, not "
            f"{key.shape[1]} and {query.shape[1]}; leave out a KV cache, or axis_name"
        )
    devices, heads, kv_heads = jax.lax.axis_size(axis_name), query.shape[2], key.shape[2]
    group = heads // kv_heads
    fitting = (n for n in range(1, group) if group % n == 0 and kv_heads * n % devices == 0)
    repeats = next(fitting, group)
    missing = -kv_heads * repeats % devices

    def divided(x, repeats=1):
        x = jnp.repeat(x, repeats, axis=2) if repeats > 1 else x
        x = jnp.pad(x, [(0, missing if axis == 2 else 0) for axis in range(x.ndim)])
        return jax.lax.all_to_all(x, axis_name, 2, 1, tiled=True)

    if segment_ids is not None:
        segment_ids = jax.lax.all_gather(segment_ids, axis_name, axis=1, tiled=True)
    key, value = divided(key, repeats), divided(value, repeats)
    log_decay = None if log_decay is None else divided(log_decay, repeats)
    out = attend(Tokens(divided(query), key, value, log_decay, segment_ids))
    return jax.lax.all_to_all(out, axis_name, 1, 2, tiled=True)[:, :, :heads]


def _shifted(tree, axis_name, distance, reverse):
    devices = jax.lax.axis_size(axis_name)
    pairs = [(i, i + distance) for i in range(devices - distance)]
    return jax.lax.ppermute(tree, axis_name, [pair[::-1] for pair in pairs] if reverse else pairs)
