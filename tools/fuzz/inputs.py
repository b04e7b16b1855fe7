"""Hypothesis strategies of changes to good files; a change is small, so that examples can be read and shrunk."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

Files = dict[str, bytes]
"""Contents of files by their names relative to a folder."""

DEEP = [begin * n + "0" + end * n for n in (40, 1000, 100_000) for begin, end in (("[", "]"), ('{"a":', "}"))]
# Values, as JSON, that break what does not expect them, and texts that are no JSON.
_VALUES: tuple[Any, ...] = (None, True, False, "", "x", "é\u2028\n\x00", "x" * 100_000, "..", "/dev/zero")
_VALUES += ([], {}, [[]], {"a": {}}, ["x"] * 1000, list(range(10_000)), {str(n): 0 for n in range(1000)})
_VALUES += (0, -1, 1, 2, 3, 1.0, 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"))
_VALUES += (2**31, 2**32, 2**34, 2**63, 2**64, 10**5, 10**9, 10**18, 10**30)
HOSTILE = (*map(json.dumps, _VALUES), *DEEP, "1e400", "9" * 5000, "{", "]", ",", '"', "\x00", "e9")
_BYTES = (b"\xff" * 4, b"\xff" * 8, b"\x00" * 8, b"\x7f" * 8, b"\x00" * 64)


@dataclasses.dataclass(frozen=True)
class Part:
    """Replacement of one part of a JSON file; at the empty path, of any whole file.

    Attributes:
        file: name of the file.
        path: keys and indices from the root. A key that an object does not have is added.
        text: replacement, which need not be JSON. None removes the part.
    """

    file: str
    path: tuple[str | int, ...]
    text: str | None

    def apply(self, content: bytes) -> bytes | None:
        """Returns the new content of the file; None removes it. If the part does not exist, nothing changes."""
        if not self.path:
            return None if self.text is None else self.text.encode()
        *parents, last = self.path
        mark = "\x00mark"
        try:
            node = document = json.loads(content)
            for key in parents:
                node = node[key]
            if self.text is None:
                del node[last]
            else:
                node[last] = mark
            return json.dumps(document).replace(json.dumps(mark), self.text or "").encode()
        except (ValueError, LookupError, TypeError, RecursionError):  # after an earlier change
            return content


@dataclasses.dataclass(frozen=True)
class Splice:
    """Replacement of `removed` bytes of a file at an offset by others."""

    file: str
    at: int
    removed: int
    inserted: bytes

    def apply(self, content: bytes) -> bytes:
        """Returns the new content of the file."""
        return content[: self.at] + self.inserted + content[self.at + self.removed :]


Change = Part | Splice


def changed(files: Mapping[str, bytes], changes: Sequence[Change]) -> Files:
    """Returns the files after the changes."""
    new = dict(files)
    for change in changes:
        if change.file in new:
            content = change.apply(new.pop(change.file))
            if content is not None:
                new[change.file] = content
    return new


def changes(files: Mapping[str, bytes]) -> st.SearchStrategy[list[Change]]:
    """Returns one to three changes to files, most of which are to JSON where a file is JSON."""
    one = st.one_of([_change(name, content) for name, content in files.items()])
    return st.lists(one, min_size=1, max_size=3)


def _change(file: str, content: bytes) -> st.SearchStrategy[Change]:
    # Half of the changes are near the beginning, where headers are.
    at = st.integers(0, len(content)) | st.integers(0, min(len(content), 256))
    removed = st.sampled_from((1, 0, 2, 4, 8, 64, len(content)))
    splice = st.builds(Splice, st.just(file), at, removed, st.binary(max_size=16) | st.sampled_from(_BYTES))
    try:
        document = json.loads(content)
    except ValueError:
        return st.one_of(splice, splice, splice, st.just(Part(file, (), None)))
    parts = list(_parts(document))
    others = st.sampled_from([json.dumps(part) for _, part in parts])
    values = st.integers() | st.floats() | st.text(max_size=20)

    def change(part: tuple[tuple[str | int, ...], Any]) -> st.SearchStrategy[Part]:
        path, value = part
        near = st.integers(value - 2, value + 2) if type(value) is int else st.nothing()
        text = st.none() | st.sampled_from(HOSTILE) | others | (near | values).map(json.dumps)
        return st.builds(Part, st.just(file), st.just(path), text)

    part = st.sampled_from(parts).flatmap(change)
    return st.one_of(part, part, part, splice)


def _parts(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yields path and value of every part of a JSON value, and of keys that it does not have."""
    yield path, value
    if isinstance(value, dict):
        yield from (((*path, key), None) for key in ("x", "x" * 10_000))
    for key, part in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from _parts(part, (*path, key))


def write_tree(files: Mapping[str, bytes], folder: pathlib.Path) -> None:
    """Writes files below a folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def read_tree(folder: pathlib.Path) -> Files:
    """Returns the files below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
