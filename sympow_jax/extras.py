"""What parts of the package need beyond its core dependencies, and how to get it."""

import contextlib
import pathlib
import sys
from collections.abc import Iterator

__all__ = ["required"]

_OWN = ("sympow_jax", "pallas_kernels")


@contextlib.contextmanager
def required(extra: str, module: str) -> Iterator[None]:
    """Within it, an import of what is not installed names the extra to install; `module` is the `__name__` of its user.

    A program ends with that line alone, also one that `python -m` is about to run.

    Raises ModuleNotFoundError, or SystemExit for a program.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OWN:
            raise
        program = pathlib.Path(sys.argv[0]).name
        user = program if module == "__main__" else module
        line = f"{user} needs {error.name}, which is not installed: pip install 'sympow-jax[{extra}]'"
        # `-m` is its name while Python imports the packages of the module that it will run.
        if module == "__main__" or program == "-m":
            raise SystemExit(f"error: {line}") from None
        raise ModuleNotFoundError(line, name=error.name) from error
