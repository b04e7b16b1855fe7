"""What programs print, and a standard output whose reader ends first."""

import os
import select
import signal
import sys

from sympow_jax import spelling

_STDOUT = 1


def say(*lines: str, error: bool = False) -> None:
    """Prints lines, to stderr if they are of an error; names in them may be anybody's, so they are `printable`."""
    print(*map(spelling.printable, lines), sep="\n", file=sys.stderr if error else sys.stdout, flush=True)


def has_reader() -> bool:
    """Returns whether stdout is not a pipe or socket whose reader has ended."""
    poll = select.poll()
    poll.register(_STDOUT, 0)
    return not poll.poll(0)


def flush() -> None:
    """Flushes stdout at the end of a program.

    Raises:
        SystemExit: its reader has ended; the exit code is that of SIGPIPE.
        OSError: it cannot be written, such as to a full disk.
    """
    try:
        print(end="", flush=True)
    except OSError as error:
        # Discard what is left, which Python would write again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
        if isinstance(error, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise
