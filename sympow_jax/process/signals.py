"""Common code of the command-line programs: one-line errors, and an orderly stop on Ctrl-C."""

import contextlib
import logging
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

from sympow_jax import spelling
from sympow_jax.process import streams

# Notices of Kubernetes, clouds and SLURM before they take the machine.
NOTICES = (signal.SIGTERM, signal.SIGUSR1)
# Line on stderr after the first signal.
SAVING = "saving after this step; a second signal ends the program without saving"
_STDERR = 2
# Values in an error may come from a file of any content.
_MAX_ERROR_CHARACTERS = 1500
# Seconds. `uv run` and `timeout` forward a signal that the process, being in their group, has already received.
_DUPLICATE_SECONDS = 1.0


def _report_unraisable(unraisable: Any) -> None:
    """Prints an error that cannot be raised, except those of writes that end after Orbax has given up a save."""
    if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
        sys.__unraisablehook__(unraisable)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns a user error or Ctrl-C into one line on stderr and a non-zero exit code; for the whole of a program.

    User errors are `ValueError`, `OSError`, and `NotImplementedError`, which means that a named implementation does not
    support the request. `MemoryError` is one too, because large files cause it. `python -X dev` prints the traceback,
    for development. If the reader of stdout ends before the program, the exit code is that of SIGPIPE, without a line.
    """
    if not sys.flags.dev_mode:
        # Orbax logs, with tracebacks, errors that it also raises. Hide them, but let handlers receive them.
        logging.getLogger("absl").propagate = False
        logging.getLogger("absl").addHandler(logging.NullHandler())
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        sys.unraisablehook = _report_unraisable
    try:
        try:
            yield
        finally:
            streams.flush()
    except (ValueError, OSError, NotImplementedError, MemoryError) as error:
        if isinstance(error, BrokenPipeError) and not streams.has_reader():
            raise SystemExit(128 + signal.SIGPIPE) from None
        if sys.flags.dev_mode:
            raise
        reason = spelling.cut(str(error), _MAX_ERROR_CHARACTERS) or type(error).__name__
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            reason = f"{spelling.cut(os.fsdecode(error.filename), spelling.LINE)}: {error.strerror}"
        if isinstance(error, MemoryError):
            reason = "memory is short; use a machine that has more, or smaller data"
        print(f"error: {reason}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt as interrupt:
        number, *remedy = interrupt.args or (signal.SIGINT,)
        print("; ".join(("interrupted", *remedy)), file=sys.stderr, flush=True)
        raise SystemExit(128 + number) from None


class StopSignals:
    """Context manager that records and reports the first SIGINT, SIGTERM or SIGUSR1, so that the step can finish.

    A signal within a second of the first is taken for the same one, forwarded by a parent, and ignored. A later one has
    its usual effect. Works in the main thread only, like all signal handlers. An instance can be entered once.

    Attributes:
        received: the first signal; None before it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGINT, *NOTICES):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _note(self, number: int, _: types.FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._at = signal.Signals(number), now
            # Not by `print`, which a handler must not call: the signal may have interrupted one.
            with contextlib.suppress(OSError):
                os.write(_STDERR, f"{SAVING}\n".encode())
        elif now - self._at >= _DUPLICATE_SECONDS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
