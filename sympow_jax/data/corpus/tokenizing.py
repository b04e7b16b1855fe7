"""Tokenizes pieces of a corpus, in worker processes or in a thread."""

import collections
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, Integer

from sympow_jax.data import documents, files, processes
from sympow_jax.data import tokenizer as tokenizer_lib
from sympow_jax.data.corpus import files as corpus_files
from sympow_jax.data.corpus import reading

__all__ = ["DocumentTokens", "Recipe", "Tokenizing", "tokens_in_order"]


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
    """What makes tokens of documents. It can be sent to another process.

    Attributes:
        column: column of text or of token ids.
        texts: whether the column holds text.
        tokenizer: name of the tokenizer of text.
        separator: id after every document; None for none.
        vocab_size: number of ids of the model.
        shortest: number of tokens, with the separator, of the shortest document that is not left out.
        heldout_fraction: fraction of the documents that is held out, chosen by hash.
        heldout: whether the held-out documents are read, instead of the others.
    """

    column: str
    texts: bool
    tokenizer: str
    separator: int | None
    vocab_size: int
    shortest: int
    heldout_fraction: float
    heldout: bool


class Tokenizing:
    """Reads and tokenizes pieces."""

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        self._reader = reading.Reader(recipe.column, texts=recipe.texts)
        self._tokenizer = (
            tokenizer_lib.load(recipe.tokenizer, setting="data.tokenizer") if recipe.texts else None
        )
        self._dtype = np.uint16 if recipe.vocab_size <= 1 << 16 else np.int32

    def __call__(self, pieces: Sequence[corpus_files.Piece]) -> DocumentTokens:
        """Returns the tokens of the chosen documents.

        Raises:
            ValueError: a piece cannot be read, or a text is not UTF-8, or an id is not in the vocabulary, or there is
                not enough memory.
        """
        try:
            found = [tokens for piece in pieces for tokens in self._documents(piece)]
            tokens = np.concatenate([np.empty(0, self._dtype), *found])
        except MemoryError:
            raise ValueError(
                f"out of memory while reading {pieces[0].file.url}; set fewer data.tokenizer_workers"
            ) from None
        return DocumentTokens(tokens, np.array([len(document) for document in found], np.int64))

    def _documents(self, piece: corpus_files.Piece) -> Iterator[Integer[np.ndarray, " tokens"]]:
        recipe, block = self._recipe, self._reader.read(piece)
        heldout = files.position_hashes(piece.file.key, block.positions) < recipe.heldout_fraction
        end = [] if recipe.separator is None else [recipe.separator]
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
        try:
            return self._tokenizer.encode(document)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name} is not UTF-8 at byte {error.start}; leave it out, convert it, or use data.tokenizer=byte"
            ) from None


_GRACE_SECONDS = 10
_in_worker: Tokenizing


def _start_worker(recipe: Recipe) -> None:
    global _in_worker
    # Stop signals may reach the whole process group, but the training process needs data until it has saved.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end_soon)
    processes.end_with_parent()
    _in_worker = Tokenizing(recipe)


def _end_soon(*_) -> None:
    timer = threading.Timer(_GRACE_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _tokenize_in_worker(pieces: Sequence[corpus_files.Piece]) -> DocumentTokens:
    return _in_worker(pieces)


def tokens_in_order(
    recipe: Recipe, groups: Iterable[Sequence[corpus_files.Piece]], *, workers: int
) -> Generator[DocumentTokens]:
    """Yields the tokens of each group of pieces, in order, and reads a few groups ahead.

    Args:
        recipe: what makes tokens of documents.
        groups: groups of pieces.
        workers: number of processes; 0 for a thread of this process.

    Raises:
        ValueError: as `Tokenizing`, or a worker was killed.
    """
    executor, tokenize = _executor(recipe, workers)
    ahead: collections.deque[concurrent.futures.Future[DocumentTokens]] = collections.deque()
    remaining = iter(groups)
    try:
        while True:
            next_groups = itertools.islice(remaining, workers + 2 - len(ahead))
            ahead.extend(executor.submit(tokenize, group) for group in next_groups)
            if not ahead:
                return
            yield ahead.popleft().result()
    except concurrent.futures.BrokenExecutor:
        raise ValueError(
            "a process that tokenizes data was killed, perhaps because memory ran out; run again to resume, with "
            "fewer data.tokenizer_workers if it happens again"
        ) from None
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def _executor(
    recipe: Recipe, workers: int
) -> tuple[concurrent.futures.Executor, Callable[[Sequence[corpus_files.Piece]], DocumentTokens]]:
    if not workers:
        return concurrent.futures.ThreadPoolExecutor(1), Tokenizing(recipe)
    # A forked process would share the locks of JAX's threads.
    context = multiprocessing.get_context("spawn")
    executor = concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, (recipe,))
    return executor, _tokenize_in_worker
