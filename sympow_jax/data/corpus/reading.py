"""Reads the documents of a corpus, piece by piece."""

from sympow_jax.data.corpus import blocks, files, jsonl, parquet

__all__ = ["Reader", "holds_text"]


def holds_text(file: files.CorpusFile, column: str) -> bool:
    """Returns True if the column holds text, False if it holds token ids; only the start or the footer is read.

    Raises:
        ValueError: the file cannot be read, or has no such column, or the column holds something else.
    """
    return (parquet if file.format == "parquet" else jsonl).holds_text(file, column)


class Reader:
    """Reads pieces of files of one format or the other.

    It keeps files open, and the place in a compressed file, so that pieces are best read in order. It cannot be sent to
    another process; files and pieces can.

    Args:
        column: column of parquet, or field of each JSON line.
        texts: whether the column holds text, as `holds_text` finds; if not, it holds token ids.
    """

    def __init__(self, column: str, *, texts: bool):
        self._parquet = parquet.ParquetReader(column, texts=texts)
        self._jsonl = jsonl.JsonlReader(column, texts=texts)

    def read(self, piece: files.Piece) -> blocks.Block:
        """Returns the documents of a piece.

        Raises:
            ValueError: the file cannot be read, is corrupt, or has a document that is of another type.
        """
        return (self._parquet if piece.file.format == "parquet" else self._jsonl).read(piece)
