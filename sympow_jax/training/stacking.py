"""Trees of parameters with equal blocks, by layer or stacked.

By layer, `blocks` is a dict from layers to blocks. Checkpoints, weight files and models for evaluation have this form.
Stacked, `stacked_blocks` is one block, whose arrays have the layers as their first axis. An update that scans the
layers has this form. A tree may contain such parameters at any depth, as optimizer states do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["stack", "unstack"]

_BLOCKS, _STACKED = "blocks", "stacked_blocks"


def stack(tree: Any, join: Callable[[Sequence[Any]], Any] = jnp.stack) -> Any:
    """Returns a tree by layer in its stacked form; `join` makes a leaf of those of all layers."""

    def convert(blocks: dict[int, Any]) -> Any:
        first, *others = (blocks[layer] for layer in sorted(blocks))
        return jax.tree.map(lambda *leaves: join(leaves), first, *others)

    return _convert(tree, _BLOCKS, _STACKED, convert)


def unstack(tree: Any, take: Callable[[Any, int], Any] = lambda leaf, layer: leaf[layer]) -> Any:
    """Returns a stacked tree in its form by layer; `take` returns a layer's part of a leaf."""

    def convert(block: Any) -> dict[int, Any]:
        layers = jax.tree.leaves(block)[0].shape[0]
        return {
            layer: jax.tree.map(lambda leaf, layer=layer: take(leaf, layer), block) for layer in range(layers)
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
