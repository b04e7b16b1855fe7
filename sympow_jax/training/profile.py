"""Traces of chosen steps by JAX's profiler."""

import pathlib
from collections.abc import Sequence

import jax

__all__ = ["StepTrace"]


class StepTrace:
    """Traces the steps from the first to the last of `steps`, both included, into `folder`; nothing if it is empty.

    Nothing is waited for: the trace also shows the end of the step before, which may still run, and the beginning
    of the step behind. Steps up to `start` are past; a trace of which some are begins behind them.
    """

    def __init__(self, folder: pathlib.Path, steps: Sequence[int], *, start: int):
        first, self._last = steps or (0, 0)
        self._first = max(first, start + 1)
        self._folder = folder
        self._running = False

    def before(self, step: int) -> None:
        """Begins the trace if `step`, about to be dispatched, is the first of it."""
        if step == self._first and step <= self._last:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int) -> None:
        """Ends and writes the trace if `step`, which is done, is the last of it."""
        if step >= self._last:
            self.stop()

    def stop(self) -> None:
        """Ends and writes the trace if one is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
