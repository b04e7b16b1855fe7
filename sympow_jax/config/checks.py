"""Validation of settings, with errors that name the setting."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from sympow_jax import spelling

__all__ = [
    "dtype_name",
    "head_sizes",
    "require_at_least",
    "require_choice",
    "require_fraction",
    "require_positive",
    "require_representable",
    "require_seed",
]

# JAX draws keys from 32 bits of a seed, so larger seeds would repeat smaller ones.
_SEEDS = 2**32
# Largest float of the type that settings have in a run, and a positive one that is not rounded to 0 there.
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = 1e-30
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


def require_at_least(least: float, **values: float) -> None:
    """Raises ValueError for the first of the named values that is below `least`."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def require_positive(**values: float) -> None:
    """Raises ValueError for the first of the named values that is not above 0, or that float32 may round to 0."""
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{name} is {value}; it must be positive")
        if value < _SMALLEST:
            raise ValueError(
                f"{name} is {value}; it must be at least {_SMALLEST}, or float32 may round it to 0"
            )


def require_fraction(**values: float) -> None:
    """Raises ValueError for the first of the named values that is outside [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}; it must lie in [0, 1)")


def require_seed(**values: int) -> None:
    """Raises ValueError for the first of the named seeds that is outside [0, 2^32)."""
    for name, value in values.items():
        if not 0 <= value < _SEEDS:
            raise ValueError(f"{name} is {value}; it must be at least 0 and below {_SEEDS}")


def require_representable(name: str, value: object) -> None:
    """Raises ValueError for a float that is infinite or NaN in float32, or an int of more than 64 bits."""
    if isinstance(value, float) and not abs(value) <= _LARGEST:
        raise ValueError(
            f"{name} is {value}; it must be a finite number, of at most {_LARGEST:.1e} in float32"
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        # Python refuses to print the longest of them.
        raise ValueError(f"{name} is an integer of {value.bit_length()} bits; it must fit in 64")


def head_sizes(
    *,
    width: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int | None,
    prefix: str = "",
    heads_name: str = "",
) -> tuple[int, int]:
    """Returns (kv_heads, head_dim); None defaults to `heads` and to `width // heads`.

    Errors name the settings `prefix` + "width" and so on; `heads_name` comes before "heads" in two of them.

    Raises:
        ValueError: a size is below 1, kv_heads does not divide heads, or head_dim is None and heads does not divide
            width.
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
