"""Checks of the error messages after a user's mistake."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import pytest


@contextlib.contextmanager
def refused(part: str) -> Iterator[pytest.ExceptionInfo]:
    """Asserts that a block raises a ValueError of one line that has this part."""
    with pytest.raises(ValueError, match=re.escape(part)) as raised:
        yield raised
    assert "\n" not in str(raised.value)


def line(
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    capsys: pytest.CaptureFixture,
    *,
    at_once: bool = True,
) -> str:
    """Returns the single line on stderr with which a program ends, with exit code 1.

    at_once: the program must not have printed anything before.
    """
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 1
    printed, error = capsys.readouterr()
    assert not at_once or printed == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error
