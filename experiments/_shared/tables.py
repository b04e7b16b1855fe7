"""Tables that commands print and that the page of experiments has."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments._shared.statistics import Row, differences, means


@dataclasses.dataclass(frozen=True)
class Table:
    """Table of words, with a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Returns the table as the page has it."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number_table(
    title: str, corner: str, columns: Iterable[int], rows: Mapping[str, Sequence[float]], digits: int = 3
) -> Table:
    """Returns a table of numbers, with a row for each name and a column for each context or position."""
    cells = [(name, *(f"{x:.{digits}f}" for x in numbers)) for name, numbers in rows.items()]
    return Table(title, (corner, *(f"{column:,}" for column in columns)), cells)


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
        bold = "**" if abs(difference.value) > 2 * difference.error else ""
        text = f"{bold}{difference.value:+.3f}{difference.error_text()}{bold}"
        cells[f"{first} - {second}", place] = text
    return _table(title, rows, by, cells)


def _table(title: str, rows: Sequence[Row], by: str | None, cells: Mapping[tuple[str, Any], str]) -> Table:
    """Returns a table of cells, by their name and the value of column `by`."""
    names, places = (
        dict.fromkeys(name for name, _ in cells),
        dict.fromkeys(row[by] if by else None for row in rows),
    )
    columns = [f"{place:,}" if isinstance(place, int) else place or "difference" for place in places]
    return Table(title, ("", *columns), [(name, *(cells[name, place] for place in places)) for name in names])


def loss_labels(lengths: Sequence[int]) -> tuple[str, str, str]:
    """Returns the labels of the training loss and of the held-out losses within and beyond the training context."""
    within, beyond = lengths
    return "training", f"held-out, positions to {within:,}", f"{within + 1:,} to {beyond:,}"
