"""Writes an experiment's results: a CSV, a JSON with settings, versions and command, and a table on the terminal."""

import csv
import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import rich.box
import rich.table
import rich.text

from experiments import _command
from sympow_jax import atomic
from sympow_jax.evaluation import report
from sympow_jax.training import workdir

__all__ = ["medians", "nested", "print_place", "print_table", "write"]

_PACKAGES = ("sympow-jax", "jax", "jaxlib", "flax", "optax", "numpy")

# Digits after the decimal point, for losses in nats and for ratios.
_DIGITS = 6

Row = Mapping[str, Any]


def write(
    options: _command.Options, rows: Sequence[Row], folders: Mapping[str, pathlib.Path], **more: Any
) -> pathlib.Path:
    """Writes the rows to NAME.csv, and the rows, their provenance and `more` to NAME.json.

    Returns the path at which to save the plot.
    """
    path = options.results / options.results.name
    rows = [{name: _rounded(value) for name, value in row.items()} for row in rows]
    with atomic.replace(path.with_suffix(".csv")) as draft, draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    about = json.dumps(_without_nan(_about(options, folders) | more), indent=1, allow_nan=False)
    lines = ",\n".join(f"  {json.dumps(_without_nan(row), allow_nan=False)}" for row in rows)
    with atomic.replace(path.with_suffix(".json")) as draft:
        draft.write_text(f'{about.removesuffix("\n}")},\n "rows": [\n{lines}\n ]\n}}\n')
    return path.with_suffix(".png")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Prints the rows as a table; floats have four digits after the decimal point."""
    console = report.make_console()
    table = rich.table.Table(box=rich.box.ROUNDED if console.is_terminal else rich.box.ASCII2)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(rich.text.Text(_cell(value)) for value in row))
    console.print(title, style="bold", highlight=False)
    console.print(table, crop=False)


def print_place(options: _command.Options) -> None:
    """Prints the folder of the results."""
    console = report.make_console()
    console.print(f"written to {options.results}", style="dim", highlight=False, soft_wrap=True)


def medians(
    rows: Iterable[Row], by: Sequence[str], value: str
) -> dict[tuple[Any, ...], tuple[float, float, float]]:
    """Returns median, minimum and maximum of `value` over each group of rows with equal columns `by`."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row[value])
    return {key: (statistics.median(found), min(found), max(found)) for key, found in groups.items()}


def nested(medians: Mapping[tuple[Any, ...], tuple[float, float, float]]) -> dict[Any, Any]:
    """Returns only the medians, for JSON, nested by first and second key."""
    found: dict[Any, Any] = {}
    for (first, second), (median, _, _) in medians.items():
        found.setdefault(first, {})[second] = median
    return found


def _about(options: _command.Options, folders: Mapping[str, pathlib.Path]) -> dict[str, Any]:
    about = {
        "command": options.command,
        "scale": options.scale,
        "plan": dataclasses.asdict(options.plan),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "devices": [device.device_kind for device in jax.devices()],
        "cpus": os.cpu_count(),
    }
    if folders:
        about |= {"data": json.loads((next(iter(folders.values())) / "data.json").read_text())}
        about |= _settings(folders)
    return about


def _settings(folders: Mapping[str, pathlib.Path]) -> dict[str, Any]:
    """Returns the full settings of the first run, and each run's differences from them."""
    flat = {
        name: _flatten(dataclasses.asdict(workdir.read_config(folder))) for name, folder in folders.items()
    }
    first = next(iter(flat.values()))
    differences = {
        name: {path: value for path, value in values.items() if value != first.get(path)}
        for name, values in flat.items()
    }
    return {"settings": first, "runs": differences}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _rounded(value: Any) -> Any:
    return round(value, _DIGITS) if isinstance(value, float) else value


def _without_nan(value: Any) -> Any:
    """Returns the value with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {name: _without_nan(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
