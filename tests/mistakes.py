"""What a program says of a user's mistake."""

from collections.abc import Callable, Sequence

import pytest


def line(
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    capsys: pytest.CaptureFixture,
    *,
    at_once: bool = True,
) -> str:
    """The one line on stderr with which a program ends, with exit code 1; `at_once`, before it has printed anything."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 1
    printed, error = capsys.readouterr()
    assert not at_once or printed == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error
