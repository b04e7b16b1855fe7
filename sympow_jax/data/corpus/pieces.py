"""Pieces of files and groups of pieces, which are read and tokenized together."""

import dataclasses
from collections.abc import Iterable, Sequence

from sympow_jax.config import data as data_lib
from sympow_jax.data import files

# Bytes of text in a group, roughly. A resumed run reads its group again, and so does a repeated `sympow prepare`.
GROUP_BYTES = 1 << 24
# Streams of training data. A process alone holds at least two groups of each in memory, and waits for one of each
# before its first batch.
MOST_STREAMS = 8


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

    def name(self, position: int) -> str:
        """Returns the location of a document, for errors.

        A position is a row of parquet, or the byte at which a line starts in JSON lines, after decompression. It
        identifies the document in its file, however the file is cut into pieces.
        """
        unit = {"text": "", "parquet": "row", "jsonl": "line at byte"}[self.format]
        return f"{self.file.path} ({unit} {position})" if unit else self.file.path


Group = tuple[Piece, ...]


def compression(path: str) -> str | None:
    """Returns the suffix of a compressed file, such as `.gz`; None for others."""
    name = files.location(path).lower()
    return next((suffix for suffix in data_lib.COMPRESSIONS if name.endswith(suffix)), None)


def grouped(found: Iterable[tuple[files.File, str]], text_bytes: int = 0) -> list[Group]:
    """Returns the pieces of files and their formats in order, in groups of about `text_bytes` of text.

    They follow from the sizes of the files, so that no file is opened. Small files that follow each other are one
    group; large ones are several pieces, except for text files. Raises ValueError if a file is empty.
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
