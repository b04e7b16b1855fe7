"""Sharding of arrays over the axes of the mesh in scope; without a mesh, nothing is sharded.

| axis | shards |
|---|---|
| `data` | rows of a batch |
| `fsdp` | rows of a batch; parameters, which are gathered where they are used |
| `context` | time |
| `tensor` | heads, hidden units of feed-forward layers, the vocabulary |

These names apply to axes of `AxisType.Auto` only. Along axes of `AxisType.Explicit`, whatever their names, arrays keep
the shardings of their types (`is_explicit`, `explicit_spec`, `reshard`).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.core import spmd

from sympow_jax.array_types import Array, Shaped

Spec = jax.sharding.PartitionSpec

# In the order of the mesh. The last axes communicate the most, so they have the closest devices.
DATA, FSDP, CONTEXT, TENSOR = AXES = ("data", "fsdp", "context", "tensor")
# Axes that shard the rows of a batch.
BATCH = (DATA, FSDP)
# Specs of activations [B, T, ...], and of those whose last axis, or heads, are sharded too.
TOKENS, HEADS = Spec(BATCH, CONTEXT), Spec(BATCH, CONTEXT, TENSOR)
# Specs of matrices [size_in, size_out] whose results (COLUMNS) or inputs (ROWS) are sharded over `tensor`.
COLUMNS, ROWS = Spec(FSDP, TENSOR), Spec(TENSOR, FSDP)
REPLICATED = Spec()

# Logical names of parameter axes, and the mesh axes that a run shards them over.
RULES = (
    ("embed", FSDP),  # the width of the residual stream
    ("heads", TENSOR),  # query heads and their channels
    ("kv_heads", TENSOR),  # key/value heads and their channels
    ("gates", TENSOR),  # decays, rotation rates, write strengths and gates, a few per head
    ("mlp", TENSOR),  # hidden units of feed-forward layers
    ("vocab", TENSOR),
    ("position", TENSOR),  # rows of learned absolute positions
)


def named(initializer: Callable[..., Any], names: tuple[str | None, ...]) -> Callable[..., Any]:
    """Returns an initializer of parameters with logical axis names, as in `nnx.with_partitioning`.

    `nnx.get_partition_spec` and `nnx.get_named_sharding` read the names, under `nnx.logical_axis_rules` that map them
    to mesh axes. Parameters that are created with such rules and a mesh in scope are sharded on creation.
    """
    # Without rules, these names are not mesh axes, and Flax would fail to shard by them.
    eager = bool(spmd.get_logical_axis_rules()) and not jax.sharding.get_abstract_mesh().empty
    return nnx.with_partitioning(initializer, names, eager_sharding=eager)


def is_divided() -> bool:
    """Returns whether a mesh is in scope with more than one device along the axes of this module."""
    return bool(_sizes())


def size(axis: str) -> int:
    """Returns the size of an axis of the mesh in scope; 1 without a mesh."""
    return _sizes().get(axis, 1)


def constrain(x: Shaped[Array, "..."], spec: Spec) -> Shaped[Array, "..."]:
    """Constrains x to be sharded over the mesh in scope by `spec`."""
    return jax.lax.with_sharding_constraint(x, fit(spec, x.shape)) if _sizes() else x


def fit(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int] | None = None) -> Spec:
    """Returns the spec without axes that are missing in a mesh or do not divide their dimension.

    `sizes` are those of the mesh's axes; if None, of the mesh in scope.
    """
    sizes, parts = _sizes() if sizes is None else sizes, []
    for length, entry in zip(shape, spec):
        names = []
        for axis in _axes(entry):
            if sizes.get(axis, 1) > 1 and length % sizes[axis] == 0:
                names.append(axis)
                length //= sizes[axis]
        parts.append(tuple(names) if len(names) > 1 else names[0] if names else None)
    return Spec(*parts)


def dividing(spec: Spec, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Returns the axes of the mesh in scope that shard an array of this shape and spec."""
    return tuple(axis for entry in fit(spec, shape) for axis in _axes(entry))


def over_devices(f: Callable[..., Any], arguments: tuple[Any, ...], specs: tuple[Any, ...], out: Any) -> Any:
    """Calls f on each device's shards of the arguments; without a mesh, calls f directly.

    Args:
        f: function of the shards. All axes are manual within it, so it needs collectives over named axes for data of
            other devices.
        arguments: arrays or trees of arrays.
        specs: for each argument, a spec of all its arrays or a tree of specs.
        out: specs of the results.
    """
    if not (sizes := _sizes()):
        return f(*arguments)
    in_specs = tuple(
        jax.tree.map(lambda x, spec: fit(spec, x.shape, sizes), argument, jax.tree.broadcast(spec, argument))
        for argument, spec in zip(arguments, specs)
    )
    mapped = jax.shard_map(f, in_specs=in_specs, out_specs=out, axis_names=set(sizes), check_vma=False)
    return mapped(*arguments)


def is_explicit(*arrays: Shaped[Array, "..."]) -> bool:
    """Returns whether any of the arrays is on a mesh with Explicit axes, which need not be in scope."""
    explicit = jax.sharding.AxisType.Explicit
    return any(explicit in jax.typeof(x).sharding.mesh.axis_types for x in arrays)


def explicit_spec(x: Shaped[Array, "..."]) -> tuple[tuple[str, ...], ...]:
    """Returns the Explicit axes that shard each dimension of x, as its type says."""
    spec = jax.typeof(x).sharding.spec
    return tuple(_axes(entry) for entry in (*spec, *[None] * (x.ndim - len(spec))))


def explicit_axes(axes: tuple[str, ...], length: int, *arrays: Shaped[Array, "..."]) -> tuple[str, ...]:
    """Returns the axes if, on the mesh of the arrays, their product divides `length`, or else none."""
    sizes = _explicit_mesh(*arrays).shape
    return axes if length % math.prod(sizes[axis] for axis in axes) == 0 else ()


def reshard(
    x: Shaped[Array, "..."], spec: tuple[tuple[str, ...], ...], *others: Shaped[Array, "..."]
) -> Shaped[Array, "..."]:
    """Returns x sharded by these Explicit axes per dimension, on the mesh of x or of one of `others`."""
    return jax.sharding.reshard(x, explicit_sharding(spec, x, *others))


def gather_time(x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
    """Gathers time on a mesh with Explicit axes, because attention needs all of it."""
    if not is_explicit(x):
        return x
    rows, _, *rest = explicit_spec(x)
    return reshard(x, (rows, (), *rest))


def explicit_sharding(
    spec: tuple[tuple[str, ...], ...], *arrays: Shaped[Array, "..."]
) -> jax.sharding.NamedSharding:
    """Returns the sharding with these axes on the first mesh that any of the arrays is on."""
    return jax.sharding.NamedSharding(_explicit_mesh(*arrays), Spec(*(entry or None for entry in spec)))


def _explicit_mesh(*arrays: Any) -> Any:
    return next(mesh for x in arrays if not (mesh := jax.typeof(x).sharding.mesh).empty)


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _sizes() -> dict[str, int]:
    """Returns the sizes above 1 of this module's axes in the mesh in scope."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    auto = jax.sharding.AxisType.Auto
    return {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types)
        if name in AXES and kind == auto and mesh.shape[name] > 1
    }
