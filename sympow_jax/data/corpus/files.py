"""Files of a corpus, on any file system that fsspec knows, and the pieces that they are read in."""

import contextlib
import dataclasses
import glob
import io
import os
import posixpath
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec

from sympow_jax import spelling
from sympow_jax.config import data as data_config

__all__ = ["CorpusFile", "CorpusStream", "Piece", "find", "pieces"]

# Characters of an error of a file system that are shown. Signed addresses have a thousand.
_MAX_REASON = 300

# Bytes of text in a byte of a file, roughly. Pieces depend on it, and with them the meaning of saved positions.
_EXPANSION = {"parquet": 2, "compressed": 4, "plain": 1}


@dataclasses.dataclass(frozen=True)
class CorpusFile:
    """A file of a corpus.

    Attributes:
        url: local path, or URL such as `s3://...` or `hf://datasets/...`.
        key: path relative to the folder, or to the fixed part of the glob, that matched the file. Order and hold-out
            depend on it only, so that they do not change when the folder is moved. Without the query of an HTTP
            address, which may be a signature.
        size: number of bytes.
        format: `parquet` or `jsonl`.
    """

    url: str
    key: str
    size: int
    format: str

    @property
    def location(self) -> str:
        """A local path without links, which is the same whatever path led to the file, or the URL."""
        url = self.url.removeprefix("file://")  # which a cache puts before local paths
        return _without_query(url) if "://" in url else os.path.realpath(url)

    @property
    def compression(self) -> str | None:
        """Suffix of a compressed JSON lines file, such as `.gz`; None for plain ones and for parquet."""
        suffix = posixpath.splitext(_without_query(self.url))[1].lower()
        return suffix if self.format == "jsonl" and suffix in data_config.COMPRESSIONS else None

    @property
    def text_bytes(self) -> int:
        """Rough number of bytes of text."""
        kind = "parquet" if self.format == "parquet" else "compressed" if self.compression else "plain"
        return self.size * _EXPANSION[kind]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Piece `index` of `count` of a file. Each document of the file is in exactly one piece."""

    file: CorpusFile
    index: int
    count: int


def _without_query(url: str) -> str:
    """Returns the address of a file without a signature; that of a service whose query names a file stays whole."""
    if not url.startswith(("http://", "https://")):
        return url
    address = url.partition("#")[0]
    path = address.partition("?")[0]
    return path if data_config.source_of(path) else address


@contextlib.contextmanager
def _errors(place: str) -> Iterator[None]:
    """Turns an error of a file system into a ValueError that names the file, or the setting and the path."""
    try:
        yield
    except MemoryError:
        raise
    except FileNotFoundError as error:
        # A server does not tell those who may not read a file that it exists.
        remedy = "correct the path, or check your access to it" if "://" in place else "correct the path"
        raise ValueError(f"{place}: there is no such file or folder; {remedy}") from error
    except ImportError as error:  # whose message says what to install
        raise ValueError(f"cannot read {place}: {error}") from error
    except Exception as error:  # each file system raises the errors of its own network library
        reason = spelling.cut(str(error), _MAX_REASON) or type(error).__name__
        remedy = "the network and your access to it, or name a local copy" if "://" in place else "the file"
        raise ValueError(f"cannot read {place}: {reason}; check {remedy}") from error


class CorpusStream(io.BufferedIOBase):
    """The bytes of a local or remote file, not decompressed.

    All methods raise ValueErrors that name the file, because a reader of a format would take an error of a file
    system for that of a corrupt file.
    """

    def __init__(self, url: str):
        self._url = url
        self._file: Any = io.BytesIO()  # to close, if the file cannot be opened
        with _errors(url):
            self._file = fsspec.open(url, "rb", compression=None).open()

    def read(self, size: int | None = -1, /) -> bytes:
        """Returns up to `size` bytes, or all that follow.

        Raises:
            ValueError: the file system or the network fails.
        """
        with _errors(self._url):
            return self._file.read(-1 if size is None else size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Moves to another byte, and returns its offset."""
        with _errors(self._url):
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Returns the offset of the next byte."""
        return self._file.tell()

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def close(self) -> None:
        """Closes the file."""
        if not self.closed:
            self._file.close()
        super().close()


def find(setting: str, paths: Sequence[str], *, format: str) -> list[CorpusFile]:
    """Returns the files that `paths` name, each once, ordered by key.

    A path is a file, a folder or a glob, local or a URL. A folder stands for its files whose name has a suffix of
    `format`, except hidden ones; a glob for all files that it matches. `setting` is the name of the setting that holds
    the paths, for errors.

    Raises:
        ValueError: a path matches no file or is in an archive, a file is empty, or a file system cannot be reached.
    """
    matches: dict[str, CorpusFile] = {}
    for path in paths:
        if "://" in path.partition("::")[0] and "::" in path:
            # Every piece would read the archive from its start.
            raise ValueError(f"{setting}: {path!r} is in an archive, which is not read; unpack the archive")
        with _errors(f"{setting} {path}"):
            files = list(_matching(path, format))
        if not files:
            suffixes = ", ".join(data_config.SUFFIXES[format])
            suffixes += ", also compressed" if format == "jsonl" else ""
            raise ValueError(
                f"{setting}: no {format} file matches {path!r}; correct the path or the pattern (a folder stands for "
                f"its files that end in {suffixes})"
            )
        for file in files:
            if not file.size:
                raise ValueError(f"{file.url} is empty; remove it, or make it again")
            # Otherwise, a file with two names could be trained on under one name and held out under the other.
            matches.setdefault(file.location, file)
    return sorted(matches.values(), key=lambda file: (file.key, file.url))


def _matching(path: str, format: str) -> Iterator[CorpusFile]:
    system, root = fsspec.url_to_fs(path)
    try:
        info = system.info(root)
    except FileNotFoundError:
        if not glob.has_magic(_without_query(root)):
            raise
        info = None
    if info is None:
        found = system.glob(root, detail=True)
        base = _fixed_part(root)
    elif info["type"] == "directory":
        if _is_local(system):
            _require_readable(root)
        found, base = system.find(root, detail=True), root
        found = {name: entry for name, entry in found.items() if _belongs(name, root, format)}
    else:
        found, base = {root: info}, posixpath.dirname(_without_query(root))
    for name, entry in found.items():
        # Listings of local folders have the type of a link instead of that of its target, which may not exist.
        is_file = os.path.isfile(name) if entry.get("islink") else entry["type"] == "file"
        if not is_file:
            continue
        url = name if _is_local(system) else system.unstrip_protocol(name)
        if entry["size"] is None:
            raise ValueError("the server does not say how large the file is")
        key = posixpath.relpath(_without_query(name), base or ".")
        yield CorpusFile(url, key, int(entry["size"]), format)


def _require_readable(root: str) -> None:
    """Raises OSError for a folder below `root` that cannot be read, which fsspec leaves out without a word."""

    def refuse(error: OSError) -> None:
        raise error

    for _, subfolders, _ in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]


def _is_local(system: Any) -> bool:
    return "file" in ([system.protocol] if isinstance(system.protocol, str) else system.protocol)


def _fixed_part(pattern: str) -> str:
    """Returns the folders of a glob before the first that has a wildcard."""
    parts = pattern.split("/")
    return "/".join(parts[: next(i for i, part in enumerate(parts) if glob.has_magic(part))])


def _belongs(name: str, root: str, format: str) -> bool:
    hidden = any(part.startswith(".") for part in posixpath.relpath(name, root).split("/"))
    return not hidden and data_config.source_of(name) == format


def pieces(files: Sequence[CorpusFile], text_bytes: int) -> list[Piece]:
    """Returns the pieces of all files in order, each of about `text_bytes` of text.

    They follow from the sizes of the files, so that no file is opened.
    """
    found = []
    for file in files:
        count = -(-file.text_bytes // text_bytes)
        found += [Piece(file, index, count) for index in range(count)]
    return found
