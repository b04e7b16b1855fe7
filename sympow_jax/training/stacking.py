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

__all__ = ["stack", "unstack"]

_BLOCKS, _STACKED = "blocks", "stacked_blocks"


def stack(tree: Any, period: int, join: Callable[[Sequence[Any]], Any] = jnp.stack) -> Any:
    """Returns a tree by layer in its stacked form; `join` makes a leaf of those of equal blocks."""

    def convert(blocks: dict[int, Any]) -> dict[int, Any]:
        equal = ([blocks[layer] for layer in range(first, len(blocks), period)] for first in range(period))
        return {
            first: jax.tree.map(lambda *leaves: join(leaves), *layers) for first, layers in enumerate(equal)
        }

    return _convert(tree, _BLOCKS, _STACKED, convert)


def unstack(tree: Any, take: Callable[[Any, int], Any] = lambda leaf, index: leaf[index]) -> Any:
    """Returns a stacked tree in its form by layer; `take` returns a period's part of a leaf."""

    def convert(blocks: dict[int, Any]) -> dict[int, Any]:
        periods = jax.tree.leaves(blocks)[0].shape[0]
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
