"""Compares the form that the op chooses with the times of both forms, and fits the rule that chooses it."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks import _shapes
from sympow_jax.ops._recurrent import cost

__all__ = ["Choice", "crossover", "fit", "measured_choices", "seconds_of"]

FORMS = ("attention", "chunked")
# Rows of both forms are compared if they agree in these.
SHAPE = ("mode", "power", "head_dim", "batch", "heads", "time")
# Values of `cost.FEATURE_COST` that `fit` tries.
FEATURE_COSTS = tuple(n / 4 for n in range(2, 41))


class Choice(NamedTuple):
    """The form that `form=None` takes for one shape, and the measured seconds of both forms.

    Attributes:
        shape: values of `SHAPE`, by name.
        form: form that is chosen.
        seconds: seconds by form.
    """

    shape: dict[str, Any]
    form: str
    seconds: dict[str, float]

    @property
    def loss(self) -> float:
        """Time of the chosen form relative to the faster one: 1 if the choice is right."""
        return self.seconds[self.form] / min(self.seconds.values())


def seconds_of(row: Mapping[str, Any]) -> float | None:
    """Returns the device's time for a row of `benchmarks.kernels`, or None if it was not measured."""
    return row.get("kernel_seconds", row.get("seconds"))


def measured_choices(rows: Iterable[Mapping[str, Any]], **constants: float) -> list[Choice]:
    """Returns the choice for every shape at which the kernels of both forms were measured, in the order of rows.

    Args:
        rows: rows of `benchmarks.kernels`; those of other contenders, and those with a chunk of their own, are ignored.
        constants: keyword arguments of `cost.faster_kernel`, in place of its constants.
    """
    measured: dict[tuple, dict[str, float]] = {}
    for row in rows:
        form, _, implementation = row["contender"].partition("/")
        seconds = seconds_of(row)
        if form in FORMS and implementation == "mosaic_gpu" and not row.get("chunk") and seconds:
            measured.setdefault(tuple(row[name] for name in SHAPE), {})[form] = seconds
    compared = []
    for values, seconds_by_form in measured.items():
        if len(seconds_by_form) == len(FORMS):
            shape = dict(zip(SHAPE, values))
            form = cost.faster_kernel(_flops(shape), shape["time"], **constants)  # type: ignore[arg-type]
            compared.append(Choice(shape, form, seconds_by_form))
    return compared


def fit(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the constants of `cost.faster_kernel` that lose the least time on measured rows.

    The loss is the sum of the logarithms of `Choice.loss`. Among equals, the constants closest to the present ones win.
    """
    times = sorted({choice.shape["time"] for choice in measured_choices(rows)})
    present = {"feature_cost": cost.FEATURE_COST, "least_chunked_time": cost.LEAST_CHUNKED_TIME}

    def rank(constants):
        lost = sum(math.log(choice.loss) for choice in measured_choices(rows, **constants))
        distance = sum(abs(math.log(constants[name] / value)) for name, value in present.items())
        return round(lost, 6), distance

    candidates = (
        {"feature_cost": feature_cost, "least_chunked_time": least}
        for feature_cost, least in itertools.product(
            (cost.FEATURE_COST, *FEATURE_COSTS), (cost.LEAST_CHUNKED_TIME, *times)
        )
    )
    return min(candidates, key=rank)


def crossover(seconds: Mapping[int, float], others: Mapping[int, float]) -> float | None:
    """Returns the time T from which on a contender is faster than another, both measured as seconds by T.

    Between two lengths the ratio is interpolated in logarithms. Returns None if the contender is not faster at the
    longest common length, and the shortest common length if it is faster at every one.
    """
    times = sorted(seconds.keys() & others.keys())
    ratios = [math.log(seconds[time] / others[time]) for time in times]
    if not times or ratios[-1] >= 0:
        return None
    slower = [index for index, ratio in enumerate(ratios) if ratio >= 0]
    if not slower:
        return float(times[0])
    left = slower[-1]
    share = ratios[left] / (ratios[left] - ratios[left + 1])
    return times[left] * (times[left + 1] / times[left]) ** share


def _flops(shape):
    """Returns the FLOPs by form that the op compares."""
    sizes = {"heads": shape["heads"], "kv_heads": shape["heads"], "power": shape["power"]}
    return {
        form: cost.flops_per_token(
            form,
            time=shape["time"],
            head_dim=shape["head_dim"],
            value_dim=shape["head_dim"],
            chunk=cost.default_chunk("chunked"),
            exact_window=_shapes.WINDOW,
            **sizes,
        )
        for form in FORMS
    }
