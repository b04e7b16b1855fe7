"""Compiled calls of an op: one compilation per plan and shapes, on any mesh and inside `jax.shard_map`.

Within a call, no axis of the mesh is Explicit and all floats vary over the same manual axes. Code inside is written as
for one device, except that a loop carry must start as `zeros_like` of an array whose values it will hold.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sympow_jax.ops.promotion import by_default_rules

__all__ = ["op", "same_variation", "varying_over"]

# Axes that a mesh may shard; all others are unsharded in the results of a call.
_DIVIDED = frozenset("BTSNK")


def op[**P, R](
    layouts: dict[str, Any], outputs: Callable[[Any], Any]
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Makes f(plan, **arrays) a function that is compiled once for each hashable plan and set of shapes.

    Args:
        layouts: the axes of the named arguments, as in "B T N D", or a tree of axes for `Tokens` and states. JAX
            decides the sharding of other arguments.
        outputs: maps the plan to a tree of the axes of each array that f returns.

    Outputs keep the sharding that the arguments have on axes of the same letter.
    """

    def compiled(f):
        f = by_default_rules(f)

        @functools.partial(jax.jit, static_argnums=0)
        @functools.wraps(f)
        def call(plan, **arrays):
            arrays = same_variation(arrays)
            meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
            mesh = next((mesh for mesh in meshes if not mesh.empty), None)
            if mesh is None or not mesh.explicit_axes:
                return f(plan, **arrays)
            axes = _axes_of_letters(layouts, arrays)

            def sharding(layout):
                spec = jax.sharding.PartitionSpec(*(axes.get(letter) for letter in layout.split()))
                return jax.NamedSharding(mesh, spec)

            return jax.sharding.auto_axes(
                lambda arrays: f(plan, **arrays),
                axes=mesh.explicit_axes,
                out_sharding=jax.tree.map(sharding, outputs(plan)),
            )(arrays)

        return call

    return compiled


def same_variation(tree):
    """Returns the tree with its floats varying over all manual mesh axes that any of its arrays varies over.

    Integers are unchanged: lengths and segment ids of rows are the same for all heads.
    """
    axes = frozenset().union(*map(_varying, jax.tree.leaves(tree)))
    if not axes:
        return tree

    def cast(x):
        return varying_over(x, axes) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def varying_over(x, axes: frozenset[str]):
    """Returns x varying over these manual mesh axes in addition to its own."""
    missing = tuple(sorted(axes - _varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _varying(x):
    """Returns the manual mesh axes that x varies over."""
    return jax.typeof(x).manual_axis_type.varying


def _axes_of_letters(layouts, arrays) -> dict[str, Any]:
    """Returns the mesh axes over which the arguments are sharded, by letter of their layouts."""
    found: dict[str, Any] = {}
    for name, layout in layouts.items():
        leaves = jax.tree.leaves(arrays.get(name), is_leaf=lambda x: x is None)
        for x, letters in zip(leaves, jax.tree.leaves(layout)):
            spec = () if x is None else jax.typeof(x).sharding.spec
            for letter, axes in zip(letters.split(), spec):
                if axes is not None and letter in _DIVIDED:
                    found.setdefault(letter, axes)
    return found
