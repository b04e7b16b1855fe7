"""Copies, extracts and inserts rows of a running batch.

The functions take any pytree whose leaves have the batch as their first axis: states, logits, tokens.
"""

import jax
import jax.numpy as jnp

from sympow_jax.array_types import Array, Int

__all__ = ["fork", "insert", "take"]


def fork[Tree](state: Tree, copies: int) -> Tree:
    """Returns every row repeated `copies` times, for several continuations of one context.

    Copies of a row are adjacent.

    Raises:
        ValueError: `copies` is below 1.
    """
    if copies < 1:
        raise ValueError(f"copies is {copies}; it must be at least 1")
    return jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), state)


def take[Tree](state: Tree, slot: int | Int[Array, ""]) -> Tree:
    """Returns the row of a slot as a batch of one.

    Raises:
        ValueError: there is no such slot.
    """
    _require_slot(state, slot)
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=0), state)


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
    return jax.tree.map(
        lambda batch, x: jax.lax.dynamic_update_slice_in_dim(batch, x, slot, axis=0), state, row
    )


def _require_slot(state, slot) -> None:
    slots = jax.tree.leaves(state)[0].shape[0]
    # A traced slot cannot be checked; XLA clamps it to the nearest one.
    if not isinstance(slot, jax.core.Tracer) and not 0 <= int(slot) < slots:
        raise ValueError(f"slot is {int(slot)}; the batch has slots 0 to {slots - 1}")
