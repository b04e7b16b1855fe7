"""Nearest names, for error messages about a name that does not exist."""

import difflib
from collections.abc import Iterable

__all__ = ["nearest", "remedy"]


def nearest(name: str, known: Iterable[str], *, similarity: float = 0.6) -> str | None:
    """Returns the known name that is most similar, or None if none is similar.

    Args:
        name: name that is not known.
        known: known names.
        similarity: minimum similarity, from 0 to 1.
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)), None)


def remedy(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """Returns "did you mean ...?" with the nearest known name, or `otherwise` if none is similar."""
    near = nearest(name, known)
    return f"did you mean {near}?" if near else otherwise
