"""The progress of a command that takes long: a bar on a terminal, or else lines."""

import time
from typing import Self

import rich.console
import rich.markup
import rich.progress

from sympow_jax import spelling
from sympow_jax.process import streams

# The shortest time between two lines that are not a log.
LINE_SECONDS = 10.0


class Progress:
    """Shows how much of `total` is done, and what the caller says of it.

    Args:
        console: where it is shown; nowhere if it is quiet.
        unit: what is counted, as in "step 3/10".
        total: how much there is to do; None if that is not known yet.
        text: what is shown before anything is done.
        completed: how much was done before.
        is_log: whether lines are what the command prints: every one, on stdout, and a bar that stays. Otherwise there
            is a line now and then, on stderr.
    """

    def __init__(
        self,
        console: rich.console.Console,
        unit: str,
        total: int | None,
        *,
        text: str = "",
        completed: int = 0,
        is_log: bool = False,
    ):
        self._unit, self._total, self._completed, self._is_log = unit, total, completed, is_log
        self._is_quiet, self.is_bar = console.quiet, console.is_terminal and not console.quiet
        self._last = time.monotonic()
        columns = (
            rich.progress.TextColumn(unit),
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.description}"),
        )
        self._bar = rich.progress.Progress(
            *columns, console=console, disable=not self.is_bar, transient=not is_log
        )
        self._task = self._bar.add_task(_escaped(text), total=total, completed=completed)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def advance(self, done: int, text: str) -> None:
        """Shows that `done` more are done, with a text."""
        self.show(self._completed + done, text)

    def show(self, completed: int, text: str, *, total: int | None = None) -> None:
        """Shows that `completed` in all are done, with a text; `total` is new unless it is None."""
        self._completed, self._total = completed, self._total if total is None else total
        if self.is_bar:
            self._bar.update(self._task, completed=completed, total=self._total, description=_escaped(text))
        elif not self._is_quiet and (self._is_log or time.monotonic() - self._last >= LINE_SECONDS):
            streams.say(f"{self._unit} {completed}/{self._total}  {text}", error=not self._is_log)
            self._last = time.monotonic()


def _escaped(text: str) -> str:
    """Returns a text, in which names may be anybody's, for a bar."""
    return rich.markup.escape(spelling.printable(text))
