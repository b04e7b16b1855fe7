"""Cuts sources into pieces of some MB of text, and turns a piece into tokens."""

import dataclasses
import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import UInt

from sympow_jax.config import data as data_config
from sympow_jax.data import files, tokens
from sympow_jax.data import tokenizer as tokenizer_lib

if TYPE_CHECKING:
    from sympow_jax.data import corpus

__all__ = ["PIECE_BYTES", "Encoding", "Piece", "PieceEncoder", "Sources", "TextPiece", "Tokens", "find"]

# Bytes of text in a piece, roughly. Small enough that little is lost when a process is killed, and that two workers
# have something to do for a corpus like the standard library. Large enough that a worker spends its time on tokens.
PIECE_BYTES = 1 << 22


class TextPiece(NamedTuple):
    """Consecutive files, each of which is a document."""

    files: tuple[files.File, ...]


type Piece = TextPiece | corpus.Piece


@dataclasses.dataclass(frozen=True)
class Sources:
    """All that is read.

    Attributes:
        files: path or URL and size of each file, in order.
        pieces: the pieces of all files in order. Every document is in one of them.
    """

    files: list[tuple[str, int]]
    pieces: Sequence[Piece]


@dataclasses.dataclass(frozen=True)
class Encoding:
    """Picklable settings of tokenization.

    Attributes:
        tokenizer: name for `tokenizer.load`.
        separator: id that follows every document.
        token_dtype: type of the tokens, a key of `tokens.DTYPES`.
        text_column: column of parquet and JSON lines that holds the text; None if every file is a document.
        shortest_document: number of tokens, with the separator, of the shortest document that is not left out.
    """

    tokenizer: str
    separator: int
    token_dtype: str
    text_column: str | None
    shortest_document: int


class Tokens(NamedTuple):
    """Tokens of a piece, with a separator after every document, and counts of its documents."""

    tokens: UInt[np.ndarray, " tokens"]
    documents: int
    left_out: int


def find(paths: Sequence[str], text_column: str | None) -> Sources:
    """Returns the files that `paths` name and their pieces.

    Args:
        paths: files, folders or globs.
        text_column: column of parquet and JSON lines files that holds the text. None for files that are documents.

    Raises:
        ValueError: nothing matches, every file is empty, or the files are not of this kind.
    """
    return _find_texts(paths) if text_column is None else _find_columns(paths, text_column)


def _find_texts(paths: Sequence[str]) -> Sources:
    found = files.find("files", paths)
    texts = [file for file in found if file.size]
    if not texts:
        raise ValueError(f"every file is empty ({len(found)} found); name files that hold text")
    # A `.json` may be one document.
    formats = data_config.CORPUS_SOURCES
    if all(file.path.suffix != ".json" and data_config.source_of(file.key) in formats for file in texts):
        raise ValueError(
            f"{texts[0].path} has many documents, one per row or line; name the column that holds their text with "
            f"--text_column"
        )
    return Sources([(str(file.path), file.size) for file in texts], list(_grouped(texts)))


def _grouped(texts: Iterable[files.File]) -> Iterator[TextPiece]:
    """Yields consecutive files together, each group at least of the size of a piece, except the last."""
    group, size = [], 0
    for file in texts:
        group.append(file)
        size += file.size
        if size >= PIECE_BYTES:
            yield TextPiece(tuple(group))
            group, size = [], 0
    if group:
        yield TextPiece(tuple(group))


def _find_columns(paths: Sequence[str], text_column: str) -> Sources:
    # Imported on demand, because it needs libraries of another extra.
    corpus = importlib.import_module("sympow_jax.data.corpus")
    paths_of_format: dict[str, list[str]] = {name: [] for name in data_config.CORPUS_SOURCES}
    for path in paths:
        source = data_config.source_of(path)
        if source not in paths_of_format:
            remedy = (
                f"name the files of a folder with a glob, such as {os.path.join(path, '*.parquet')}"
                if os.path.isdir(path) or path.endswith("/")
                else "leave it out, or prepare it without --text_column, as one document"
            )
            raise ValueError(
                f"{path} is neither .parquet nor .jsonl, nor a compressed .jsonl, which --text_column reads; {remedy}"
            )
        paths_of_format[source].append(path)
    matches = []
    for name, named in paths_of_format.items():
        matches += corpus.find("files", named, format=name)
    ordered = sorted(matches, key=lambda file: (file.key, file.url))
    if not corpus.holds_text(ordered[0], text_column):
        raise ValueError(
            f"{ordered[0].url} holds token ids in {text_column!r}, and not text; train on it with data.source="
            f"{ordered[0].format}"
        )
    return Sources([(file.url, file.size) for file in ordered], corpus.pieces(ordered, PIECE_BYTES))


class PieceEncoder:
    """Turns pieces into tokens. It keeps files open between pieces, which are best given in order.

    Unlike `corpus.tokenizing.PieceTokenizer`, it rejects documents that contain the separator and does not return
    lengths, because in the output only the separators say where documents end. It holds no documents out.
    """

    def __init__(self, encoding: Encoding):
        self._encoding, self._tokenizer = encoding, tokenizer_lib.load(encoding.tokenizer)
        if encoding.text_column is not None:
            corpus = importlib.import_module("sympow_jax.data.corpus")
            self._reader = corpus.Reader(encoding.text_column, texts=True)

    def encode(self, piece: Piece) -> Tokens:
        """Returns the tokens of a piece. A document that encodes to no tokens is skipped, as an empty one is.

        Raises:
            ValueError: a file cannot be read or is not UTF-8, a document cannot be encoded or has the separator, or
                memory is short.
        """
        separator, dtype = self._encoding.separator, tokens.DTYPES[self._encoding.token_dtype]
        ended, left_out = [np.empty(0, dtype)], 0
        try:
            for name, document in self._documents(piece):
                ids = self._tokenizer.encode_document(document, name=name)
                if np.any(ids == separator):
                    raise ValueError(
                        f"{name} holds id {separator}, which separates documents; leave it out or set another "
                        f"--separator"
                    )
                if not len(ids):
                    continue
                if len(ids) + 1 < self._encoding.shortest_document:
                    left_out += 1
                else:
                    ended.append(np.append(ids, separator).astype(dtype))
            return Tokens(np.concatenate(ended), len(ended) - 1, left_out)
        except MemoryError:
            raise ValueError("memory is short for the longest documents; use fewer --workers") from None

    def _documents(self, piece: Piece) -> Iterator[tuple[str, bytes]]:
        if not isinstance(piece, TextPiece):
            block = self._reader.read(piece)
            yield from ((block.name(i), document) for i, document in enumerate(block.documents))
            return
        for file in piece.files:
            try:
                text = file.path.read_bytes()
            except OSError as error:
                raise ValueError(f"cannot read {file.path}: {error.strerror}") from error
            yield str(file.path), text
