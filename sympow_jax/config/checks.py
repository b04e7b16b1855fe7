"""Validation of settings, with errors that name the setting."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from sympow_jax import spelling

# Characters of a text that is compared with names, which takes a time in proportion to its length.
_NAME = 100


def require_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raises ValueError, which calls the setting `name`, unless its value is one of `choices`."""
    if value not in (choices := list(choices)):
        names = [str(choice) for choice in choices]
        near = spelling.remedy(str(value)[:_NAME], names, otherwise="")
        raise ValueError(
            f"{name} is {spelling.shown(value)}; it must be one of {', '.join(names)}{near and f'; {near}'}"
        )


def refuse(*contradictions: tuple[object, str]) -> None:
    """Raises ValueError with the text of the first contradiction that holds."""
    for holds, text in contradictions:
        if holds:
            raise ValueError(text)


def require_at_least(least: float, **values: float) -> None:
    """Raises ValueError for the first of the named values that is below `least`."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def head_sizes(
    *,
    width: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None,
    prefix: str = "",
    heads_name: str = "",
) -> tuple[int, int]:
    """Returns (kv_heads, head_dim); None defaults to `heads` and to `width // heads`, or raises ValueError.

    Errors name the settings `prefix` + "width" and so on; `heads_name` comes before "heads" in two of them.
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
    if isinstance(dtype, str):
        return dtype
    try:
        return np.dtype(dtype).name
    except TypeError:
        raise ValueError(f"dtype is {dtype!r}; it must be a dtype or its name, such as bfloat16") from None
