"""Finds the files that a setting names, and splits documents into training and held-out ones."""

import dataclasses
import glob
import hashlib
import os
import pathlib
import re
from collections.abc import Buffer, Callable, Collection, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt64

from sympow_jax import config as config_lib

__all__ = [
    "File",
    "below",
    "digest",
    "find",
    "find_all",
    "held_out",
    "index_hashes",
    "key_hashes",
    "located",
    "position_hashes",
]


@dataclasses.dataclass(frozen=True)
class File:
    """A file and its key.

    The key is the path relative to the folder, or to the fixed part of the glob pattern, that matched the file. Order
    and hold-out depend on the key only, so that they do not change when the folder is moved.
    """

    path: pathlib.Path
    key: str
    size: int


def _file(path: str, root: str) -> File:
    key = pathlib.Path(os.path.relpath(path, root)).as_posix()
    return File(path=pathlib.Path(path), key=key, size=os.path.getsize(path))


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
    raise ValueError(f"cannot read the folder {error.filename}: {error.strerror}") from error


def _matching(pattern: str) -> list[File]:
    parts = pathlib.Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = os.path.join("", *parts[:fixed]) or "."
    # Other stars in a row are one star, and `**` at the end is all files.
    rest = [part if part == "**" else re.sub(r"\*+", "*", part) for part in parts[fixed:]]
    rest += ["*"] if rest[-1] == "**" else []
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
    for path in map(os.path.expanduser, paths):
        if os.path.isfile(path):
            files = [_file(path, os.path.dirname(path) or ".")]
        elif os.path.isdir(path):
            files = below(path, suffix=suffix)
        elif glob.has_magic(path):
            files = _matching(path)
        else:
            raise ValueError(f"{setting}: there is no file or folder {path!r}; correct the path")
        if not files:
            raise ValueError(f"{setting}: no file matches {path!r}; correct the path or the pattern")
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


def digest(files: Iterable[File], read: Callable[[File], Iterable[Buffer]]) -> str:
    """Returns the SHA-256 of every file's key, size and the parts of its content that `read` returns, in order."""
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.key}\0{file.size}\0".encode("utf-8", "surrogateescape"))
        for part in read(file):
            total.update(part)
    return total.hexdigest()


def key_hashes(keys: Sequence[str]) -> Float64[np.ndarray, " documents"]:
    """Returns the SHA-256 of each key, scaled to [0, 1)."""
    digests = (hashlib.sha256(os.fsencode(key)).digest() for key in keys)
    return np.array([int.from_bytes(digest[:6], "big") for digest in digests], np.float64) / 2.0**48


def index_hashes(count: int) -> Float64[np.ndarray, " documents"]:
    """Returns SplitMix64 of 0 .. count - 1, scaled to [0, 1) (Steele, Lea and Flood, 2014)."""
    return _splitmix(np.arange(count, dtype=np.uint64))


def position_hashes(
    key: str, positions: Int64[np.ndarray, " documents"]
) -> Float64[np.ndarray, " documents"]:
    """Returns SplitMix64 of positions in a file, seeded by the SHA-256 of its key, scaled to [0, 1)."""
    origin = int.from_bytes(hashlib.sha256(os.fsencode(key)).digest()[:8], "big")
    return _splitmix(positions.astype(np.uint64) + np.uint64(origin))


def _splitmix(mixed: UInt64[np.ndarray, " _"]) -> Float64[np.ndarray, " _"]:
    # In place, because there may be 10^8 documents.
    mixed += np.uint64(1)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)) / 2.0**53


def held_out(hashes: Float64[np.ndarray, " documents"], fraction: float) -> Bool[np.ndarray, " documents"]:
    """Returns a mask of the documents whose hash is below `fraction`.

    So a document stays on its side when others are added or removed, with two exceptions, so that small corpora have
    both sides. Unless `fraction` is 0, the document of the lowest hash is held out. The one of the highest hash never
    is, and neither is an only document.
    """
    mask = hashes < fraction
    if fraction > 0 and len(hashes):
        mask[np.argmin(hashes)] = True
        mask[np.argmax(hashes)] = False
    return mask
