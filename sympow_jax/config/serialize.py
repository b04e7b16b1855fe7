"""Settings as flat mappings and back, their differences, and the JSON files that hold them."""

import contextlib
import dataclasses
import json
import os
import pathlib
import stat
import typing
from collections.abc import Mapping
from typing import Any

from sympow_jax import spelling
from sympow_jax.config import fields

# Bytes of a file of JSON. An index of the largest published models has 20 MB.
_BYTES = 1 << 26


def flatten(values: Any, occasion: fields.Occasion | None = None, *, prefix: str = "") -> dict[str, Any]:
    """Flattens nested dataclasses and mappings to one mapping by dotted path, which begins with `prefix`.

    Where a setting is derived from others, this is its value, so that settings with the same effect are equal. With an
    `occasion`, the fields of dataclasses that may differ on it are left out.
    """
    if isinstance(values, Mapping):
        items = dict(values)
    else:
        items = {
            field.name: getattr(values, field.metadata.get("derived") or field.name)
            for field in dataclasses.fields(values)
            if occasion not in field.metadata.get("may_differ", ())
        }
    flat: dict[str, Any] = {}
    for name, value in items.items():
        if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
            flat |= flatten(value, occasion, prefix=f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Describes the values that differ between two flat mappings; empty if none."""
    changes = [
        f"{path} was {spelling.shown(before.get(path))} and is {spelling.shown(after.get(path))}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]
    return spelling.listed(changes)


def from_dict(kind: type, values: Mapping[str, Any]) -> Any:
    """Builds the settings dataclass `kind` from the output of `dataclasses.asdict`, which may come from JSON.

    Raises ValueError if this version does not have a field, or if one without a default is missing.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{kind.__name__} is {spelling.shown(values)}; it must have fields")
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        message = f"{kind.__name__} has no {spelling.listed(unknown)}; it has {', '.join(hints)}"
        raise ValueError(spelling.cut(message, spelling.LINE))
    needed = [x for x in dataclasses.fields(kind) if x.default is x.default_factory is dataclasses.MISSING]
    if missing := [field.name for field in needed if field.name not in values]:
        raise ValueError(f"{kind.__name__} lacks {', '.join(missing)}")
    built = {
        name: from_dict(hints[name], value) if dataclasses.is_dataclass(hints[name]) else value
        for name, value in values.items()
    }
    try:
        return kind(**built)
    except ValueError as error:
        raise ValueError(spelling.cut(str(error), spelling.LINE)) from error


def parse_object(text: str) -> dict[str, Any]:
    """Returns the object that a text has as JSON; raises ValueError if it is none, or nested too deeply."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {spelling.cut(str(error), 120)}") from error
    except RecursionError:
        raise ValueError("its JSON has too many levels") from None
    if not isinstance(value, dict):
        raise ValueError("it has no JSON object, which begins with {")
    return value


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Returns the JSON object in a file; raises ValueError if there is none, or in more than 64 MiB, or OSError."""
    require_file(path)
    try:
        if path.stat().st_size > _BYTES:
            raise ValueError(f"it has more than {_BYTES:,} bytes, unlike any JSON of settings or metadata")
        return parse_object(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def require_file(path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a pipe, a socket or a device, whose content may never come, or never end."""
    with contextlib.suppress(OSError):  # which opening the file raises again
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ValueError(f"{path} is a pipe or a device; put a file in its place, or remove it")
