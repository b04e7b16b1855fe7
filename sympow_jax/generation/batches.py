"""Copies, extracts and inserts rows of a running batch.

The functions take any pytree whose leaves have the batch as their first axis: states, logits, tokens. On a mesh with
Explicit axes, results keep the sharding of the batch, except that a single row is on all devices along the axes that
shard rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Int
from sympow_jax.layers import partitioning
from sympow_jax.ops import arguments


def fork[Tree](state: Tree, copies: int) -> Tree:
    """Returns every row repeated `copies` times, for several continuations of one context.

    Copies of a row are adjacent.

    Raises:
        ValueError: `copies` is below 1.
    """
    copies = arguments.check_integer("copies", copies, 1)
    return jax.tree.map(lambda x: _on_mesh(lambda x: jnp.repeat(x, copies, axis=0), x), state)


def take[Tree](state: Tree, slot: int | Int[Array, ""]) -> Tree:
    """Returns the row of a slot as a batch of one.

    Raises:
        ValueError: there is no such slot.
    """
    _require_slot(state, slot)

    def row(x, slot):
        return jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=0)

    return jax.tree.map(lambda x: _on_mesh(row, x, jnp.asarray(slot), is_row=True), state)


def insert[Tree](state: Tree, slot: int | Int[Array, ""], row: Tree) -> Tree:
    """Returns the batch with the content of a slot replaced by `row`, a batch of one.

    To remove a row, insert one of `init_state`.

    Raises:
        ValueError: there is no such slot, or the row is a state of another model or of another kind. KV caches in a
            batch must have the same capacity. `fold` converts a KV cache to a recurrent state.
    """
    _require_slot(state, slot)
    slots, rows = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (state, row))
    for path in (*slots, *rows):
        shapes = [
            (1, *tree[path].shape[1:]) if tree is slots else tree[path].shape
            for tree in (slots, rows)
            if path in tree
        ]
        if len(shapes) < 2 or shapes[0] != shapes[1] or slots[path].dtype != rows[path].dtype:
            raise ValueError(
                f"the row does not fit the batch: {jax.tree_util.keystr(path)} differs; both must be states of one "
                f"model, made with one max_length or folded, and the row a batch of one"
            )

    def update(batch, x, slot):
        return jax.lax.dynamic_update_slice_in_dim(batch, x, slot, axis=0)

    return jax.tree.map(lambda batch, x: _on_mesh(update, batch, x, jnp.asarray(slot)), state, row)


def _require_slot(state, slot) -> None:
    slots = jax.tree.leaves(state)[0].shape[0]
    # A traced slot cannot be checked; XLA clamps it to the nearest one.
    if not isinstance(slot, jax.core.Tracer) and arguments.check_integer("slot", slot) not in range(slots):
        raise ValueError(f"slot is {slot}; the batch has slots 0 to {slots - 1}")


def _on_mesh(f: Callable[..., Array], *arrays: Array, is_row: bool = False) -> Array:
    """Returns f of the arrays, sharded like the first; rows are not sharded if the result is one row."""
    if not partitioning.is_explicit(*arrays):
        return f(*arrays)
    rows, *rest = partitioning.explicit_spec(arrays[0])
    sharding = partitioning.explicit_sharding((() if is_row else rows, *rest), *arrays)
    return jax.sharding.auto_axes(f, out_sharding=sharding)(*arrays)
