"""Documents of a piece of a file, and checks of their ids."""

import dataclasses

import numpy as np
from jaxtyping import Int32, Int64, Shaped

__all__ = ["KINDS", "MAX_PIECE_BYTES", "Block", "Document", "as_ids"]

# Most bytes that a piece of a file may decode to. A small file can expand without limit.
MAX_PIECE_BYTES = 1 << 30

KINDS = {True: "text", False: "token ids"}  # contents of a column, by whether they are text

Document = bytes | Int32[np.ndarray, " tokens"]


@dataclasses.dataclass(frozen=True)
class Block:
    """Documents of one piece of a file, in order, without those that are missing or empty.

    Attributes:
        url: the file.
        unit: what `positions` count, for errors.
        positions: row of each document in a parquet file, or byte at which its line starts in a JSON lines file (after
            decompression). It identifies the document in its file, however the file is cut into pieces.
        documents: the text of each document in UTF-8, or its token ids; all are of one kind.
    """

    url: str
    unit: str
    positions: Int64[np.ndarray, " documents"]
    documents: list[Document]

    def name(self, document: int) -> str:
        """Returns the location of a document, for errors."""
        return f"{self.url} ({self.unit} {self.positions[document]})"


def as_ids(values: Shaped[np.ndarray, " tokens"], name: str) -> Int32[np.ndarray, " tokens"]:
    """Returns token ids, which may be an array of Python integers of any size, as int32.

    Raises:
        ValueError: a value is not an integer, or is outside 0 .. 2^31 - 1. The error begins with `name`.
    """
    if values.dtype.kind not in "iuO" or (
        values.dtype.kind == "O" and any(type(x) is not int for x in values)
    ):
        raise ValueError(f"{name} has token ids that are not all integers; correct the document")
    lowest, highest = values.min(initial=0), values.max(initial=0)
    if lowest < 0 or highest >= 1 << 31:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(
            f"{name} has token id {wrong}; ids are from 0 to {(1 << 31) - 1}; correct the document"
        )
    return values.astype(np.int32)
