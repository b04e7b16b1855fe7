"""Tokenizes pieces of a corpus, a few of them ahead."""

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from sympow_jax.data import documents, files, processes
from sympow_jax.data import tokenizer as tokenizer_lib
from sympow_jax.data.corpus import files as corpus_files
from sympow_jax.data.corpus import reading

__all__ = ["DocumentTokens", "PieceTokenizer", "Recipe", "tokens_in_order"]


class DocumentTokens(NamedTuple):
    """Tokens of documents, one document after the other."""

    tokens: Integer[np.ndarray, " tokens"]
    lengths: Int64[np.ndarray, " documents"]

    def spans(self, name: str) -> documents.Spans:
        """Returns the documents; `name` is that of the pieces, for errors."""
        starts = np.cumsum(self.lengths) - self.lengths
        array = np.zeros_like(self.lengths)
        return documents.Spans([self.tokens], [name], array=array, starts=starts, lengths=self.lengths)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Picklable settings of tokenization.

    Attributes:
        column: column of text or of token ids.
        tokenizer: name of the tokenizer of text; None if the column holds token ids.
        separator: id after every document; None for none.
        vocab_size: number of ids of the model.
        shortest: documents of fewer tokens, separator included, are left out.
        heldout_fraction: fraction of the documents that is held out, chosen by hash.
        heldout: whether the held-out documents are read, instead of the others.
    """

    column: str
    tokenizer: str | None
    separator: int | None
    vocab_size: int
    shortest: int
    heldout_fraction: float
    heldout: bool


class PieceTokenizer:
    """Reads and tokenizes pieces.

    Unlike `prepare.pieces.PieceEncoder`, it holds out documents by hash and accepts documents that contain the
    separator, because it returns their lengths: only a file of tokens needs the separator to find their ends.
    """

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        self._reader = reading.Reader(recipe.column, texts=recipe.tokenizer is not None)
        self._tokenizer = (
            None
            if recipe.tokenizer is None
            else tokenizer_lib.load(recipe.tokenizer, setting="data.tokenizer")
        )
        self._dtype = np.uint16 if recipe.vocab_size <= 1 << 16 else np.int32

    def __call__(self, pieces: Sequence[corpus_files.Piece]) -> DocumentTokens:
        """Returns the tokens of the chosen documents.

        Raises:
            ValueError: a piece cannot be read, or a text is not UTF-8, or an id is not in the vocabulary, or there is
                not enough memory.
        """
        found: list[Integer[np.ndarray, " tokens"]] = []
        try:
            for piece in pieces:
                found += self._documents(piece)
            tokens = np.concatenate([np.empty(0, self._dtype), *found])
        except MemoryError:
            raise ValueError(
                f"out of memory while reading {piece.file.url}; set fewer data.tokenizer_workers"
            ) from None
        return DocumentTokens(tokens, np.array([len(document) for document in found], np.int64))

    def _documents(self, piece: corpus_files.Piece) -> Iterator[Integer[np.ndarray, " tokens"]]:
        recipe, block = self._recipe, self._reader.read(piece)
        heldout = files.held_out([piece.file.key], block.positions, recipe.heldout_fraction)
        end = np.array([] if recipe.separator is None else [recipe.separator], np.int32)
        for index in np.flatnonzero(heldout == recipe.heldout).tolist():
            ids = self._ids(block.documents[index], block.name(index))
            if not len(ids) or len(ids) + len(end) < recipe.shortest:
                continue
            documents.check_vocabulary(ids, vocab_size=recipe.vocab_size, name=block.name(index))
            yield np.concatenate([ids, end]).astype(self._dtype)

    def _ids(self, document: bytes | np.ndarray, name: str) -> Integer[np.ndarray, " tokens"]:
        if isinstance(document, np.ndarray):
            return document
        assert self._tokenizer is not None
        return self._tokenizer.encode_document(document, name=name)


def tokens_in_order(
    recipe: Recipe, groups: Iterable[Sequence[corpus_files.Piece]], *, workers: int
) -> Generator[DocumentTokens]:
    """Yields the tokens of each group of pieces, in order, and reads a few groups ahead.

    Args:
        recipe: settings of tokenization.
        groups: groups of pieces.
        workers: number of processes; 0 for a thread of this process.

    Raises:
        ValueError: as `PieceTokenizer`, or a worker process ended.
    """
    make = functools.partial(PieceTokenizer, recipe)
    with processes.pool(make, workers=workers, setting="data.tokenizer_workers") as submit:
        ahead: collections.deque[concurrent.futures.Future[DocumentTokens]] = collections.deque()
        for group in groups:
            ahead.append(submit(group))
            # While the caller uses the tokens of one group, each worker has a group, and one more waits for a worker.
            if len(ahead) == workers + 2:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
