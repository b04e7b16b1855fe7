"""What the command-line programs share: one clear line for a mistake, and an orderly stop on Ctrl-C."""

import argparse
import contextlib
import logging
import signal
import sys
import time
import types
from collections.abc import Iterator
from typing import Any, NoReturn

__all__ = ["Parser", "StopSignals", "user_errors"]

# Seconds. `uv run` and `timeout` pass a signal on that the process, being of their group, has had already.
_ONE_PRESS = 1.0


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are ValueErrors: one line, as of every other mistake."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError with the message and where help is."""
        raise ValueError(f"{message}; see {self.prog} --help")

    def add_tokenizer(self) -> None:
        """Adds `--tokenizer`, the name that `data.codec_of_run` takes."""
        self.add_argument(
            "--tokenizer",
            metavar="FILE",
            help="the tokenizer that made the tokens of data.source tokens or longcrawl64: a `tokenizers` JSON file, a "
            ".tiktoken file, or the name of a tiktoken encoding",
        )


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns a user's mistake or Ctrl-C into one line on stderr and a non-zero exit.

    Mistakes are `ValueError`, `OSError`, and `NotImplementedError`: a named implementation that cannot do it here.
    `python -X dev` keeps the traceback, for those who change the code.
    """
    if not sys.flags.dev_mode:
        # Orbax logs, with tracebacks, errors that it also raises. Nobody is shown them, but handlers may hear of them.
        logging.getLogger("absl").propagate = False
        logging.getLogger("absl").addHandler(logging.NullHandler())
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    try:
        yield
    except (ValueError, OSError, NotImplementedError) as error:
        if sys.flags.dev_mode:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        raise SystemExit(128 + signal.SIGINT) from None


class StopSignals:
    """Within its context, the first SIGINT or SIGTERM is only noted, so that the step under way can finish.

    One that comes more than a second later acts as it would have without us; sooner it is the first again, passed on by
    a parent. Works in the main thread only, as signals do.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._at = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        now = time.monotonic()
        if self.received is None:
            self.received, self._at = signal.Signals(number), now
        elif now - self._at >= _ONE_PRESS:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
