"""Tests of the steps that JAX's profiler traces."""

import jax
import pytest

from sympow_jax.training import metrics


@pytest.fixture
def calls(monkeypatch) -> list:
    """Records the profiler's calls, with the steps between them."""
    seen = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: seen.append(("start", folder.name)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: seen.append("stop"))
    return seen


def _run(folder, calls, steps, *, start, end):
    """Runs like the training loop: a step's metrics arrive after the next one is dispatched."""
    trace = metrics.StepTrace(folder / "profile", steps, start=start)
    for number in range(start + 1, end + 1):
        trace.before(number)
        calls.append(number)
        if number > start + 1:
            trace.after(number - 1)
    trace.after(end)
    trace.stop()


@pytest.mark.parametrize(
    ("steps", "start", "expected"),
    [
        ((), 0, [1, 2, 3, 4, 5]),
        ((2, 3), 0, [1, ("start", "profile"), 2, 3, 4, "stop", 5]),
        ((2, 2), 0, [1, ("start", "profile"), 2, 3, "stop", 4, 5]),
        ((4, 9), 0, [1, 2, 3, ("start", "profile"), 4, 5, "stop"]),
        # A resumed run: the first of the steps to be traced, or all of them, are already done.
        ((2, 4), 2, [("start", "profile"), 3, 4, 5, "stop"]),
        ((1, 2), 2, [3, 4, 5]),
        ((7, 8), 0, [1, 2, 3, 4, 5]),
    ],
)
def test_from_the_first_to_the_last(tmp_path, calls, steps, start, expected):
    _run(tmp_path, calls, steps, start=start, end=5)
    assert calls == expected
