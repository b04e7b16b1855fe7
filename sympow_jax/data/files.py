"""Finds the files that a setting names, and splits documents into training and held-out ones."""

import dataclasses
import fnmatch
import glob
import hashlib
import os
import pathlib
import re
from collections.abc import Buffer, Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int64

from sympow_jax import config as config_lib

__all__ = [
    "File",
    "below",
    "digest",
    "find",
    "find_all",
    "held_out",
    "located",
    "location",
    "root_of",
    "side",
    "would_find",
]

_SAMPLES = 64
_SAMPLE_BYTES = 1 << 12


@dataclasses.dataclass(frozen=True)
class File:
    """A file and its key.

    The key is the path relative to the folder, or to the fixed part of the glob pattern, that matched the file. Order
    and hold-out depend on the key only, so that they do not change when the folder is moved. `named` is
    True if a path names the file, and not a folder or pattern that holds it.
    """

    path: pathlib.Path
    key: str
    size: int
    named: bool = dataclasses.field(default=False, kw_only=True)


def _file(path: str, root: str, *, named: bool = False) -> File:
    key = pathlib.Path(os.path.relpath(path, root)).as_posix()
    return File(path=pathlib.Path(path), key=key, size=os.path.getsize(path), named=named)


def below(root: str, *, suffix: str = "", skip: Collection[str] = ()) -> list[File]:
    """Returns the files below a folder that end in `suffix`, except hidden ones and folders named in `skip`.

    Links to files are followed, and those to folders are not.

    Raises:
        ValueError: a folder cannot be read.
    """
    skip = {"__pycache__", *skip}
    matches = []
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skip]
        for name in names:
            path = os.path.join(folder, name)
            # A dangling link is listed but cannot be read.
            if name.endswith(suffix) and not name.startswith(".") and os.path.isfile(path):
                matches.append(_file(path, root))
    return _ordered(matches)


def _refuse(error: OSError) -> None:
    raise ValueError(f"cannot read the folder {error.filename}: {error.strerror or error}") from error


def _split(pattern: str) -> tuple[str, list[str]]:
    """Returns the fixed part of a glob, and the other parts."""
    parts = pathlib.Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    # Within a name, `**` means `*`. At the end, `**` stands for all files below.
    rest = [part if part == "**" else re.sub(r"\*+", "*", part) for part in parts[fixed:]]
    rest += ["*"] if rest[-1] == "**" else []
    return os.path.join("", *parts[:fixed]) or ".", rest


def location(path: str) -> str:
    """Returns the real path of a file or folder, or its URL, which is the same however the path is written."""
    path = path.removeprefix("file://").rstrip("/")
    return path if "://" in path else os.path.realpath(os.path.expanduser(path))


def root_of(path: str) -> str | None:
    """Returns the real path of the folder that a path is searched from; None for a file or URL."""
    path = os.path.expanduser(path.removeprefix("file://"))
    if "://" in path or os.path.isfile(path):
        return None
    return os.path.realpath(_split(path)[0] if glob.has_magic(path) and not os.path.isdir(path) else path)


def would_find(path: str, file: str) -> bool:
    """Returns whether a folder or glob would match a file at the real path `file`."""
    root, path = root_of(path), os.path.expanduser(path.removeprefix("file://"))
    if root is None or os.path.commonpath([root, file]) != root:
        return False
    if root == os.path.realpath(path):
        return True
    rest = _split(path)[1]
    key = os.path.relpath(file, root)
    # In `fnmatch`, a star crosses folders, as only `**` may.
    same_depth = "**" in rest or len(rest) == 1 + key.count(os.sep)
    return same_depth and fnmatch.fnmatchcase(key, "/".join(rest).replace("**/", "*"))


def _matching(pattern: str) -> list[File]:
    root, rest = _split(pattern)
    # By pathlib, whose `**` does not follow links to folders. `glob` follows them, around loops too.
    found = [path for path in pathlib.Path(root).glob("/".join(rest)) if path.is_file()]
    if not _is_hidden(rest):
        found = [path for path in found if not _is_hidden(path.relative_to(root).parts)]
    return [_file(str(path), root) for path in found]


def _is_hidden(parts: Iterable[str]) -> bool:
    return any(part.startswith(".") and part != ".." for part in parts)


def _ordered(files: Sequence[File]) -> list[File]:
    return sorted(files, key=lambda file: (file.key, str(file.path)))


def find(setting: str, paths: Sequence[str], *, suffix: str = "") -> list[File]:
    """Returns the files that `paths` name, each once, ordered by key.

    A path is a file, a folder or a glob. A folder stands for its files that end in `suffix`, except hidden files and
    `__pycache__`. In a glob, `**` crosses folders. Neither a folder nor `**` follows links to folders. `setting` is the
    name of the setting that holds the paths, for errors.

    Raises:
        ValueError: a path matches no file.
    """
    matches: dict[str, File] = {}
    # Named files first, so that the key of one does not depend on the folders and patterns that it is in.
    for path in sorted(map(os.path.expanduser, paths), key=lambda path: not os.path.isfile(path)):
        if os.path.isfile(path):
            files = [_file(path, os.path.dirname(path) or ".", named=True)]
        elif os.path.isdir(path):
            files = below(path, suffix=suffix)
        elif glob.has_magic(path):
            files = _matching(path)
        else:
            raise ValueError(f"{setting}: there is no file or folder {path!r}; correct the path")
        if not files:
            lack = f"no {suffix or 'visible'} file is in" if os.path.isdir(path) else "no file matches"
            raise ValueError(f"{setting}: {lack} {path!r}; correct the path or the pattern")
        for location, file in located(files):
            # Otherwise, a file with two names could be trained on under one name and held out under the other.
            matches.setdefault(location, file)
    return _ordered(list(matches.values()))


def located[F: File](files: Iterable[F]) -> Iterator[tuple[str, F]]:
    """Yields the path without links of each file, which is the same whatever path led to it, and the file."""
    folders: dict[str, str] = {}  # real paths by paths, because each takes several system calls
    for file in files:
        folder, name = os.path.split(file.path)
        if os.path.islink(file.path):
            yield os.path.realpath(file.path), file
        else:
            if folder not in folders:
                folders[folder] = os.path.realpath(folder)
            yield os.path.join(folders[folder], name), file


def find_all(config: config_lib.DataConfig, *, suffix: str) -> list[File]:
    """Returns the files of `data.paths` and then those of `data.heldout_paths`, each as in `find`.

    Raises:
        ValueError: as `find`.
    """
    found = find("data.paths", config.paths, suffix=suffix)
    if config.heldout_paths:
        found += find("data.heldout_paths", config.heldout_paths, suffix=suffix)
    return found


def digest(files: Sequence[File], read: Callable[[File], Iterable[Buffer]], *, samples: bool = False) -> str:
    """Returns the SHA-256 of the key, the size and what `read` returns of every file.

    `samples` adds 4 KiB at each of 64 evenly spaced places of all files, because the contents may be too large to read.
    """
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.key}\0{file.size}\0".encode("utf-8", "surrogateescape"))
        for part in read(file):
            total.update(part)
    ends = np.cumsum([file.size for file in files])
    if not samples or not any(file.size for file in files):
        return total.hexdigest()
    for place in np.linspace(0, ends[-1], _SAMPLES, endpoint=False).astype(np.int64):
        number = int(np.searchsorted(ends, place, side="right"))
        file = files[number]
        start = min(place - ends[number] + file.size, max(0, file.size - _SAMPLE_BYTES))
        try:
            with file.path.open("rb") as stream:
                stream.seek(start)
                total.update(stream.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ValueError(f"cannot read {file.path}: {error.strerror or error}") from error
    return total.hexdigest()


def side(config: config_lib.DataConfig, *, heldout: bool) -> tuple[str, tuple[str, ...]]:
    """Returns the name and the value of the setting whose paths have the training or the held-out documents."""
    if heldout and config.heldout_paths:
        return "data.heldout_paths", config.heldout_paths
    return "data.paths", config.paths


def held_out(
    keys: Sequence[str], positions: Int64[np.ndarray, "#documents"], fraction: float
) -> Bool[np.ndarray, " documents"]:
    """Returns a mask of the documents whose hash is below `fraction`.

    The hash is a function of the key of a document's file and of its position there. So a document stays on its side
    when other files are added or removed. It is the SHA-256 of the key plus SplitMix64 of the position (Steele, Lea and
    Flood, 2014), which is 0 at position 0.

    Args:
        keys: key of each document's file, or of the one file of all documents.
        positions: position of each document in its file, or of all documents in theirs.
        fraction: fraction of the documents that is held out.
    """
    mixed = positions.astype(np.uint64)
    # In place, because there may be 10^8 documents.
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    digests = (hashlib.sha256(os.fsencode(key)).digest() for key in keys)
    hashes = mixed + np.array([int.from_bytes(digest[:8], "big") for digest in digests], np.uint64)
    return (hashes >> np.uint64(11)) / 2.0**53 < fraction
