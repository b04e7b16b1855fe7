"""Trees of parameters with blocks that repeat after a period of layers, by layer or stacked.

By layer, `blocks` is a dict from layers to blocks. Checkpoints, weight files and models for evaluation have this form.
Stacked, `stacked_blocks` is a dict from the layers of one period to blocks, whose arrays have the periods as their
first axis. An update that scans the layers has this form. A tree may contain such parameters at any depth, as optimizer
states do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["is_stacked", "stack", "unstack"]

_BLOCKS, _STACKED = "blocks", "stacked_blocks"


def is_stacked(path: tuple[Any, ...]) -> bool:
    """Returns whether the leaf at a path of a tree has an axis of periods in front."""
    return jax.tree_util.DictKey(_STACKED) in path


def stack(tree: Any, period: int, join: Callable[[Sequence[Any]], Any] = jnp.stack) -> Any:
    """Returns a tree by layer in its stacked form.

    Args:
        tree: tree by layer.
        period: number of layers after which blocks repeat.
        join: makes one leaf of those of the layers i, i + period, i + 2 period, ...
    """

    def convert(blocks: dict[int, Any]) -> dict[int, Any]:
        same_place = (
            [blocks[layer] for layer in range(first, len(blocks), period)] for first in range(period)
        )
        return {
            first: jax.tree.map(lambda *leaves: join(leaves), *layers)
            for first, layers in enumerate(same_place)
        }

    return _convert(tree, _BLOCKS, _STACKED, convert)


def unstack(tree: Any, take: Callable[[Any, int], Any] = lambda leaf, index: leaf[index]) -> Any:
    """Returns a stacked tree in its form by layer; `take(leaf, index)` returns the leaf of period `index`."""
    # Of the whole tree, because the blocks of an optimizer state may have no arrays.
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    periods = next((leaf.shape[0] for path, leaf in leaves if is_stacked(path)), 0)

    def convert(blocks: dict[int, Any]) -> dict[int, Any]:
        return {
            index * len(blocks) + first: jax.tree.map(
                lambda leaf, index=index: take(leaf, index), blocks[first]
            )
            for index in range(periods)
            for first in range(len(blocks))
        }

    return _convert(tree, _STACKED, _BLOCKS, convert)


def _convert(tree: Any, name: str, new_name: str, convert: Callable[[Any], Any]) -> Any:
    """Returns the tree with `convert(params[name])` as `params[new_name]` in every dict `params` that has the name."""

    def is_params(node: Any) -> bool:
        return isinstance(node, dict) and name in node

    def rename(node: Any) -> Any:
        if not is_params(node):
            return node
        others = {key: child for key, child in node.items() if key != name}
        return others | {new_name: convert(node[name])}

    return jax.tree.map(rename, tree, is_leaf=is_params)
