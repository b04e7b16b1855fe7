"""How arrays are divided over the axes of the mesh in scope; without a mesh nothing here does anything.

| axis | what it divides |
|---|---|
| `data` | rows of a batch |
| `fsdp` | rows of a batch; parameters, which are gathered where they are used |
| `context` | time |
| `tensor` | heads, hidden units of feed-forward layers, the vocabulary |

Only axes of `AxisType.Auto` count: the others are a caller's own affair.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from sympow_jax.array_types import Array, Shaped

__all__ = [
    "AXES",
    "BATCH",
    "COLUMNS",
    "CONTEXT",
    "DATA",
    "FSDP",
    "HEADS",
    "REPLICATED",
    "ROWS",
    "TENSOR",
    "TOKENS",
    "constrain",
    "dividing",
    "fit",
    "fitted",
    "is_divided",
    "over_devices",
    "size",
]

Spec = jax.sharding.PartitionSpec

# In the order of the mesh: neighbours along the last ones exchange the most.
DATA, FSDP, CONTEXT, TENSOR = AXES = ("data", "fsdp", "context", "tensor")
# The axes that rows of a batch are divided over.
BATCH = (DATA, FSDP)
# Of activations [B, T, ...] and of those whose last axis, or heads, are divided too.
TOKENS, HEADS = Spec(BATCH, CONTEXT), Spec(BATCH, CONTEXT, TENSOR)
# Of matrices [size_in, size_out] whose results or whose arguments are divided over `tensor`.
COLUMNS, ROWS = Spec(FSDP, TENSOR), Spec(TENSOR, FSDP)
REPLICATED = Spec()


def is_divided() -> bool:
    """Whether there is a mesh in scope with more than one device along its axes."""
    return bool(_sizes())


def size(axis: str) -> int:
    """The devices along an axis of the mesh in scope; 1 where there is none."""
    return _sizes().get(axis, 1)


def constrain(x: Shaped[Array, "..."], spec: Spec) -> Shaped[Array, "..."]:
    """x, divided over the mesh in scope as `spec` says."""
    return jax.lax.with_sharding_constraint(x, fit(spec, x.shape)) if _sizes() else x


def fit(spec: Spec, shape: tuple[int, ...]) -> Spec:
    """`fitted` to the mesh in scope."""
    return fitted(spec, shape, _sizes())


def fitted(spec: Spec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Spec:
    """The spec without axes that a mesh of these sizes lacks or that do not divide their dimension."""
    parts = []
    for length, entry in zip(shape, spec):
        taken = []
        for axis in _axes(entry):
            if sizes.get(axis, 1) > 1 and length % sizes[axis] == 0:
                taken.append(axis)
                length //= sizes[axis]
        parts.append(tuple(taken) if len(taken) > 1 else taken[0] if taken else None)
    return Spec(*parts)


def dividing(spec: Spec, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The axes of the mesh in scope over which an array of this shape and spec is divided."""
    return tuple(axis for entry in fit(spec, shape) for axis in _axes(entry))


def over_devices(f: Callable[..., Any], arguments: tuple[Any, ...], specs: tuple[Any, ...], out: Any) -> Any:
    """f of each device's share of the arguments, which `specs` divide, as `out` does the results; f without a mesh.

    `specs` has a spec for each array or tree of arrays. Within f all axes are manual: what it needs of other devices
    it has to ask for by the names of axes.
    """
    if not (sizes := _sizes()):
        return f(*arguments)
    in_specs = tuple(
        jax.tree.map(lambda x, spec=spec: fitted(spec, x.shape, sizes), argument)
        for argument, spec in zip(arguments, specs)
    )
    mapped = jax.shard_map(f, in_specs=in_specs, out_specs=out, axis_names=set(sizes), check_vma=False)
    return mapped(*arguments)


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def _sizes() -> dict[str, int]:
    """The sizes above 1 of this module's axes in the mesh in scope."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return {}
    auto = jax.sharding.AxisType.Auto
    return {
        name: mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types)
        if name in AXES and kind == auto and mesh.shape[name] > 1
    }
