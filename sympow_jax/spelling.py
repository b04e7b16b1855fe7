"""Words of error messages: the nearest name to one that does not exist, lists and values of bounded length."""

import difflib
from collections.abc import Iterable
from typing import Any

LINE = 500
"""Characters of an error about settings."""

# Characters of a value and of a list that an error shows. Both may come from a file of any content.
_VALUE = 80
_LIST = 350


def one_line(error: BaseException) -> str:
    """Returns the text of an error in one line, or the name of its type if it has none."""
    return printable(" ".join(str(error).split())) or type(error).__name__


def printable(text: str) -> str:
    """Escapes characters that could change what a terminal shows, such as ESC, U+202E and the end of a line."""
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def cut(text: str, length: int) -> str:
    """Returns a text in one line of at most `length` characters; the middle of a longer one is left out."""
    text = printable(" ".join(text.split()))
    if len(text) <= length:
        return text
    # What failed is said first and why is said last, with long paths in between.
    first = (length - len(_LEFT_OUT)) * 3 // 8
    return f"{text[:first]}{_LEFT_OUT}{text[first + len(_LEFT_OUT) - length :]}"


_LEFT_OUT = " ... "


def shown(value: Any) -> str:
    """Returns the `repr` of a value, shortened."""
    return cut(repr(value), _VALUE)


def listed(items: Iterable[Any], separator: str = ", ") -> str:
    """Returns the items with the separator in between; of a long list, the first ones and the number of the others."""
    items = list(items)
    first: list[str] = []
    for item in items:
        first.append(cut(str(item), 2 * _VALUE))
        if len(separator.join(first)) > _LIST:
            first = first[:-1] or first
            break
    more = len(items) - len(first)
    return separator.join([*first, *([f"{more:,} more"] if more else [])])


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
