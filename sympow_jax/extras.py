"""Error messages for missing optional dependencies."""

import contextlib
from collections.abc import Iterator

_OWN = ("sympow_jax", "pallas_kernels")


class _MissingError(ModuleNotFoundError, ValueError):
    """Error of a package that an extra has. It is a ValueError too, since a user's argument may need the package."""

    extra: str


@contextlib.contextmanager
def required(extra: str, user: str, *, exits: bool = False) -> Iterator[None]:
    """Makes the error of a failed import name the extra to install.

    Args:
        extra: name of the extra that has the imported packages.
        user: what needs them: a module, a program or an argument, for the message.
        exits: exit with the error as one line instead of raising it, as programs do.

    Raises:
        ModuleNotFoundError: a package is not installed.
        SystemExit: a package is not installed and `exits` is set.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OWN:
            raise
        # Of nested blocks, the innermost knows which extra has the package.
        extra = error.extra if isinstance(error, _MissingError) else extra
        line = f"{user} needs {error.name}, which is not installed: pip install 'sympow-jax[{extra}]'"
        if exits:
            raise SystemExit(f"error: {line}") from None
        missing = _MissingError(line, name=error.name)
        missing.extra = extra
        raise missing from error
