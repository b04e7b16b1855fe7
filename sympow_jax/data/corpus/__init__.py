"""Corpora of text or token ids in parquet and JSON lines, larger than memory, local or remote."""

from sympow_jax import extras

with extras.required("corpora", __name__):
    from sympow_jax.data.corpus.blocks import Block
    from sympow_jax.data.corpus.files import CorpusFile, Piece, find, format_of, pieces
    from sympow_jax.data.corpus.reading import Reader, holds_text

__all__ = ["Block", "CorpusFile", "Piece", "Reader", "find", "format_of", "holds_text", "pieces"]
