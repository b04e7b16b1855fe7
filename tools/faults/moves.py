"""Moves of a run to other devices and processes, with every axis of the mesh."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tools.faults.stage import NotSurvived, Reason, Stage, losses, tried

# Tolerance of losses on another number of devices, where sums have another order.
CLOSE = 1e-5
AXES = ("data", "fsdp", "tensor", "context")
_NUMBERS = (8, 4, 1, 2, 8)


def devices(stage: Stage, numbers: range) -> Iterator[Reason]:
    """Resumes a run on other numbers of devices, sharded over a different axis in each try."""
    return _moves(stage, numbers, "devices")


def processes(stage: Stage, numbers: range) -> Iterator[Reason]:
    """Resumes a run with other numbers of processes of one device, sharded over a different axis in each try."""
    return _moves(stage, numbers, "processes")


def _moves(stage: Stage, numbers: range, kind: str) -> Iterator[Reason]:
    def attempt(number: int) -> None:
        axis = AXES[number % len(AXES)]
        parts = [{kind: count, f"sharding__{axis}": count} for count in _NUMBERS]
        # Every axis divides by 8.
        _move(stage, parts, model__heads=8, model__width=64, data__batch_tokens=256)

    return (tried(attempt, number) for number in numbers)


def _move(stage: Stage, parts: Sequence[dict[str, Any]], **options) -> None:
    """Ends and resumes a run, each time with other devices or processes."""
    options |= {"training__checkpoint_every": 5}
    expected = stage.undisturbed(training__steps=10 * len(parts), **options)
    run = stage.new("elsewhere")
    for number, part in enumerate(parts):
        stage.finish(run, resumes_at=10 * number, training__steps=10 * (number + 1), **part, **options)
    found, other = (np.array(losses(folder)) for folder in (run, expected))
    if found.shape != other.shape or not np.allclose(found, other, rtol=CLOSE, atol=0):
        raise NotSurvived("the losses are not those of the undisturbed run")
