"""Ops and kernels on meshes: with Auto, Explicit and manual axes, and inside `jax.shard_map`.

An op is compiled once per plan and shapes. Within a call, no axis of the mesh is Explicit and all floats vary over the
same manual axes. Code inside is written as for one device, except that a loop carry must start as `zeros_like` of an
array whose values it will hold. Kernels are called by `per_device`, also where no op has made axes Auto.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sympow_jax.ops.promotion import default_rules

# Axes that a mesh may shard; all others are unsharded in the results of a call.
_DIVIDED = frozenset("BTSNK")
# Common names of mesh axes that shard the heads of a kernel; all others shard the batch.
_HEAD_AXES = ("model", "tensor", "heads")


def op[R](
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
        @functools.partial(jax.jit, static_argnums=0)
        @functools.wraps(f)
        def call(plan, **arrays):
            arrays = same_variation(arrays)
            meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
            mesh = next((mesh for mesh in meshes if not mesh.empty), None)
            with default_rules():
                if mesh is None or not mesh.explicit_axes:
                    return f(plan, **arrays)
                axes = _axes_of_letters(layouts, arrays)
                return jax.sharding.auto_axes(
                    lambda arrays: f(plan, **arrays),
                    axes=mesh.explicit_axes,
                    out_sharding=jax.tree.map(
                        lambda layout: jax.NamedSharding(mesh, _spec(layout, axes)), outputs(plan)
                    ),
                )(arrays)

        return call

    return compiled


def same_variation(tree):
    """Returns the tree with its floats varying over all manual mesh axes that any of its arrays varies over.

    Integers are unchanged: lengths and segment ids of rows are the same for all heads.
    """
    leaves = jax.tree.leaves(tree)
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))
    if not axes:
        return tree

    def cast(x):
        return varying_over(x, axes) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def varying_over(x, axes: frozenset[str]):
    """Returns x varying over these manual mesh axes in addition to its own."""
    missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


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


def _spec(layout: str, axes: Mapping[str, Any]) -> jax.sharding.PartitionSpec:
    """Returns the sharding of an array, given the mesh axes of each letter of its layout."""
    return jax.sharding.PartitionSpec(*(axes.get(letter) for letter in layout.split()))


def per_device(
    f: Callable[[dict], dict], arrays: dict, layouts: Mapping[str, str], outputs: tuple[str, ...]
) -> dict:
    """Applies f to each device's shard of the batch and the heads, since the partitioner cannot shard a kernel.

    It maps over the axes of the mesh in scope that are not yet manual; if there are none, it calls f directly. f maps a
    dictionary of arrays to a dictionary with the keys `outputs`.

    layouts: the leading axes of each input and output, of which B is the batch and K the heads.
    """
    arrays = {name: x for name, x in arrays.items() if x is not None}
    mesh = jax.sharding.get_abstract_mesh()
    free = [] if mesh.empty else [name for name in mesh.axis_names if name not in mesh.manual_axes]
    if not free:
        return f(arrays)
    # Query heads are a multiple of key heads.
    sizes = {
        letter: min(
            x.shape[layouts[name].split().index(letter)]
            for name, x in arrays.items()
            if letter in layouts[name]
        )
        for letter in "BK"
    }
    axes = {
        "B": _dividing(sizes["B"], [name for name in free if name not in _HEAD_AXES], mesh),
        "K": _dividing(sizes["K"], [name for name in free if name in _HEAD_AXES], mesh),
    }
    in_specs, out_specs = (
        {name: _spec(layouts[name], axes) for name in names} for names in (arrays, outputs)
    )
    mapped = jax.shard_map(
        f, in_specs=(in_specs,), out_specs=out_specs, axis_names=set(free), check_vma=False
    )
    if not (explicit := set(free) & set(mesh.explicit_axes)):
        return mapped(arrays)
    # Explicit axes are part of types: arguments must be resharded as the kernel needs them, and results and gradients
    # must be resharded like the arguments.
    given = _axes_of_letters({name: layouts[name] for name in arrays}, arrays)
    before = {name: _spec(layouts[name], given) for name in outputs}
    before |= {name: jax.typeof(x).sharding.spec for name, x in arrays.items()}
    arrays = {name: jax.sharding.reshard(x, _over(explicit, in_specs[name])) for name, x in arrays.items()}
    return {name: jax.sharding.reshard(x, before[name]) for name, x in mapped(arrays).items()}


def _over(names, spec):
    """Returns the spec restricted to the axes in `names`."""
    axes = ((part,) if isinstance(part, str) else part or () for part in spec)
    parts = (tuple(axis for axis in part if axis in names) or None for part in axes)
    return jax.sharding.PartitionSpec(*parts)


def _dividing(size, names, mesh):
    """Returns the leading axes whose product divides `size`.

    Arrays are replicated over the other axes.
    """
    chosen = []
    for name in names:
        if size % mesh.shape[name]:
            break
        size //= mesh.shape[name]
        chosen.append(name)
    return tuple(chosen) or None
