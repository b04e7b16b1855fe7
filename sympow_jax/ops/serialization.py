"""Registers states with `jax.export`, so that exported functions that take or return them can be serialized."""

import jax

__all__ = ["serializable"]


def serializable[T](state: type[T]) -> type[T]:
    """Registers a class of states under its name; all of its fields are arrays or states."""
    jax.export.register_pytree_node_serialization(
        state,
        serialized_name=f"sympow_jax.{state.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
    )
    return state
