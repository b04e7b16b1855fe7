"""The progress of a command that takes long: a bar on a terminal, or else a line now and then."""

import time
from typing import Self

import rich.console
import rich.markup
import rich.progress

from sympow_jax import spelling
from sympow_jax.process import streams

__all__ = ["Progress"]

# Without a terminal, the shortest time between two lines of a command that does not set it.
LINE_SECONDS = 10.0


class Progress:
    """Shows how much of `total` is done, and what the caller says of it.

    Args:
        console: where it is shown; nowhere if it is quiet.
        unit: what is counted, as in "step 3/10".
        total: how much there is to do, 0 if unknown.
        completed: how much of it was done before.
        seconds: without a terminal, the shortest time between two lines.
        transient: whether the bar disappears at the end.
        error: whether lines go to stderr.
    """

    def __init__(
        self,
        console: rich.console.Console,
        unit: str,
        total: int,
        *,
        completed: int = 0,
        seconds: float | None = None,
        transient: bool = True,
        error: bool = True,
    ):
        self._unit, self._total, self._completed = unit, total, completed
        self._seconds = LINE_SECONDS if seconds is None else seconds
        self._error, self._last = error, time.monotonic()
        columns = (
            rich.progress.TextColumn(unit + " {task.completed}/{task.total}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.description}"),
        )
        self._is_quiet, self.is_bar = console.quiet, console.is_terminal and not console.quiet
        self._bar = rich.progress.Progress(
            *columns, console=console, disable=not self.is_bar, transient=transient
        )
        self._task = self._bar.add_task("", total=total, completed=completed)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def advance(self, text: str, done: int) -> None:
        """Shows a text, and that `done` more are done."""
        self.show(self._completed + done, text)

    def show(self, completed: int, text: str, *, total: int | None = None) -> None:
        """Shows that `completed` in all are done, with a text, whose names may be anybody's; `total` may be new."""
        self._completed, self._total = completed, self._total if total is None else total
        text = spelling.printable(text)
        if self.is_bar:
            text = rich.markup.escape(text)
            self._bar.update(self._task, completed=completed, total=self._total, description=text)
        elif not self._is_quiet and (now := time.monotonic()) - self._last >= self._seconds:
            line = f"{self._unit} {completed}/{self._total}  {text}"
            streams.say(line, error=self._error)
            self._last = now
