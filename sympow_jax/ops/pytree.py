"""Base class of states."""

import dataclasses
import typing

import jax


@typing.dataclass_transform(frozen_default=True)
class State:
    """A frozen dataclass of arrays and states, which is a pytree; subclasses only declare their fields.

    Functions that take or return one can be exported with `jax.export`, where it has the name of its class.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=f"sympow_jax.{cls.__name__}",
            serialize_auxdata=lambda _: b"",
            deserialize_auxdata=lambda _: (),
        )

    @property
    def nbytes(self) -> int:
        """Number of bytes stored."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


def difference(found: State | None, needed: State | None) -> str | None:
    """Returns in words which array of a state does not have the needed shape and dtype; None if all have."""
    arrays, wanted = (
        {
            jax.tree_util.keystr(path): f"{leaf.dtype} {list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        }
        for state in (found, needed)
    )
    for name in wanted | arrays:
        if arrays.get(name) != wanted.get(name):
            return f"{name} is {arrays.get(name, 'absent')}, not {wanted.get(name, 'absent')}"
    return None
