"""Results as CSV, JSON and tables."""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from experiments._shared.options import Options
from experiments._shared.statistics import Row, differences, means
from sympow_jax.config import serialize
from sympow_jax.evaluation import report
from sympow_jax.process import atomic, workdir

_PACKAGES = ("sympow-jax", "jax", "jaxlib", "flax", "optax", "numpy")
# Digits after the decimal point, for losses in nats and for ratios.
_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class Table:
    """Table that a command prints and that the page of experiments has."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Returns the table as the page has it."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# Makes an experiment's tables from its JSON alone.
Tables = Callable[[Mapping[str, Any]], Iterable[Table]]


def loss_table(title: str, rows: Sequence[Row], by: str, value: str = "loss") -> Table:
    """Returns the mean over seeds of each variant, with the values of column `by` as columns."""
    found = means(rows, ("variant", by), value)
    return _table(title, rows, by, {key: f"{mean.value:.3f}" for key, mean in found.items()})


def difference_table(
    title: str, rows: Sequence[Row], by: str | None, pairs: Iterable[tuple[str, str]], value: str = "loss"
) -> Table:
    """Returns the differences between pairs of variants, with the values of column `by`, if any, as columns.

    Those of more than two standard errors are bold.
    """
    cells = {}
    for (first, second, place), difference in differences(rows, by, value, pairs).items():
        text = f"{difference.value:+.3f}{difference.error_text()}"
        bold = "**" if abs(difference.value) > 2 * difference.error else ""
        cells[f"{first} - {second}", place] = f"{bold}{text}{bold}"
    return _table(title, rows, by, cells)


def _table(title: str, rows: Sequence[Row], by: str | None, cells: Mapping[tuple[str, Any], str]) -> Table:
    """Returns a table of cells, by their name and the value of column `by`."""
    names, places = (
        dict.fromkeys(name for name, _ in cells),
        dict.fromkeys(row[by] if by else None for row in rows),
    )
    columns = [f"{place:,}" if isinstance(place, int) else place or "difference" for place in places]
    return Table(title, ("", *columns), [(name, *(cells[name, place] for place in places)) for name in names])


def print_tables(path: pathlib.Path, tables: Tables) -> None:
    """Prints the tables that `tables` makes from the JSON written with the plot's `path`."""
    for table in tables(json.loads(path.with_suffix(".json").read_text())):
        report.print_cells(table.title, table.columns, table.rows, report.make_console())


def write(
    options: Options, rows: Sequence[Row], folders: Iterable[pathlib.Path], **more: Any
) -> pathlib.Path:
    """Writes the rows to NAME.csv, and the rows, their provenance and `more` to NAME.json.

    Returns the path at which to save the plot.
    """
    path, folders = options.results / options.results.name, list(folders)
    rows = [
        {name: round(x, _DIGITS) if isinstance(x, float) else x for name, x in row.items()} for row in rows
    ]
    report.write_csv(path.with_suffix(".csv"), rows, list(rows[0]))
    about = {
        "command": options.command,
        "scale": options.scale,
        "plan": dataclasses.asdict(options.plan),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "devices": [device.device_kind for device in jax.devices()],
        "cpus": os.cpu_count(),
    } | workdir.revision()
    if folders:
        # The full settings of the first run, and the differences of each from them.
        flat = {folder.name: serialize.flatten(workdir.read_config(folder)) for folder in folders}
        first = flat[folders[0].name]
        about |= {
            "data": workdir.read_description(folders[0]),
            "settings": first,
            "runs": {
                name: {path: value for path, value in values.items() if value != first.get(path)}
                for name, values in flat.items()
            },
        }
    # A line for each row.
    content = json.dumps(report.without_nan(about | more), indent=1, allow_nan=False)
    lines = ",\n".join(f"  {json.dumps(report.without_nan(row), allow_nan=False)}" for row in rows)
    with atomic.replace(path.with_suffix(".json")) as draft:
        draft.write_text(f'{content.removesuffix("\n}")},\n "rows": [\n{lines}\n ]\n}}\n')
    return path.with_suffix(".png")
