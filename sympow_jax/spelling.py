"""Error messages for names that are not known, which is often a slip of the keyboard."""

import difflib
from collections.abc import Iterable

__all__ = ["remedy"]


def remedy(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """Returns "did you mean ...?" with the nearest known name, or `otherwise` if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise
