"""Changes of layout: time as the last axis, chunks of time, query heads of a key head."""

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Int, Shaped


def with_rank(x: Shaped[Array, "..."], rank: int) -> Shaped[Array, "..."]:
    """Appends axes of size 1 to x."""
    return x.reshape(x.shape + (1,) * (rank - x.ndim))


def pad_last(x: Shaped[Array, "*rest X"], front: int, back: int) -> Shaped[Array, "*rest Y"]:
    """Pads the last axis with zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(front, back)])


def reordered(tree, order: Int[Array, "B X"]):
    """Returns arrays [B, X, ...] in another order of the second axis."""
    return jax.tree.map(lambda x: jnp.take_along_axis(x, with_rank(order, x.ndim), axis=1), tree)


def by_group(x: Shaped[Array, "B T N D"], groups: int) -> Shaped[Array, "B T K G D"]:
    """Splits the heads into groups."""
    batch, time, heads, head_dim = x.shape
    return x.reshape(batch, time, groups, heads // groups, head_dim)


def time_last(query: Shaped[Array, "B X N D"], kv_heads: int) -> Shaped[Array, "B K G D X"]:
    """Splits query heads by key head and moves time to the end."""
    return jnp.moveaxis(by_group(query, kv_heads), 1, 4)


def time_second(out: Shaped[Array, "B K G E X"]) -> Shaped[Array, "B X N E"]:
    """Inverts `time_last`."""
    batch, kv_heads, group, value_dim, time = out.shape
    return jnp.moveaxis(out, 4, 1).reshape(batch, time, kv_heads * group, value_dim)


def split_chunks(x: Shaped[Array, "A X"], size: int) -> Shaped[Array, "n A C"]:
    """Splits the last axis into chunks of a size, padding the last chunk with zeros."""
    x = pad_last(x, 0, -x.shape[-1] % size)
    return jnp.moveaxis(x.reshape(len(x), -1, size), 1, 0)


def join_chunks(chunks: Shaped[Array, "n *rest C"]) -> Shaped[Array, "*rest X"]:
    """Concatenates chunks along the last axis."""
    joined = jnp.moveaxis(chunks, 0, -2)
    # A size of -1 fails for empty arrays.
    return joined.reshape(*joined.shape[:-2], joined.shape[-2] * joined.shape[-1])


def merge_heads(x: Shaped[Array, "G A C"]) -> Shaped[Array, "A X"]:
    """Concatenates the query heads of a key head along the last axis."""
    return x[0] if len(x) == 1 else jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)


def split_heads(x: Shaped[Array, "A X"], count: int) -> Shaped[Array, "G A C"]:
    """Inverts `merge_heads`."""
    return x[None] if count == 1 else jnp.moveaxis(x.reshape(x.shape[0], count, -1), 1, 0)
