"""Folder that holds the finished pieces of an output until all of them are there."""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

import numpy as np

from sympow_jax.config import serialize
from sympow_jax.data.prepare import pieces
from sympow_jax.process import atomic

__all__ = ["Counts", "Folder", "folder_of", "write_piece"]

# A piece begins with three counts: of tokens, of documents and of documents that were left out.
_HEADER_DTYPE = np.dtype("<i8")
_HEADER_NUMBERS = 3
_MANIFEST, _LOCK, _JOINED, _TOKENS, _PIECE = "manifest.json", "lock", "joined.json", "tokens", "piece-"


class Counts(NamedTuple):
    """Numbers of pieces, of their tokens and of their documents."""

    pieces: int = 0
    tokens: int = 0
    documents: int = 0
    left_out: int = 0

    def plus(self, other: "Counts") -> "Counts":
        """Returns the counts of these and other pieces together."""
        return Counts(*map(sum, zip(self, other)))


def folder_of(out: pathlib.Path) -> pathlib.Path:
    """Returns the folder next to `out` that holds its finished pieces."""
    return out.with_name(f".{out.name}.prepare")


@contextlib.contextmanager
def _write_errors(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}; correct this and repeat the command, which continues"
        ) from error


@contextlib.contextmanager
def _durable(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Yields a stream whose content replaces `path` at the end, whole even if the machine loses power then."""
    with _write_errors(path), atomic.replace(path) as draft, draft.open("wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def _piece_path(path: pathlib.Path, index: int) -> pathlib.Path:
    return path / f"{_PIECE}{index:09}"


def _read_counts(path: pathlib.Path, token_bytes: int) -> Counts:
    """Returns the counts that a piece begins with; raises ValueError if its size is not that of its tokens."""
    header = np.fromfile(path, _HEADER_DTYPE, count=_HEADER_NUMBERS)
    if len(header) < _HEADER_NUMBERS or path.stat().st_size != header.nbytes + int(header[0]) * token_bytes:
        raise ValueError(f"{path} is damaged; remove it and repeat the command, which makes it again")
    return Counts(1, *header.tolist())


def write_piece(path: pathlib.Path, index: int, piece: pieces.Tokens) -> None:
    """Writes piece `index` to the folder `path`.

    Raises:
        ValueError: the file cannot be written.
    """
    with _durable(_piece_path(path, index)) as stream:
        header = (len(piece.tokens), piece.documents, piece.left_out)
        stream.write(np.array(header, _HEADER_DTYPE).tobytes())
        stream.write(piece.tokens.tobytes())


class Folder:
    """Finished pieces of an output: the first ones without a gap joined to one file of tokens, later ones as they are.

    Only one process may have it open; others write pieces. Tokens are appended before their counts are saved. After a
    stop, tokens beyond the saved counts are removed.

    Attributes:
        path: the folder.
        counts: counts of all pieces that are there.
    """

    def __init__(self, path: pathlib.Path, token_bytes: int):
        self.path, self._token_bytes = path, token_bytes
        self.counts, self._joined = Counts(), Counts()
        self._waiting: set[int] = set()  # indices of pieces that are counted and not joined

    @property
    def tokens(self) -> pathlib.Path:
        """File of the joined tokens."""
        return self.path / _TOKENS

    @contextlib.contextmanager
    def opened(self, manifest: Mapping[str, Any], count: int) -> Iterator[None]:
        """Locks the folder and restores the progress that it holds; at the end removes it unless a piece was counted.

        Args:
            manifest: flat mapping of all that the pieces depend on.
            count: number of pieces of the output.

        Raises:
            ValueError: another process has the folder open, it holds pieces of another manifest, or it, its lock or
                its file of tokens is a symbolic link.
        """
        with _write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        # What a link leads to would be written to and removed.
        for path in (self.path, self.path / _LOCK, self.tokens):
            if path.is_symlink():
                raise ValueError(f"{path} is a symbolic link; remove it or choose another --out")
        with (self.path / _LOCK).open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{self.path} is used by another process; wait until that has ended"
                ) from None
            except OSError as error:
                raise ValueError(
                    f"cannot lock {self.path}: {error.strerror}; choose an --out on a file system with locks"
                ) from error
            self._check(manifest)
            self._restore(count)
            try:
                yield
            finally:
                self._remove_drafts()
                if not self.counts.pieces:
                    self.remove()

    def finished(self, index: int) -> bool:
        """Returns whether piece `index` is there."""
        return index < self._joined.pieces or _piece_path(self.path, index).exists()

    def add(self, index: int) -> None:
        """Counts piece `index`, which has been written, and joins all pieces that can be joined.

        Raises:
            ValueError: the piece is damaged, or the joined pieces cannot be written.
        """
        self.counts = self.counts.plus(_read_counts(_piece_path(self.path, index), self._token_bytes))
        self._waiting.add(index)
        self._join()

    def _join(self) -> None:
        counts, appended = self._joined, []
        while counts.pieces in self._waiting:
            path = _piece_path(self.path, counts.pieces)
            self._waiting.remove(counts.pieces)
            counts = counts.plus(_read_counts(path, self._token_bytes))
            with _write_errors(self.tokens), path.open("rb") as stream, self.tokens.open("ab") as joined:
                stream.seek(_HEADER_NUMBERS * _HEADER_DTYPE.itemsize)
                shutil.copyfileobj(stream, joined)
                joined.flush()
                os.fsync(joined.fileno())
            appended.append(path)
        if not appended:
            return
        with _durable(self.path / _JOINED) as stream:
            stream.write(json.dumps(counts._asdict()).encode())
        self._joined = counts
        for path in appended:
            path.unlink()

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path)

    def _check(self, manifest: Mapping[str, Any]) -> None:
        """Writes the manifest, or raises ValueError if the folder has another."""
        path = self.path / _MANIFEST
        if not path.exists():
            # A process that was killed may have left a draft of the manifest.
            others = (name for name in os.listdir(self.path) if not name.startswith(f".{_MANIFEST}-"))
            if names := sorted(set(others) - {_LOCK}):
                raise ValueError(
                    f"{self.path} holds {names[0]}, but no {_MANIFEST}; remove the folder or choose another --out"
                )
            with _durable(path) as stream:
                stream.write(json.dumps(manifest, indent=2).encode())
        elif changed := serialize.differences(serialize.read_object(path), manifest):
            raise ValueError(
                f"{self.path} holds part of another output: {changed}; repeat the command as it was, on the "
                f"same files, or remove the folder to start again"
            )

    def _restore(self, count: int) -> None:
        self._remove_drafts()
        if (self.path / _JOINED).exists():
            self._joined = self.counts = self._read_joined()
        with _write_errors(self.tokens), self.tokens.open("ab") as stream:
            stream.truncate(self._joined.tokens * self._token_bytes)
        # An earlier process may have been stopped after it had written the counts.
        for index in range(self._joined.pieces):
            _piece_path(self.path, index).unlink(missing_ok=True)
        for index in range(self._joined.pieces, count):
            if _piece_path(self.path, index).exists():
                self.add(index)

    def _read_joined(self) -> Counts:
        path = self.path / _JOINED
        values = serialize.read_object(path)
        numbers = [values.get(name) for name in Counts._fields]
        whole = len(values) == len(numbers) and all(type(number) is int and number >= 0 for number in numbers)
        size = self.tokens.stat().st_size if self.tokens.exists() else 0
        if not whole or size < values["tokens"] * self._token_bytes:
            raise ValueError(
                f"{path} does not fit the {size} bytes of {self.tokens.name} next to it; remove the folder to start "
                f"again"
            )
        return Counts(**values)

    def _remove_drafts(self) -> None:
        """Removes what processes that were killed had begun to write."""
        for draft in self.path.glob(".*"):
            shutil.rmtree(draft, ignore_errors=True)
