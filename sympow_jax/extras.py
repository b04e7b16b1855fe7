"""Error messages for missing optional dependencies."""

import contextlib
import pathlib
import sys
from collections.abc import Iterator

__all__ = ["required"]

_OWN = ("sympow_jax", "pallas_kernels")


@contextlib.contextmanager
def required(extra: str, module: str) -> Iterator[None]:
    """Makes the error of a failed import name the extra to install.

    Args:
        extra: name of the extra that has the imported packages.
        module: `__name__` of the module that imports them. A program, also one that `python -m` is about to run,
            exits with one line instead of a traceback.

    Raises:
        ModuleNotFoundError: a package is not installed.
        SystemExit: a package of a program is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OWN:
            raise
        program = pathlib.Path(sys.argv[0]).name
        user = program if module == "__main__" else module
        line = f"{user} needs {error.name}, which is not installed: pip install 'sympow-jax[{extra}]'"
        # sys.argv[0] is `-m` while Python imports the parent packages of the module that it will run.
        if module == "__main__" or program == "-m":
            raise SystemExit(f"error: {line}") from None
        raise ModuleNotFoundError(line, name=error.name) from error
