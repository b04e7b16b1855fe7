"""Checks of settings, whose errors name the setting."""

from typing import Any

import numpy as np

__all__ = ["dtype_name", "head_sizes", "require_at_least", "require_choice", "require_fraction"]


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


def require_at_least(least: float, **values: float) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def require_fraction(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}; it must lie in [0, 1)")


def head_sizes(
    *,
    width: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None,
    prefix: str = "",
    heads_name: str = "",
) -> tuple[int, int]:
    """Returns (kv_heads, head_dim), those that are None derived: `heads`, and `width // heads`.

    Errors call the settings `prefix` + "width" and so on; `heads_name` comes before "heads" in two of them.

    Raises:
      ValueError: a size is below 1, kv_heads does not divide heads, or heads does not divide a width that has to be
        divided.
    """
    query, key = f"{prefix}{heads_name}heads", f"{prefix}{heads_name}kv_heads"
    require_at_least(1, **{f"{prefix}width": width, query: heads})
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{query} is {heads} and {key} is {kv_heads}; kv_heads must divide heads")
    if head_dim is None:
        if width % heads:
            raise ValueError(
                f"{query} is {heads} and does not divide {prefix}width {width}; change one of them or set "
                f"{prefix}head_dim"
            )
        head_dim = width // heads
    require_at_least(1, **{f"{prefix}head_dim": head_dim})
    return kv_heads, head_dim


def dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype: "bfloat16" for `jnp.bfloat16` and for "bfloat16"."""
    return dtype if isinstance(dtype, str) else np.dtype(dtype).name
