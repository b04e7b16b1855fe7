"""Settings as fields of dataclasses, with their help and choices as metadata.

`--help`, the reference page of settings and the checks of choices all read the same metadata.
"""

import dataclasses
import enum
import types
import typing
from collections.abc import Collection
from typing import Any

from sympow_jax.config import _checks as checks

__all__ = [
    "Group",
    "Occasion",
    "Setting",
    "about",
    "check_choices",
    "groups",
    "may_differ",
    "split_optional",
    "written",
]


def about(help: str, *, choices: Collection[str] = ()) -> dict[str, Any]:
    """Returns the metadata of a setting, for `dataclasses.field(metadata=...)`.

    Args:
        help: a noun phrase that names the setting, and further sentences.
        choices: valid values; empty if there is no list of them. Those of a table include rows added to it later.
    """
    return {"help": help, "choices": choices}


class Occasion(enum.Enum):
    """Occasion on which the settings of two runs, or of two starts of a run, are compared."""

    RESUME = enum.auto()
    """A run is resumed."""
    INITIAL_DECODER = enum.auto()
    """A decoder starts from the parameters of another (`task.initial_run`)."""
    INITIAL_ENCODER = enum.auto()
    """An encoder starts from the parameters of another."""
    HELDOUT_ROWS = enum.auto()
    """Metrics on the same held-out rows are compared."""
    HELDOUT_DOCUMENTS = enum.auto()
    """Losses by position of the same held-out documents are compared."""
    SAVED_STATE = enum.auto()
    """A state file is read by a model."""


def may_differ(*occasions: Occasion) -> dict[str, Any]:
    """Returns the metadata of a dataclass field that may differ on these occasions, with all fields below it."""
    return {"may_differ": frozenset(occasions)}


def check_choices(node: Any, prefix: str) -> None:
    """Raises ValueError if a field of a dataclass is not one of its choices.

    Args:
        node: instance of a dataclass.
        prefix: name of the dataclass in error messages, before a dot and the field.
    """
    for field in dataclasses.fields(node):
        choices, value = field.metadata.get("choices"), getattr(node, field.name)
        if choices and not (value is None and field.default is None):
            checks.require_choice(f"{prefix}.{field.name}", value, choices)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field of a dataclass of settings.

    Attributes:
        path: names from the outermost dataclass to the field, with dots in between.
        annotation: type of the field.
        default: value of the field if none is given; `dataclasses.MISSING` if one must be given.
        help: as in `about`.
        choices: as in `about`.
        resumable: whether it may differ when a run is resumed.
    """

    path: str
    annotation: Any
    default: Any
    help: str
    choices: tuple[str, ...]
    resumable: bool

    @property
    def form(self) -> str:
        """Form of a value on the command line, such as `INT`, `true|false` or `INT,INT,...`."""
        kind = split_optional(self.annotation)[0]
        several = typing.get_origin(kind) is tuple
        kind = typing.get_args(kind)[0] if several else kind
        name = "NAME" if self.choices else _FORMS[kind]
        return f"{name},{name},..." if several else name

    @property
    def optional(self) -> bool:
        """True if the value may be none."""
        return split_optional(self.annotation)[1]


_FORMS = {bool: "true|false", int: "INT", float: "FLOAT", str: "TEXT"}


@dataclasses.dataclass(frozen=True)
class Group:
    """A dataclass of settings, without the dataclasses inside.

    Attributes:
        path: names from the outermost dataclass to this one, with dots in between; empty for the outermost.
        kind: the class.
        settings: its fields.
    """

    path: str
    kind: type
    settings: tuple[Setting, ...]


def groups(kind: Any, path: str = "", *, resumable: bool = False) -> list[Group]:
    """Returns a dataclass of settings and the dataclasses inside, in order, except those without settings.

    Args:
        kind: the dataclass.
        path: path of the dataclass; empty for the outermost.
        resumable: whether all its fields may differ when a run is resumed.
    """
    hints = typing.get_type_hints(kind)
    settings: list[Setting] = []
    inner: list[Group] = []
    for field in dataclasses.fields(kind):
        below = f"{path}.{field.name}".lstrip(".")
        may_change = resumable or Occasion.RESUME in field.metadata.get("may_differ", ())
        if dataclasses.is_dataclass(hint := hints[field.name]):
            inner += groups(hint, below, resumable=may_change)
        else:
            help, choices = field.metadata["help"], field.metadata["choices"]
            settings.append(Setting(below, hint, field.default, help, tuple(choices), may_change))
    return ([Group(path, kind, tuple(settings))] if settings else []) + inner


def split_optional(annotation: Any) -> tuple[Any, bool]:
    """Returns a type without None, and whether it has None."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return annotation, False
    kinds = typing.get_args(annotation)
    return next(kind for kind in kinds if kind is not types.NoneType), types.NoneType in kinds


def written(value: Any) -> str:
    """Returns a value of a setting as it is written on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(written, value)) or "()"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
