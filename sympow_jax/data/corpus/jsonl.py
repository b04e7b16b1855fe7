"""Reads one field of JSON lines, plain or compressed."""

import bz2
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sympow_jax import extras, spelling
from sympow_jax.data import files
from sympow_jax.data.corpus import pieces

with extras.required("corpora", __name__):
    import zstandard

__all__ = ["Reader", "holds_text"]

# Bytes read at a time. Of a compressed file, each text that they decompress to is in one piece.
_BYTES, _COMPRESSED_BYTES = 1 << 18, 1 << 14
_MAX_LINE_BYTES = 1 << 28

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),
}
_CORRUPT = (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError)

# A line, the byte of the text at which it starts, and the byte of the file up to which was read before.
type _Line = tuple[bytes, int, int]


def _texts(file: files.File) -> Iterator[tuple[bytes, int]]:
    """Yields the texts that blocks of a compressed file decompress to, and the byte at which each block starts."""
    suffix = pieces.compression(file.path) or ""
    decompressor: Any = None  # between two compressed frames
    with files.errors(file.path):
        stream = files.open_file(file.path)
    with stream:
        for start in range(0, file.size, _COMPRESSED_BYTES):
            with files.errors(file.path):
                data = stream.read(min(_COMPRESSED_BYTES, file.size - start))
            if not data:
                raise ValueError(
                    f"{file.path} ends at byte {start} of {file.size}; it has changed; start again"
                )
            text = b""
            try:
                while data:
                    # Between frames there may be padding.
                    if decompressor is None and not (data := data.lstrip(b"\0")):
                        break
                    decompressor = decompressor or _DECOMPRESSORS[suffix]()
                    text += decompressor.decompress(data)
                    data = b""
                    if decompressor.eof:
                        data, decompressor = decompressor.unused_data, None
            except _CORRUPT as error:
                raise ValueError(
                    f"{file.path} is corrupt before byte {start + _COMPRESSED_BYTES}: {spelling.one_line(error)}; copy "
                    f"or make the file again"
                ) from error
            yield text, start
    if decompressor is not None:
        raise ValueError(
            f"{file.path} is truncated: its last compressed frame has no end; copy or make the file again"
        )


def _bytes(file: files.File, start: int) -> Iterator[tuple[bytes, int]]:
    """Yields blocks of a plain file from byte `start`, and the byte at which each starts."""
    with files.errors(file.path):
        stream = files.open_file(file.path)
    with stream:
        while start < file.size:
            with files.errors(file.path):
                if stream.tell() != start:
                    stream.seek(start)
                data = stream.read(min(_BYTES, file.size - start))
            if not data:
                raise ValueError(
                    f"{file.path} has fewer than the {file.size} bytes that it had; it has changed; start again"
                )
            yield data, start
            start += len(data)


def _lines(file: files.File, blocks: Iterator[tuple[bytes, int]], start: int) -> Iterator[_Line]:
    """Yields the lines of a text that begins at byte `start`, without blank ones."""
    rest: list[bytes] = []  # of the line that is not complete
    length = place = 0
    for text, block in blocks:
        first, *others = text.split(b"\n")
        if not rest:
            place = block
        rest.append(first)
        length += len(first)
        if length > _MAX_LINE_BYTES:
            raise ValueError(
                f"{file.path} has more than {_MAX_LINE_BYTES} bytes without the end of a line after byte {start}; the "
                f"file must have one JSON object per line"
            )
        for other in others:
            if line := b"".join(rest).strip():
                yield line, start, place
            start += length + 1
            rest, length, place = [other], len(other), block
    if line := b"".join(rest).strip():
        yield line, start, place


def _pieces(file: files.File, count: int, index: int) -> Iterator[tuple[int, _Line]]:
    """Yields lines and the pieces that they are in, from piece `index` of a plain file, or from the first."""
    if pieces.compression(file.path):
        lines = _lines(file, _texts(file), 0)
    else:
        # From the byte before the piece, which tells whether a line starts with it: the first line is of another piece.
        begin = max(index * file.size // count - 1, 0)
        found = _lines(file, _bytes(file, begin), begin)
        lines = ((line, start, start) for line, start, _ in found if not begin or start > begin)
    for line in lines:
        # The last piece whose first byte, rounded as `begin` is, is not after this byte.
        yield ((line[2] + 1) * count - 1) // file.size, line


def _value(line: bytes, column: str, name: str) -> pieces.Document | None:
    """Returns the text or the ids in the field `column` of a line; None for null."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = spelling.one_line(error)
        raise ValueError(f"{name} is not JSON: {reason}; correct the line, or leave it out") from None
    if not isinstance(record, dict):
        raise ValueError(
            f"{name} is not an object with fields; write lines such as {{{json.dumps(column)}: ...}}"
        )
    if column not in record:
        fields = spelling.listed(map(repr, record))
        raise ValueError(f"{name} has no field {column!r}: there are {fields}; name one of them")
    value = record[column]
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} has text that is not Unicode: {error.reason}; correct the line"
            ) from None
    if isinstance(value, list):
        return pieces.as_ids(np.array(value, object), name)
    raise ValueError(
        f"{name}: {column!r} is of type {type(value).__name__}; it must be text, or a list of token ids"
    )


def _name(path: str, start: int) -> str:
    return f"{path} (line at byte {start})"


def holds_text(file: files.File, column: str) -> bool:
    """Returns True if the first line that is not null holds text, False if it holds token ids.

    Raises:
        ValueError: the file cannot be read, or a line up to that one is not JSON or has no such field, or the field
            holds something else.
    """
    for _, (line, start, _) in _pieces(file, 1, 0):
        value = _value(line, column, _name(file.path, start))
        if value is not None:
            return isinstance(value, bytes)
    raise ValueError(f"{file.path} has no documents; remove it, or make it again")


class Reader:
    """Reader of pieces of files of JSON lines, from one field that holds text or a list of token ids.

    A piece of a plain file has the lines that start in its range of bytes. A piece of a compressed file has those that
    start in what its range of compressed bytes decompresses to, roughly: a compressed file is read from its start, and
    read on if its pieces are read in order.
    """

    def __init__(self, column: str, *, texts: bool):
        self._column, self._texts = column, texts
        self._file: tuple[files.File, int] | None = None
        self._lines: Iterator[tuple[int, _Line]] = iter(())
        self._ahead: tuple[int, _Line] | None = None  # first line that is not in a piece that was read

    def read(self, piece: pieces.Piece) -> pieces.Block:
        """Returns the documents of a piece.

        Raises:
            ValueError: the file is corrupt or cannot be read, or a line is not JSON, or has no such field, or the field
                is neither null nor of the type that is read, or has an id outside 0 .. 2^31 - 1, or has more than 2^28
                bytes.
        """
        file, path = piece.file, piece.file.path
        positions: list[int] = []
        documents: list[pieces.Document] = []
        ahead, self._ahead = self._ahead, None  # so that after an error the file is read anew
        continues = pieces.compression(path) and self._file == (file, piece.count)
        if not continues or ahead is None or ahead[0] > piece.index:
            self._lines = _pieces(file, piece.count, piece.index)
            ahead = next(self._lines, None)
        self._file = (file, piece.count)
        while ahead is not None and ahead[0] <= piece.index:
            number, (line, start, _) = ahead
            if number == piece.index:
                document = _value(line, self._column, _name(path, start))
                if document is not None and len(document):
                    if isinstance(document, bytes) != self._texts:
                        kind, first = pieces.KINDS[not self._texts], pieces.KINDS[self._texts]
                        raise ValueError(
                            f"{_name(path, start)}: {self._column!r} is {kind}, but {first} in the first document; all "
                            f"must be of one type"
                        )
                    positions.append(start)
                    documents.append(document)
            ahead = next(self._lines, None)
        self._ahead = ahead
        return pieces.Block(path, "line at byte", np.array(positions, np.int64), documents)
