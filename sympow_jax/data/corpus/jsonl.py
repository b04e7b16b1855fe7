"""Reads one field of JSON lines, plain or compressed."""

import bz2
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zstandard

from sympow_jax import spelling
from sympow_jax.data.corpus import blocks, files

__all__ = ["JsonlReader", "holds_text"]

_READ_BYTES = 1 << 14
# Bytes read at a time of formats of which `_READ_BYTES` can decompress to more than a third of a gigabyte.
_COMPRESSED_BYTES = {".bz2": 1 << 8, ".zst": 1 << 12}
_MAX_LINE_BYTES = 1 << 28

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}
# Text in zstandard's error when a frame needs a larger window than its default limit of 128 MB.
_LARGE_WINDOW = "too much memory"
_CORRUPT = (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError)


def _name(url: str, start: int) -> str:
    return f"{url} (line at byte {start})"


def _value(line: bytes, column: str, name: str) -> blocks.Document | None:
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
        return blocks.as_ids(np.array(value, object), name)
    raise ValueError(
        f"{name}: {column!r} is of type {type(value).__name__}; it must be text, or a list of token ids"
    )


class JsonlReader:
    """Reader of pieces of files of JSON lines, from one field that holds text or a list of token ids.

    A piece of a plain file has the lines that start in its range of bytes. A piece of a compressed file has those that
    start in what its range of compressed bytes decompresses to. A reader decompresses a file once if it reads pieces in
    order, of which it may skip some; otherwise, it starts again for each piece.
    """

    def __init__(self, column: str, *, texts: bool):
        self._column, self._texts = column, texts
        self._last: _Decompressed | None = None

    def read(self, piece: files.Piece) -> blocks.Block:
        """Returns the documents of a piece.

        Raises:
            ValueError: the file is corrupt or cannot be read, or a line is not JSON, or has no such field, or the field
                is neither null nor of the type that is read, or has an id outside 0 .. 2^31 - 1. Or a line has more
                than 2^28 bytes, or the piece decompresses to more than a GiB.
        """
        url = piece.file.url
        positions: list[int] = []
        documents: list[blocks.Document] = []
        for start, line in self._lines(piece):
            document = _value(line, self._column, _name(url, start))
            if document is None or not len(document):
                continue
            if isinstance(document, bytes) != self._texts:
                kind, first = blocks.KINDS[not self._texts], blocks.KINDS[self._texts]
                raise ValueError(
                    f"{_name(url, start)}: {self._column!r} is {kind}, but {first} in the first document; all must "
                    f"be of one type"
                )
            positions.append(start)
            documents.append(document)
        return blocks.Block(url, "line at byte", np.array(positions, np.int64), documents)

    def _lines(self, piece: files.Piece) -> Iterator[tuple[int, bytes]]:
        if piece.file.compression is None:
            return _plain_lines(piece)
        if self._last is None or not self._last.reaches(piece):
            self._last = _Decompressed(piece.file, piece.count)
        return self._last.lines(piece.index)


def holds_text(file: files.CorpusFile, column: str) -> bool:
    """Returns True if the first line that is not null holds text, False if it holds token ids.

    Raises:
        ValueError: the file cannot be read, or a line up to that one is not JSON or has no such field, or the field
            holds something else.
    """
    # Small pieces, because the first line decides.
    reader, count = JsonlReader(column, texts=True), -(-file.size // _READ_BYTES)
    for index in range(count):
        for start, line in reader._lines(files.Piece(file, index, count)):
            value = _value(line, column, _name(file.url, start))
            if value is not None:
                return isinstance(value, bytes)
    raise ValueError(f"{file.url} has no documents; remove it, or make it again")


def _split(text: bytes, start: int) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a text and the byte at which each starts, without blank lines."""
    # The list that `split` returns would take a hundred times the memory of a text that is all line ends.
    for line in re.finditer(rb"[^\n]+", text):
        if not line[0].isspace():
            yield start + line.start(), line[0]


def _check_line(url: str, length: int, end: int) -> None:
    """Raises ValueError if the `length` bytes up to byte `end`, which have no end of a line, are too many."""
    if length > _MAX_LINE_BYTES:
        raise ValueError(
            f"{url} has more than {_MAX_LINE_BYTES} bytes without the end of a line before byte {end}; the file must "
            f"have one JSON object per line"
        )


def _plain_lines(piece: files.Piece) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that start in the piece's range of bytes."""
    url, size = piece.file.url, piece.file.size
    start, stop = piece.index * size // piece.count, (piece.index + 1) * size // piece.count
    with files.CorpusStream(url) as stream:
        # The byte before the range tells whether a line starts with the range.
        begin = max(start - 1, 0)
        stream.seek(begin)
        parts = [stream.read(stop - begin)]
        first = parts[0].find(b"\n") + 1 if start else 0
        if len(parts[0]) < stop - begin:
            raise ValueError(
                f"{url} has fewer than the {size} bytes that it had; it has changed; start again"
            )
        if (start and not first) or begin + first >= stop:
            return
        # Read on to the end of the last line, which may be in the ranges of the next pieces.
        extra = 0
        while not parts[-1].endswith(b"\n"):
            more = stream.read(_READ_BYTES)
            parts.append(more[: more.find(b"\n") + 1] or more)
            extra += len(parts[-1])
            _check_line(url, extra, stop + extra)
            if not more:
                break
    yield from _split(b"".join(parts)[first:], begin + first)


class _Decompressed:
    """Text of a compressed file, whose pieces are read in order; pieces may be skipped.

    Offsets are bytes of the decompressed text.
    """

    def __init__(self, file: files.CorpusFile, count: int):
        self._file, self._count = file, count
        self._stream = files.CorpusStream(file.url)
        self._decompressor: Any = None  # between two compressed frames
        self._compressed = 0  # bytes read of the file
        self._ends: list[int] = []  # offset of the end of each piece so far
        self._text, self._start = bytearray(), 0  # text in memory, and its offset
        self._next = 0  # next piece

    def reaches(self, piece: files.Piece) -> bool:
        """Returns whether a piece can be read without starting again."""
        return (piece.file, piece.count) == (self._file, self._count) and self._next <= piece.index

    def lines(self, index: int) -> Iterator[tuple[int, bytes]]:
        """Returns the lines that start in piece `index`, and their offsets."""
        self._next = index + 1
        while len(self._ends) < index:
            self._read()
            self._forget(self._stop - 1)
        start = self._ends[index - 1] if index else 0
        self._forget(start - 1)
        while len(self._ends) <= index:
            self._read()
            if self._stop - start > blocks.MAX_PIECE_BYTES:
                raise ValueError(
                    f"{self._file.url} decompresses to more than {blocks.MAX_PIECE_BYTES} bytes after byte {start}, "
                    f"far more than text does; check the file, or decompress it"
                )
        first, stop = self._line_start(start), self._line_start(self._ends[index])
        return _split(bytes(self._text[first - self._start : stop - self._start]), first)

    @property
    def _stop(self) -> int:
        return self._start + len(self._text)

    def _forget(self, offset: int) -> None:
        if offset > self._start:
            del self._text[: offset - self._start]
            self._start = offset

    def _line_start(self, offset: int) -> int:
        """Returns the offset of the first line that starts at `offset` or after it."""
        if offset == 0:
            return 0
        searched = offset - 1
        while True:
            found = self._text.find(b"\n", searched - self._start)
            if found >= 0:
                return self._start + found + 1
            searched = self._stop
            if len(self._ends) == self._count:
                return self._stop
            _check_line(self._file.url, self._stop - offset, self._stop)
            self._read()

    def _read(self) -> None:
        """Decompresses some more, at most to the end of the next piece."""
        size, url = self._file.size, self._file.url
        end = (len(self._ends) + 1) * size // self._count
        count = _COMPRESSED_BYTES.get(self._file.compression or "", _READ_BYTES)
        data = self._stream.read(min(count, end - self._compressed))
        self._compressed += len(data)
        if not data:
            raise ValueError(f"{url} ends at byte {self._compressed} of {size}; it has changed; start again")
        try:
            while data:
                data = self._decompress(data)
        except _CORRUPT as error:
            reason = spelling.one_line(error)
            if _LARGE_WINDOW in reason:
                raise ValueError(
                    f"{url} needs more than 128 MB to decompress; compress it again without --long"
                ) from error
            raise ValueError(
                f"{url} is corrupt before compressed byte {self._compressed}: {reason}; copy or make it again"
            ) from error
        if self._compressed == size and self._decompressor is not None:
            raise ValueError(f"{url} is truncated: its last frame has no end; copy or make it again")
        if self._compressed == end:
            self._ends.append(self._stop)

    def _decompress(self, data: bytes) -> bytes:
        """Decompresses `data`, and returns what follows the end of the frame."""
        if self._decompressor is None:
            data = data.lstrip(b"\0")  # padding between frames
            if not data:
                return b""
            self._decompressor = _DECOMPRESSORS[self._file.compression or ""]()
        self._text += self._decompressor.decompress(data)
        if not self._decompressor.eof:
            return b""
        rest, self._decompressor = self._decompressor.unused_data, None
        return rest
