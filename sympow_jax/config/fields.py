"""Settings as fields of dataclasses, with their help and choices as metadata.

`--help`, the reference page of settings and the checks of choices all read the same metadata.
"""

import dataclasses
import enum
import functools
import operator
import typing
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from sympow_jax import spelling
from sympow_jax.config import checks, literals

SEEDS = 2**32
"""Number of seeds. JAX draws keys from 32 bits of a seed, so larger ones would repeat smaller ones."""

TINY = 1e-30
"""Least value of a setting that must be positive; float32 may round smaller ones to 0."""

# Largest float of the type that settings have in a run.
_LARGEST = float(np.finfo(np.float32).max)

# Words and conditions of bounds.
_BOUNDS = {
    "least": ("at least", operator.ge),
    "most": ("at most", operator.le),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
}


class Occasion(enum.Enum):
    """Occasion on which the settings of two runs, or of two starts of a run, are compared."""

    RESUME = enum.auto()  # a run is resumed
    INITIAL_DECODER = enum.auto()  # a decoder starts from the parameters of another (`task.initial_run`)
    INITIAL_ENCODER = enum.auto()  # an encoder starts from the parameters of another
    HELDOUT_ROWS = enum.auto()  # metrics on the same held-out rows are compared
    HELDOUT_DOCUMENTS = enum.auto()  # losses by position of the same held-out documents are compared
    SAVED_STATE = enum.auto()  # a state file is read by a model


def setting(
    default: Any,
    help: str,
    *,
    choices: Collection[str] = (),
    derived: str = "",
    may_differ: Iterable[Occasion] = (),
    **bounds: float,
) -> Any:
    """Returns a dataclass field that is a setting.

    Args:
        default: its default; `dataclasses.MISSING` if every config sets it.
        help: a noun phrase that names the setting, and further sentences.
        choices: valid values; empty if there is no list of them. Those of a table include rows added to it later.
        derived: name of the property that has the value, where None means one derived from other settings.
        may_differ: occasions on which it may differ.
        **bounds: `least`, `most`, `above` or `below`: bounds of the number, or of each number of a tuple.
    """
    metadata = {"help": help, "choices": choices, "derived": derived, "may_differ": tuple(may_differ)}
    return dataclasses.field(default=default, metadata=metadata | {"bounds": bounds})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def validate(node: Any, prefix: str = "") -> None:
    """Raises ValueError if a field of a dataclass has the wrong type, or a value outside its choices.

    A float must be finite, and an int must fit in 64 bits. An int may stand for a float. A list may stand for a tuple,
    and a number of NumPy for one of Python; both are replaced. Errors name fields after the `prefix` and a dot.
    """
    of_node: Any = type(node)
    hints = _hints(of_node)
    for field in dataclasses.fields(node):
        name = f"{prefix}.{field.name}".lstrip(".")
        value = getattr(node, field.name)
        if isinstance(value, (list, np.integer, np.floating)):
            value = tuple(value) if isinstance(value, list) else value.item()
            object.__setattr__(node, field.name, value)

        # The type.
        kind, optional = literals.split_optional(hints[field.name])
        if not _is_of(value, kind) and not (optional and value is None):
            several = typing.get_origin(kind) is tuple
            item = typing.get_args(kind)[0] if several else kind
            expected = f"a tuple of {item.__name__}" if several else _with_article(item)
            remedy = ""
            if several and _is_of(value, item):
                remedy = f": write ({spelling.shown(value)},)"
            elif kind is int and isinstance(value, float) and value.is_integer():
                remedy = f": write {int(value):_}"
            raise ValueError(
                f"{name} is {spelling.shown(value)}, {_with_article(type(value))}; it must be {expected}"
                f"{' or None' if optional else ''}{remedy}"
            )

        # The bounds of numbers.
        bounds = field.metadata.get("bounds", {})
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not abs(number) <= _LARGEST:
                raise ValueError(
                    f"{name} is {number}; it must be a finite number, of at most {_LARGEST:.1e} in float32"
                )
            if isinstance(number, int) and not -(2**63) <= number < 2**63:
                # Python refuses to print the longest of them.
                raise ValueError(f"{name} is an integer of {number.bit_length()} bits; it must fit in 64")
            if isinstance(number, int | float) and any(
                not _BOUNDS[bound][1](number, limit) for bound, limit in bounds.items()
            ):
                words = " and ".join(f"{_BOUNDS[bound][0]} {limit}" for bound, limit in bounds.items())
                raise ValueError(f"{name} is {number}; it must be {words}")

        choices = field.metadata.get("choices")
        if choices and value is not None:
            checks.require_choice(name, value, choices)


def _is_of(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return isinstance(value, tuple) and all(_is_of(x, item) for x in value)
    # A bool is an int in Python.
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _with_article(kind: type) -> str:
    return f"{'an' if kind.__name__[0].lower() in 'aeiou' else 'a'} {kind.__name__}"


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field of a dataclass of settings."""

    path: str  # names from the outermost dataclass to the field, with dots in between
    annotation: Any
    default: Any  # `dataclasses.MISSING` if a value must be given
    help: str
    choices: tuple[str, ...]
    resumable: bool  # whether it may differ when a run is resumed

    @property
    def form(self) -> str:
        """Form of a value on the command line, such as `INT`, `true|false` or `INT,INT,...`."""
        return literals.form(self.annotation, "NAME" if self.choices else "")

    @property
    def optional(self) -> bool:
        """True if the value may be none."""
        return literals.split_optional(self.annotation)[1]


class Group(NamedTuple):
    """A dataclass of settings, without the dataclasses inside."""

    path: str  # as of a setting
    kind: type
    settings: tuple[Setting, ...]


def groups(kind: Any, path: str = "", *, resumable: bool = False) -> list[Group]:
    """Returns a dataclass of settings and the dataclasses inside, in order, except those without settings.

    `path` is that of the dataclass, and `resumable` whether all its fields may differ when a run is resumed.
    """
    hints = _hints(kind)
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
