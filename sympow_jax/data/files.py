"""Finds the files that a setting names, and splits documents into training and held-out ones."""

import contextlib
import dataclasses
import fnmatch
import glob
import hashlib
import os
import pathlib
import posixpath
import re
from collections.abc import Buffer, Callable, Collection, Iterable, Iterator, Sequence
from typing import BinaryIO

import numpy as np
from jaxtyping import Bool, Int64

from sympow_jax import config as config_lib
from sympow_jax import extras, spelling

_SAMPLES = 64
_SAMPLE_BYTES = 1 << 12
# Characters of an error of a file system that are shown. Signed addresses have a thousand.
_MAX_REASON = 300


@dataclasses.dataclass(frozen=True)
class File:
    """A file and its key.

    Attributes:
        path: local path, or URL such as `s3://...` or `hf://datasets/...`.
        key: path relative to the folder, or to the fixed part of the glob, that matched the file. Order and hold-out
            depend on it only, so that a moved folder is the same data. The query of an HTTP address is not in it.
        size: number of bytes.
        named: whether a path names the file, and not a folder or glob that holds it.
    """

    path: str
    key: str
    size: int
    named: bool = dataclasses.field(default=False, kw_only=True)

    @classmethod
    def below(cls, root: str, path: str, *, named: bool = False) -> "File":
        """Returns the file at a local path, whose key is relative to `root`."""
        key = pathlib.Path(os.path.relpath(path, root)).as_posix()
        return cls(path, key, os.path.getsize(path), named=named)


@contextlib.contextmanager
def errors(place: str) -> Iterator[None]:
    """Turns an error of a file system, or of a reader of a format, into a ValueError that names `place`."""
    remote = "://" in place
    try:
        yield
    except MemoryError:
        raise
    except FileNotFoundError as error:
        # A server does not tell those who may not read a file that it exists.
        access = ", or check your access to it" if remote else ""
        raise ValueError(f"{place}: there is no such file or folder; correct the path{access}") from error
    except Exception as error:  # each file system raises the errors of its own network library
        reason = spelling.cut(str(error), _MAX_REASON) or type(error).__name__
        remedy = "; check the network and your access to it, or name a local copy"
        if isinstance(error, ImportError):  # which says what to install
            remedy = ""
        elif not remote:
            reason = getattr(error, "strerror", None) or reason
            remedy = "; check the file, or make it again"
        raise ValueError(f"cannot read {place}: {reason}{remedy}") from error


def open_file(path: str) -> BinaryIO:
    """Opens a local or remote file, not decompressed."""
    if "://" not in path:
        return open(path, "rb")
    with extras.required("corpora", __name__):
        import fsspec
    return fsspec.open(path, "rb", compression=None).open()


def read(path: str) -> bytes:
    """Returns the content of a file; raises ValueError if it cannot be read."""
    with errors(path), open_file(path) as stream:
        return stream.read()


def below(root: str, *, suffix: str | tuple[str, ...] = "", skip: Collection[str] = ()) -> list[File]:
    """Returns the files below a folder that end in `suffix`, except hidden ones and folders named in `skip`.

    Links to files are followed, and those to folders are not. Raises ValueError if a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise ValueError(f"cannot read the folder {error.filename}: {error.strerror or error}") from error

    matches = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = {x for x in subfolders if not x.startswith(".")} - {"__pycache__", *skip}
        visible = [x for x in names if not x.startswith(".") and x.lower().endswith(suffix)]
        paths = [os.path.join(folder, name) for name in visible]
        # A dangling link is listed but cannot be read.
        matches += [File.below(root, path) for path in paths if os.path.isfile(path)]
    return sorted(matches, key=lambda file: (file.key, file.path))


def _split(pattern: str) -> tuple[str, list[str]]:
    """Returns the fixed part of a path or glob, and the other parts; those of a folder stand for all files below."""
    if os.path.isdir(pattern) or not glob.has_magic(pattern):
        return pattern, ["**", "*"]
    parts = pathlib.Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    # Within a name, `**` means `*`. At the end, `**` stands for all files below.
    rest = [part if part == "**" else re.sub(r"\*+", "*", part) for part in parts[fixed:]]
    rest += ["*"] if rest[-1] == "**" else []
    return os.path.join("", *parts[:fixed]) or ".", rest


def _is_hidden(parts: Iterable[str]) -> bool:
    return any(part.startswith(".") and part != ".." for part in parts)


def location(path: str) -> str:
    """Returns the real path of a file or folder, or its URL, which is the same however the path is written."""
    path = path.rpartition("file://")[2].rstrip("/")  # a cache puts it before a local path too
    return _without_query(path) if "://" in path else os.path.realpath(os.path.expanduser(path))


def _without_query(url: str) -> str:
    """Returns the address of a file without a signature; that of a service whose query names a file stays whole."""
    if not url.startswith(("http://", "https://")):
        return url
    address = url.partition("#")[0]
    path = address.partition("?")[0]
    return path if config_lib.source_of(path) else address


def would_find(path: str, file: str) -> bool:
    """Returns whether a folder or glob would match a file at the real path `file`."""
    path = os.path.expanduser(path.removeprefix("file://"))
    if "://" in path or os.path.isfile(path):
        return False
    root, rest = _split(path)
    key = os.path.relpath(file, os.path.realpath(root))
    # In `fnmatch`, a star crosses folders, as only `**` may.
    same_depth = "**" in rest or len(rest) == 1 + key.count(os.sep)
    outside = key.split(os.sep)[0] == os.pardir
    return not outside and same_depth and fnmatch.fnmatchcase(key, "/".join(rest).replace("**/", "*"))


def find(setting: str, paths: Sequence[str], *, suffix: str | tuple[str, ...] = "") -> list[File]:
    """Returns the files that `paths` name, each once, ordered by key; errors name the `setting` of the paths.

    A path is a file, a folder or a glob, local or a URL of fsspec. A folder stands for its files that end in `suffix`,
    except hidden files and `__pycache__`. In a glob, `**` crosses folders. Neither follows links to folders.

    Raises:
        ValueError: a path matches no file, or a file system cannot be reached.
    """
    matches: dict[str, File] = {}
    paths = [os.path.expanduser(path.removeprefix("file://")) for path in paths]
    # Named files first, so that the key of one does not depend on the folders and patterns that it is in.
    for path in sorted(paths, key=lambda path: not os.path.isfile(path)):
        if "://" in path:
            with errors(f"{setting} {path}"):
                found = _remote(path, suffix)
        elif os.path.isfile(path):
            found = [File.below(os.path.dirname(path) or ".", path, named=True)]
        elif os.path.isdir(path):
            found = below(path, suffix=suffix)
        elif glob.has_magic(path):
            root, rest = _split(path)
            # By pathlib, whose `**` does not follow links to folders. `glob` follows them, around loops too.
            inside = [file for file in pathlib.Path(root).glob("/".join(rest)) if file.is_file()]
            if not _is_hidden(rest):
                inside = [file for file in inside if not _is_hidden(file.relative_to(root).parts)]
            found = [File.below(root, str(file)) for file in inside]
        else:
            raise ValueError(f"{setting}: there is no file or folder {path!r}; correct the path")
        if not found:
            kind = suffix if isinstance(suffix, str) else ", ".join(suffix)
            lack = f"no {kind or 'visible'} file is in" if os.path.isdir(path) else "no file matches"
            raise ValueError(f"{setting}: {lack} {path!r}; correct the path or the pattern")
        for place, file in located(found):
            # Otherwise, a file with two names could be trained on under one name and held out under the other.
            matches.setdefault(place, file)
    return sorted(matches.values(), key=lambda file: (file.key, file.path))


def _remote(path: str, suffix: str | tuple[str, ...]) -> list[File]:
    """Returns the files that a URL stands for, as `find` does."""
    with extras.required("corpora", __name__):
        import fsspec
    if "::" in path and "://" in path.partition("::")[0]:
        raise ValueError("it is in an archive, every piece of which would be read from the start; unpack it")
    system, root = fsspec.url_to_fs(path)
    fixed = _without_query(root)
    if glob.has_magic(fixed) and not system.exists(root):
        parts = root.split("/")
        base = "/".join(parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))])
        found = system.glob(root, detail=True)
    elif (info := system.info(root))["type"] == "directory":
        found, base = system.find(root, detail=True), root
        for name in list(found):
            if not name.lower().endswith(suffix) or _is_hidden(posixpath.relpath(name, root).split("/")):
                del found[name]
    else:
        found, base = {root: info}, posixpath.dirname(fixed)
    matches = []
    for name, entry in found.items():
        if entry["type"] == "file":
            if entry["size"] is None:
                raise ValueError("the server does not say how large the file is")
            key = posixpath.relpath(_without_query(name), base or ".")
            matches.append(File(system.unstrip_protocol(name), key, int(entry["size"])))
    return matches


def located(files: Iterable[File]) -> Iterator[tuple[str, File]]:
    """Yields the `location` of each file and the file."""
    folders: dict[str, str] = {}  # real paths by paths, because each takes several system calls
    for file in files:
        folder, name = os.path.split(file.path)
        if "://" in file.path or os.path.islink(file.path):
            yield location(file.path), file
        else:
            if folder not in folders:
                folders[folder] = os.path.realpath(folder)
            yield os.path.join(folders[folder], name), file


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
        with errors(file.path), open_file(file.path) as stream:
            stream.seek(start)
            total.update(stream.read(_SAMPLE_BYTES))
    return total.hexdigest()


def side(config: config_lib.DataConfig, *, heldout: bool) -> tuple[str, tuple[str, ...]]:
    """Returns the name and the value of the setting whose paths have the training or the held-out documents."""
    if heldout and config.heldout_paths:
        return "data.heldout_paths", config.heldout_paths
    return "data.paths", config.paths


def sides(config: config_lib.DataConfig) -> tuple[bool, ...]:
    """Returns the sides that have paths of their own, held-out ones as True."""
    return (False, True) if config.heldout_paths else (False,)


def on_side(
    config: config_lib.DataConfig, keys: Sequence[str], positions: Int64[np.ndarray, "#n"], *, heldout: bool
) -> Bool[np.ndarray, " n"]:
    """Returns a mask of the documents of one side, as `held_out`; all, if held-out data has paths of its own."""
    out = held_out(keys, positions, config.heldout_fraction)
    return np.ones_like(out) if config.heldout_paths else out == heldout


def held_out(
    keys: Sequence[str], positions: Int64[np.ndarray, "#documents"], fraction: float
) -> Bool[np.ndarray, " documents"]:
    """Returns a mask of the documents whose hash is below `fraction`.

    The hash is a function of a document's file and its position there, so that the document stays on its side when
    other files are added or removed. It is the SHA-256 of the key plus SplitMix64 of the position (Steele, Lea and
    Flood, 2014), which is 0 at position 0. There may be one key or one position for all documents.
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
