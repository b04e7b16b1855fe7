"""Reads one field of JSON lines, plain or compressed."""

import bz2
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from sympow_jax import extras, spelling
from sympow_jax.data import files
from sympow_jax.data.corpus import pieces

with extras.required("corpora", __name__):
    import zstandard

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
_REMEDY = "copy or make the file again"


def _blocks(file: files.File, start: int) -> Iterator[tuple[bytes, int]]:
    """Yields parts of the text, and the byte of the file at which each begins; of a plain file, from byte `start`."""
    path, suffix = file.path, pieces.compression(file.path)
    decompressor: Any = None  # between two compressed frames
    with files.errors(path):
        stream = files.open_file(path)
    with stream:
        while start < file.size:
            with files.errors(path):
                if stream.tell() != start:
                    stream.seek(start)
                data = stream.read(min(_COMPRESSED_BYTES if suffix else _BYTES, file.size - start))
            if not data:
                raise ValueError(f"{path} ends at byte {start} of {file.size}; it has changed; start again")
            begin, start = start, start + len(data)
            if suffix is None:
                yield data, begin
                continue
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
                reason = spelling.one_line(error)
                raise ValueError(f"{path} is corrupt before byte {start}: {reason}; {_REMEDY}") from error
            yield text, begin
    if decompressor is not None:
        raise ValueError(f"{path} is truncated: its last compressed frame has no end; {_REMEDY}")


class _Line(NamedTuple):
    """A line that is not blank, the byte of the text at which it starts, and the piece that it is in."""

    content: bytes
    start: int
    piece: int


def _lines(piece: pieces.Piece) -> Iterator[_Line]:
    """Yields the lines from the start of a piece to the end of its file; of a compressed file, all lines."""
    file, count = piece.file, piece.count
    compressed = pieces.compression(file.path) is not None
    # From the byte before the piece, which tells whether a line starts with it: the first line is of another piece.
    begin = 0 if compressed else max(piece.index * file.size // count - 1, 0)
    rest: list[bytes] = []  # of the line that is not complete
    length, start, place = 0, begin, begin
    for text, block in itertools.chain(_blocks(file, begin), [(b"\n", file.size)]):
        first, *others = text.split(b"\n")
        rest.append(first)
        length += len(first)
        if length > _MAX_LINE_BYTES:
            raise ValueError(
                f"{file.path} has more than {_MAX_LINE_BYTES} bytes without the end of a line after byte {start}; it "
                f"must have one JSON object per line"
            )
        for other in others:
            if (line := b"".join(rest).strip()) and (not begin or start > begin):
                # The last piece whose first byte, rounded as `begin` is, is not after this byte.
                yield _Line(line, start, (((place if compressed else start) + 1) * count - 1) // file.size)
            start += length + 1
            rest, length, place = [other], len(other), block


def _value(line: _Line, column: str, name: str) -> bytes | np.ndarray | None:
    """Returns the text or the ids in the field `column` of a line, which errors call `name`; None for null."""
    try:
        record = json.loads(line.content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = spelling.one_line(error)
        raise ValueError(f"{name} is not JSON: {reason}; correct the line, or leave it out") from None
    if not isinstance(record, dict) or column not in record:
        fields = spelling.listed(map(repr, record)) if isinstance(record, dict) else "no fields"
        raise ValueError(
            f"{name} has no field {column!r}: there are {fields}; every line must be an object with it"
        )
    value = record[column]
    if value is None:
        return None
    if isinstance(value, list):
        return np.array(value, object)
    if not isinstance(value, str):
        kind = type(value).__name__
        raise ValueError(f"{name}: {column!r} is of type {kind}; it must be text, or a list of token ids")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} has text that is not Unicode: {error.reason}; correct the line") from None


def holds_text(file: files.File, column: str) -> bool:
    """Returns True if the first line that is not null holds text, False if it holds token ids.

    Raises:
        ValueError: the file cannot be read, or a line up to that one is not JSON or does not have this field.
    """
    piece = pieces.Piece(file, "jsonl")
    for line in _lines(piece):
        value = _value(line, column, piece.name(line.start))
        if value is not None:
            return isinstance(value, bytes)
    raise ValueError(f"{file.path} has no documents; remove it, or make it again")


class Reader:
    """Reader of pieces of files of JSON lines, from one field that holds text or a list of token ids.

    A piece of a plain file has the lines that start in its range of bytes. A piece of a compressed file has those that
    start in what its range of compressed bytes decompresses to, roughly: a compressed file is read from its start, and
    read on if its pieces are read in order.
    """

    def __init__(self, column: str):
        self._column = column
        # Of compressed files in pieces: the first line that is not in a piece that was read, and those after it.
        self._open: dict[tuple[files.File, int], tuple[_Line, Iterator[_Line]]] = {}

    def read(self, piece: pieces.Piece) -> tuple[list[int], list[bytes | np.ndarray]]:
        """Returns the positions of the documents of a piece that are not empty, and their texts or ids.

        Raises:
            ValueError: the file is corrupt or cannot be read, or a line is not JSON, has more than 2^28 bytes, or does
                not have null, text or a list in this field.
        """
        positions: list[int] = []
        documents: list[bytes | np.ndarray] = []
        # Removed, so that after an error the file is read anew.
        ahead, lines = self._open.pop((piece.file, piece.count), (None, iter(())))
        if ahead is None or ahead.piece > piece.index:
            lines = _lines(piece)
            ahead = next(lines, None)
        while ahead is not None and ahead.piece <= piece.index:
            if ahead.piece == piece.index:
                document = _value(ahead, self._column, piece.name(ahead.start))
                if document is not None and len(document):
                    positions.append(ahead.start)
                    documents.append(document)
            ahead = next(lines, None)
        if ahead is not None and pieces.compression(piece.file.path):
            self._open[piece.file, piece.count] = ahead, lines
            # Each stream of training data reads one file at a time.
            if len(self._open) > pieces.MOST_STREAMS:
                del self._open[next(iter(self._open))]  # the one that was not read for longest
        return positions, documents
