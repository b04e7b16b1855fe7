"""Checks of a program's error message after a user's mistake."""

from collections.abc import Callable, Sequence

import pytest


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
