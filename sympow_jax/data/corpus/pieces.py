"""Pieces of files, groups of pieces, and the documents of a piece."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32, Int64, Shaped

from sympow_jax.config import data as data_config
from sympow_jax.data import files

__all__ = [
    "GROUP_BYTES",
    "MOST_STREAMS",
    "Block",
    "Document",
    "Group",
    "Piece",
    "as_ids",
    "compression",
    "grouped",
    "name_of",
    "of_two_kinds",
]

# Bytes of text in a group, roughly. A resumed run reads its group again, and so does a repeated `sympow prepare`.
GROUP_BYTES = 1 << 24
# Streams of training data. A process alone holds at least two groups of each in memory, and waits for one of each
# before its first batch.
MOST_STREAMS = 8

Document = bytes | Int32[np.ndarray, " tokens"]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Piece `index` of `count` of a file. Each document of the file is in exactly one piece.

    `format` is `text`, which is one document, `parquet` or `jsonl`.
    """

    file: files.File
    format: str
    index: int = 0
    count: int = 1

    @property
    def text_bytes(self) -> int:
        """Rough number of bytes of text, on which the cuts of files depend, and so the meaning of saved positions."""
        packed = compression(self.file.path) is not None
        return (
            self.file.size * {"text": 1, "parquet": 2, "jsonl": 4 if packed else 1}[self.format] // self.count
        )


Group = tuple[Piece, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """Documents of one piece of a file, in order, without those that are missing or empty.

    Attributes:
        path: the file.
        unit: what `positions` count, for errors; empty if the file is one document.
        positions: row of each document of parquet, or byte at which its line starts in JSON lines (after
            decompression). It identifies the document in its file, however the file is cut into pieces.
        documents: the text of each document in UTF-8, or its token ids; all are of one kind.
    """

    path: str
    unit: str
    positions: Int64[np.ndarray, " documents"]
    documents: list[Document]

    def name(self, document: int) -> str:
        """Returns the location of a document, for errors."""
        return f"{self.path} ({self.unit} {self.positions[document]})" if self.unit else self.path


def of_two_kinds(place: str, *, texts: bool) -> str:
    """Returns the error of a column whose first document is text or, without `texts`, ids, and another is not."""
    kind, first = ("token ids", "text") if texts else ("text", "token ids")
    return f"{place} holds {kind}, but {first} in the first document; all must be of one type"


def as_ids(values: Shaped[np.ndarray, " tokens"], name: str) -> Int32[np.ndarray, " tokens"]:
    """Returns token ids, which may be Python integers of any size, as int32; errors begin with `name`.

    Raises:
        ValueError: a value is not an integer, or is outside 0 .. 2^31 - 1.
    """
    kind = values.dtype.kind
    if kind not in "iuO" or (kind == "O" and any(type(x) is not int for x in values)):
        raise ValueError(f"{name} has token ids that are not all integers; correct the document")
    for id in (values.min(initial=0), values.max(initial=0)):
        if not 0 <= id < 1 << 31:
            raise ValueError(
                f"{name} has token id {id}; ids are from 0 to {(1 << 31) - 1}; correct the document"
            )
    return values.astype(np.int32)


def compression(path: str) -> str | None:
    """Returns the suffix of a compressed file, such as `.gz`; None for others."""
    name = files.location(path).lower()
    return next((suffix for suffix in data_config.COMPRESSIONS if name.endswith(suffix)), None)


def grouped(found: Iterable[tuple[files.File, str]], text_bytes: int = 0) -> list[Group]:
    """Returns the pieces of files and their formats in order, in groups of about `text_bytes` of text.

    They follow from the sizes of the files, so that no file is opened. Small files that follow each other are one
    group; large ones are several pieces, except for text files, which are one document each. Raises ValueError if a
    file is empty.
    """
    text_bytes = text_bytes or GROUP_BYTES
    groups: list[Group] = []
    space = 0
    for file, format in found:
        if not file.size:
            raise ValueError(f"{file.path} is empty; remove it, or make it again")
        size = Piece(file, format).text_bytes
        count = 1 if format == "text" else -(-size // text_bytes)
        for index in range(count):
            piece = Piece(file, format, index, count)
            if count == 1 and size <= space:
                groups[-1] += (piece,)
                space -= size
            else:
                groups.append((piece,))
                space = text_bytes - size  # negative after a piece of a large file
    return groups


def name_of(group: Sequence[Piece]) -> str:
    """Returns the name of the only file of a group, or those of the first and the last."""
    first, last = group[0].file.path, group[-1].file.path
    return first if first == last else f"{first} to {last}"
