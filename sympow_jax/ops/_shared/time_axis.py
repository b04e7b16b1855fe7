"""What devices tell each other where time is divided over a manual mesh axis, in order and equally.

States, of megabytes, go through `exclusive_prefix`, in log2 P steps. What is a few bytes a row goes through `carried`,
by one all-gather, which is one step. Attention that compares all pairs trades time for heads, in `by_heads`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Float, Int

__all__ = ["by_heads", "carried", "exclusive_prefix", "from_left"]


def from_left(tree, axis_name: str):
    """What the device before this one holds; zeros on the first."""
    return _shifted(tree, axis_name, 1, reverse=False)


def exclusive_prefix(combine: Callable, tree, axis_name: str, *, reverse: bool = False):
    """The arrays of all devices before this one, combined; zeros on the first.

    `combine(far, near)` is associative and zeros are its identity; `near` is of the devices closer to this one.
    reverse: of all devices behind this one.

    A shift by one and then one by 1, 2, 4, ... below P - 1: each device sends 1 + ceil(log2(P - 1)) times its arrays
    and holds two of them. An all-gather would send P - 1 times and hold P: as much up to P = 4, 7 against 4 at P = 8
    and 63 against 7 at P = 64.
    """
    devices = jax.lax.axis_size(axis_name)
    tree = _shifted(tree, axis_name, 1, reverse)
    distance = 1
    while distance < devices - 1:
        tree = combine(_shifted(tree, axis_name, distance, reverse), tree)
        distance *= 2
    return tree


def carried(step: Callable, initial, summary, axis_name: str, *, reverse: bool = False):
    """`initial` after `carry = step(carry, summary)` over the devices before this one, in order.

    For summaries of a few bytes a row: one all-gather, and every device takes all of the steps.
    reverse: over the devices behind this one, from the last.
    """

    def taken(carry, of_device):
        return step(carry, of_device), carry

    shares = jax.lax.all_gather(summary, axis_name)
    _, before = jax.lax.scan(taken, initial, shares, reverse=reverse, unroll=8)
    index = jax.lax.axis_index(axis_name)
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), before)


def by_heads(
    attend: Callable,
    query: Float[Array, "B T N D"],
    key: Float[Array, "B T K D"],
    value: Float[Array, "B T K E"],
    log_decay: Float[Array, "B T K"] | None,
    segment_ids: Int[Array, "B T"] | None,
    axis_name: str,
) -> Float[Array, "B T N E"]:
    """`attend(query, key, value, log_decay, segment_ids)` of all of time, a share of the heads on each device.

    Each array is sent once, all to all, 1 / P of it to each device; segment ids are gathered. A ring of keys and
    values would send these P - 1 times, and where attention is causal the last device has P blocks of pairs to the
    first one's one; heads are equal work, and what computes whole sequences is used as it is.

    Where P does not divide the heads of keys, each is repeated for as few parts of its queries as make P divide them,
    at the most for every query head; heads of zeros fill up the last device where P does not divide these either.

    Raises NotImplementedError for more keys than queries.
    """
    if key.shape[1] > query.shape[1]:
        raise NotImplementedError(
            f"time is divided over the mesh axis {axis_name!r}, which needs as many keys as queries, not "
            f"{key.shape[1]} and {query.shape[1]}; leave out a KV cache, or axis_name"
        )
    devices, heads, kv_heads = jax.lax.axis_size(axis_name), query.shape[2], key.shape[2]
    repeats = _repeats(heads, kv_heads, devices)
    missing = -kv_heads * repeats % devices

    def divided(x, repeats=1):
        x = jnp.repeat(x, repeats, axis=2) if repeats > 1 else x
        x = jnp.pad(x, [(0, missing if axis == 2 else 0) for axis in range(x.ndim)])
        return jax.lax.all_to_all(x, axis_name, 2, 1, tiled=True)

    if segment_ids is not None:
        segment_ids = jax.lax.all_gather(segment_ids, axis_name, axis=1, tiled=True)
    keys = (None if x is None else divided(x, repeats) for x in (key, value, log_decay))
    out = attend(divided(query), *keys, segment_ids)
    return jax.lax.all_to_all(out, axis_name, 1, 2, tiled=True)[:, :, :heads]


def _repeats(heads: int, kv_heads: int, devices: int) -> int:
    """How often a key head is repeated so that devices get as many, or as often as it has query heads."""
    group = heads // kv_heads
    fitting = (n for n in range(1, group) if group % n == 0 and kv_heads * n % devices == 0)
    return next(fitting, group)


def _shifted(tree, axis_name, distance, reverse):
    devices = jax.lax.axis_size(axis_name)
    pairs = [(i, i + distance) for i in range(devices - distance)]
    return jax.lax.ppermute(tree, axis_name, [pair[::-1] for pair in pairs] if reverse else pairs)
