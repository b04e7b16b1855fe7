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

from sympow_jax import atomic
from sympow_jax.config import serialize
from sympow_jax.data.prepare import pieces

__all__ = ["Counts", "Folder", "folder_of", "write_piece"]

_HEADER = np.dtype(
    "<i8"
)  # number of tokens, of documents and of documents left out, before the tokens of a piece
_MANIFEST, _LOCK, _JOINED, _TOKENS = "manifest.json", "lock", "joined.json", "tokens"


class Counts(NamedTuple):
    """Counts of what the first `pieces` pieces hold."""

    pieces: int = 0
    tokens: int = 0
    documents: int = 0
    left_out: int = 0


def folder_of(out: pathlib.Path) -> pathlib.Path:
    """Returns the folder next to `out` that holds its finished pieces."""
    return out.with_name(f".{out.name}.prepare")


@contextlib.contextmanager
def _space_errors(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror}; correct this and repeat the command, which continues"
        ) from error


@contextlib.contextmanager
def _durable(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Yields a stream whose content replaces `path` at the end, also if the machine loses power after that."""
    with _space_errors(path), atomic.replace(path) as draft, draft.open("wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def _piece_path(path: pathlib.Path, index: int) -> pathlib.Path:
    return path / f"piece-{index:09}"


def write_piece(path: pathlib.Path, index: int, piece: pieces.Tokens) -> None:
    """Writes piece `index` to the folder `path`.

    Raises:
        ValueError: the file cannot be written.
    """
    with _durable(_piece_path(path, index)) as stream:
        header = (len(piece.tokens), piece.documents, piece.left_out)
        stream.write(np.array(header, _HEADER).tobytes())
        stream.write(piece.tokens.tobytes())


class Folder:
    """Finished pieces of an output. Those that follow each other from the first one are joined.

    Only one process may have it open; others write pieces. The joined pieces are a file of tokens and the counts of
    what is in it. The counts are written last, so that what a stopped process wrote beyond them is known and removed.
    """

    def __init__(self, path: pathlib.Path, token_bytes: int):
        self.path, self._token_bytes = path, token_bytes
        self.counts = Counts()

    @property
    def tokens(self) -> pathlib.Path:
        """File of the joined tokens."""
        return self.path / _TOKENS

    @contextlib.contextmanager
    def opened(self, manifest: Mapping[str, Any]) -> Iterator[None]:
        """Locks the folder, continues what it holds, and at the end removes it unless it holds pieces.

        Args:
            manifest: flat mapping of all that the pieces depend on.

        Raises:
            ValueError: another process has the folder open, or it holds pieces of another manifest.
        """
        with _space_errors(self.path):
            self.path.mkdir(exist_ok=True)
        with (self.path / _LOCK).open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"{self.path} is used by another process; wait until that has ended"
                ) from None
            self._check(manifest)
            self._restore()
            try:
                yield
            finally:
                self._remove_drafts()
                if not self.counts.pieces and not any(self.path.glob("piece-*")):
                    self.remove()

    def finished(self, index: int) -> bool:
        """Returns whether piece `index` is there."""
        return index < self.counts.pieces or _piece_path(self.path, index).exists()

    def join(self) -> None:
        """Appends the pieces that follow the joined ones to these, and removes their files."""
        counts, appended = self.counts, []
        with _space_errors(self.tokens), self.tokens.open("ab") as joined:
            while (path := _piece_path(self.path, counts.pieces)).exists():
                with path.open("rb") as stream:
                    header = np.frombuffer(stream.read(3 * _HEADER.itemsize), _HEADER)
                    tokens, documents, left_out = header.tolist()
                    shutil.copyfileobj(stream, joined)
                appended.append(path)
                counts = Counts(
                    counts.pieces + 1,
                    counts.tokens + tokens,
                    counts.documents + documents,
                    counts.left_out + left_out,
                )
            joined.flush()
            os.fsync(joined.fileno())
        if not appended:
            return
        with _durable(self.path / _JOINED) as stream:
            stream.write(json.dumps(counts._asdict()).encode())
        self.counts = counts
        for path in appended:
            path.unlink()

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.path)

    def _check(self, manifest: Mapping[str, Any]) -> None:
        """Writes the manifest, or raises ValueError if the folder has another."""
        path = self.path / _MANIFEST
        if not path.exists():
            if names := sorted(set(os.listdir(self.path)) - {_LOCK}):
                raise ValueError(
                    f"{self.path} holds {names[0]}, but no {_MANIFEST}; remove the folder or choose another --out"
                )
            with _durable(path) as stream:
                stream.write(json.dumps(manifest, indent=2).encode())
        elif changed := serialize.differences(serialize.read_object(path), manifest):
            raise ValueError(
                f"{self.path} holds part of another output: {changed}; repeat the command as it was, or remove the "
                f"folder to start again"
            )

    def _restore(self) -> None:
        self._remove_drafts()
        if (self.path / _JOINED).exists():
            self.counts = Counts(**serialize.read_object(self.path / _JOINED))
        with _space_errors(self.tokens), self.tokens.open("ab") as stream:
            stream.truncate(self.counts.tokens * self._token_bytes)
        # Of these, a process was stopped after the counts were written.
        for path in self.path.glob("piece-*"):
            if int(path.name.removeprefix("piece-")) < self.counts.pieces:
                path.unlink()

    def _remove_drafts(self) -> None:
        """Removes what processes that were killed had begun to write."""
        for draft in self.path.glob(".*"):
            shutil.rmtree(draft, ignore_errors=True)
