"""Means over runs and differences between variants."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

Row = Mapping[str, Any]


class Mean(NamedTuple):
    """Mean over runs and its standard error, which is NaN for a single run."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f}{self.error_text()}"

    def error_text(self, digits: int = 3) -> str:
        """Returns ` ± error`; empty if the error is NaN or rounds to 0, because a few equal runs are no such proof."""
        error = f"{self.error:.{digits}f}"
        return "" if math.isnan(self.error) or not float(error) else f" ± {error}"

    @property
    def band(self) -> tuple[float, float, float]:
        """The mean, and one standard error below and above it."""
        error = 0.0 if math.isnan(self.error) else self.error
        return self.value, self.value - error, self.value + error


def from_json(number: float | None) -> float:
    """Returns a number of a JSON file, which has null in place of NaN and infinities; returns NaN for null."""
    return math.nan if number is None else number


def mean(values: Sequence[float]) -> Mean:
    """Returns the mean of a value over runs, with its standard error."""
    series = pd.Series(values, dtype=float)
    # A run that diverged makes the mean NaN.
    return Mean(float(series.mean(skipna=False)), float(series.sem(skipna=False)))


def means(rows: Iterable[Row], by: Sequence[str], value: str) -> dict[tuple[Any, ...], Mean]:
    """Returns the mean of column `value` over each group of rows with equal columns `by`."""
    groups = pd.DataFrame(list(rows), columns=[*by, value]).groupby(list(by), sort=False, dropna=False)[value]
    return {key: mean(values) for key, values in groups}


def differences(
    rows: Iterable[Row], by: str | None, value: str, pairs: Iterable[tuple[str, str]]
) -> dict[tuple[str, str, Any], Mean]:
    """Returns the mean difference between two variants, taken seed by seed.

    Runs with the same seed see the same data in the same order, so their differences vary less than their losses.

    Args:
        rows: with columns `variant`, `seed`, `by` and `value`.
        by: column whose values are compared separately, None if there is none.
        value: column that is compared.
        pairs: variants to compare. Those without rows are left out.

    Returns:
        Mean of the first variant's value minus the second's, by (first, second, value of `by`).
    """
    found = {(row["variant"], row[by] if by else None, row["seed"]): row[value] for row in rows}
    places = dict.fromkeys((place, seed) for _, place, seed in found)
    groups: dict[tuple[str, str, Any], list[float]] = {}
    for (first, second), (place, seed) in itertools.product(pairs, places):
        keys = (first, place, seed), (second, place, seed)
        if all(key in found for key in keys):
            groups.setdefault((first, second, place), []).append(found[keys[0]] - found[keys[1]])
    return {key: mean(values) for key, values in groups.items()}
