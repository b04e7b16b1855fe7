"""Values of settings as text: Python literals, or plain strings."""

import ast
import inspect
import types
import typing
import warnings
from typing import Any

from sympow_jax import spelling

QUOTING = "If an item has commas, quote every item."
"""Help on tuples of text, in addition to that of their setting."""

_FORMS = {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT"}
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


def split_optional(annotation: Any) -> tuple[Any, bool]:
    """Returns a type without None, and whether it has None."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation, False
    kinds = typing.get_args(annotation)
    return next(kind for kind in kinds if kind is not types.NoneType), types.NoneType in kinds


def form(annotation: Any, name: str = "") -> str:
    """Returns the form of a value on the command line, without None, such as `INT,INT,...`, or of the word `name`."""
    kind = split_optional(annotation)[0]
    several = typing.get_origin(kind) is tuple
    name = name or _FORMS[typing.get_args(kind)[0] if several else kind]
    return f"{name},{name},..." if several else name


def read(name: str, text: str, annotation: Any) -> Any:
    """Reads a value of a type, as users write it.

    Numbers are Python literals, and text is as it stands, or a literal in quotes. A tuple is a literal, with or without
    brackets, or text that is split at its commas, around which spaces are left out. None is "none", and 1000 also 1e3.
    The type is bool, int, float, str, a tuple of one of these, or one of these or None. Errors call the setting `name`.
    """
    kind, optional = split_optional(annotation)
    if optional and text.strip().lower() == "none":
        return None
    several = typing.get_origin(kind) is tuple
    item = typing.get_args(kind)[0] if several else kind
    if item not in _FORMS:
        raise ValueError(
            f"{name} has the type {inspect.formatannotation(annotation)}, which cannot be read from a command line; "
            f"annotate it as {', '.join(x.__name__ for x in _FORMS)}, a tuple such as tuple[int, ...], or one of these "
            f"or None"
        )
    try:
        if not several:
            return _item(_literal(text), text, item)
        value = _literal(text)
        items = (value,) if isinstance(value, str) else value
        if isinstance(items, tuple | list) and all(isinstance(x, str) == (item is str) for x in items):
            return tuple(_item(x, str(x), item) for x in items)
        # Nothing before a comma, or after the last one, is no item; spaces alone are text.
        parts = text.split(",")
        alone = item is str and text and not parts[1:]
        return tuple(_item(_literal(x), x if alone else x.strip(), item) for x in parts if alone or x.strip())
    except (KeyError, OverflowError, ValueError):
        expected = form(annotation).replace("|", " or ") + (" or none" if optional else "")
        raise ValueError(f"{name} is {spelling.shown(text)}; it must be {expected}") from None


def written(value: Any) -> str:
    """Returns a value of a setting as it is written on the command line."""
    if isinstance(value, tuple):
        # Text that is read as itself needs no quotes.
        plain = all(
            not isinstance(x, str) or (x and x == x.strip() and x[0] not in "([" and not set(x) & set(",'\""))
            for x in value
        )
        return ",".join(map(str if plain else repr, value)) or "()"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _literal(text: str) -> Any:
    """Returns the value of a Python literal; None if the text is none."""
    with warnings.catch_warnings(action="ignore"):  # of syntax, in what is plain text
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None


def _item(value: Any, text: str, kind: type) -> Any:
    """Returns what a text, whose literal is `value`, is as a value of a type."""
    if kind is bool:
        return _TRUTH[text.strip().lower()]
    if kind is str:
        return value if isinstance(value, str) else text
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and int(value) != value):
        raise ValueError
    return kind(value)
