"""Profiles selected steps with JAX's profiler."""

import pathlib
from collections.abc import Sequence

import jax

__all__ = ["StepTrace"]


class StepTrace:
    """Profiler trace, in `folder`, from the first to the last of `steps`, inclusive; none if `steps` is empty.

    Tracing does not synchronize. The trace also shows the end of the previous step, which may still run, and the
    beginning of the next. If the first step is at most `start`, which is already done, the trace begins after `start`.
    """

    def __init__(self, folder: pathlib.Path, steps: Sequence[int], *, start: int):
        first, self._last = steps or (0, 0)
        self._first = max(first, start + 1)
        self._folder = folder
        self._running = False

    def before(self, step: int) -> None:
        """Starts the trace if `step`, which is about to be dispatched, is its first."""
        if step == self._first and step <= self._last:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int) -> None:
        """Stops and writes the trace if `step`, which is done, is its last."""
        if step >= self._last:
            self.stop()

    def stop(self) -> None:
        """Stops and writes the trace if one is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
