"""Corpora of text or token ids in parquet and JSON lines, larger than memory, local or remote."""

from sympow_jax import extras

with extras.required("corpora", __name__):
    from sympow_jax.data.corpus.blocks import Block
    from sympow_jax.data.corpus.files import CorpusFile, Piece, find, pieces
    from sympow_jax.data.corpus.reading import Reader, holds_text
    from sympow_jax.data.corpus.source import describe, locations, open_heldout, open_rows
    from sympow_jax.data.corpus.stream import BatchIterator, CorpusRows

__all__ = [
    "BatchIterator",
    "Block",
    "CorpusFile",
    "CorpusRows",
    "Piece",
    "Reader",
    "describe",
    "find",
    "holds_text",
    "locations",
    "open_heldout",
    "open_rows",
    "pieces",
]
