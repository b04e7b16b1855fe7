"""Standard streams that are closed, full, or without a reader."""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from sympow_jax import spelling

__all__ = ["flushed", "has_reader", "open_closed", "say", "show"]

_NAMES = ("stdin", "stdout", "stderr")
_STDOUT = 1


def open_closed() -> None:
    """Opens the null device in place of standard streams that are closed, as by `>&-` in a shell.

    Otherwise, the next file that the program opens would get the descriptor of its stdout or stderr.
    """
    for descriptor, name in enumerate(_NAMES):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest descriptor that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w", closefd=False))


def has_reader() -> bool:
    """Returns whether stdout is not a pipe or socket whose reader has ended."""
    poll = select.poll()
    poll.register(_STDOUT, 0)
    return not poll.poll(0)


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Flushes stdout at the end. If it has no reader any more, ends the program as SIGPIPE ends others.

    Raises:
        SystemExit: the reader of stdout has ended, or stdout cannot be written, which is printed in one line.
    """
    try:
        yield
    except BrokenPipeError:
        if has_reader():
            raise
        _end_without_reader()
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            _end_without_reader()
        except OSError as error:
            _end_unwritten(error)


def say(*lines: str, error: bool = False) -> None:
    """Prints lines, to stderr if they are of an error; names in them may be anybody's, so they are `printable`."""
    print(*map(spelling.printable, lines), sep="\n", file=sys.stderr if error else sys.stdout, flush=True)


def show(text: str) -> None:
    """Prints the only text of a program.

    Raises:
        SystemExit: as `flushed`.
    """
    with flushed():
        try:
            print(text)
        except BrokenPipeError:
            raise
        except OSError as error:  # at once, where Python does not buffer
            _end_unwritten(error)


def _end_unwritten(error: OSError) -> NoReturn:
    _discard_stdout()
    print(f"error: cannot write the output: {error.strerror}", file=sys.stderr, flush=True)
    raise SystemExit(1) from None


def _end_without_reader() -> NoReturn:
    _discard_stdout()
    raise SystemExit(128 + signal.SIGPIPE) from None


def _discard_stdout() -> None:
    """Discards what is left to write, which Python would write at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
