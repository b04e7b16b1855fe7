"""Turns groups of pieces into tokens, a few groups ahead."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32, Int64, Integer, Shaped

from sympow_jax.data import documents, files
from sympow_jax.data import tokenizer as tokenizer_lib
from sympow_jax.data.corpus import pieces, processes


class Tokens(NamedTuple):
    """Tokens of documents, one document after the other, and the number of documents that were too short."""

    tokens: Integer[np.ndarray, " tokens"]
    lengths: Int64[np.ndarray, " documents"]
    left_out: int = 0


# Gives a group to a worker that has an `Encoder`.
Submit = Callable[[pieces.Group], concurrent.futures.Future[Tokens]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoding:
    """Picklable way from documents to tokens.

    Attributes:
        column: column of text or of token ids; None if every file is a document.
        tokenizer: name of the tokenizer of text; None if the column holds token ids.
        separator: id after every document; None for none.
        only_separators: whether only the separators will tell where documents end, so that no document may hold one.
        vocab_size: number of ids.
        shortest: documents of fewer tokens, separator included, are left out.
        heldout_fraction: fraction of the documents that is held out, chosen by hash.
        heldout: whether the held-out documents are read, instead of the others.
    """

    column: str | None
    tokenizer: str | None
    separator: int | None
    only_separators: bool = False
    vocab_size: int
    shortest: int = 1
    heldout_fraction: float = 0.0
    heldout: bool = False

    @property
    def token_dtype(self) -> str:
        """Type of the ids, a value of `data.token_dtype`."""
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"


class Encoder:
    """Reads and tokenizes groups of pieces. It keeps files open between groups, which are best given in order."""

    def __init__(self, encoding: Encoding):
        self._encoding = encoding
        self._readers: dict[str, Any] = {}
        name = encoding.tokenizer
        self._tokenizer = None if name is None else tokenizer_lib.load(name, setting="data.tokenizer")

    def __call__(self, group: pieces.Group) -> Tokens:
        """Returns the tokens of the chosen documents. Documents without tokens are left out, and are not counted.

        Raises:
            ValueError: a piece cannot be read, a document is not of the kind of the first one, or cannot be encoded,
                or an id is not in the vocabulary or is the separator, or there is not enough memory.
        """
        encoding, tokenizer = self._encoding, self._tokenizer
        dtype = np.dtype(encoding.token_dtype)
        end = np.array([] if encoding.separator is None else [encoding.separator], dtype)
        found, left_out = [np.empty(0, dtype)], 0
        try:
            for document, name in itertools.chain.from_iterable(map(self._read, group)):
                if isinstance(document, bytes) != (tokenizer is not None):
                    kinds = ("token ids", "text") if tokenizer else ("text", "token ids")
                    raise ValueError(
                        f"{name()} holds {kinds[0]}, but {kinds[1]} in the first document; all must be of one type"
                    )
                if tokenizer is None:
                    ids = _checked_ids(document, name)
                else:
                    ids = tokenizer.encode_document(document, name=name())
                if not len(ids):
                    continue
                if encoding.only_separators and np.any(ids == encoding.separator):
                    raise ValueError(
                        f"{name()} holds id {encoding.separator}, which separates documents; leave it out or set "
                        f"another --separator"
                    )
                if len(ids) + len(end) < encoding.shortest:
                    left_out += 1
                    continue
                documents.check_vocabulary(ids, vocab_size=encoding.vocab_size, name=name)
                found.append(np.concatenate([ids, end], dtype=dtype, casting="unsafe"))
            tokens = np.concatenate(found)
        except MemoryError:
            raise ValueError(
                f"out of memory while reading {pieces.name_of(group)}; set fewer workers, if there are several"
            ) from None
        return Tokens(tokens, np.array([len(document) for document in found[1:]], np.int64), left_out)

    def _read(self, piece: pieces.Piece) -> Iterator[tuple[Any, Callable[[], str]]]:
        """Yields the chosen documents of a piece as bytes or arrays of ids, and functions that name them."""
        if piece.format == "text":
            positions, read = [0], [files.read(piece.file.path)]
        else:
            if piece.format not in self._readers:
                # On demand, because it needs libraries of another extra.
                module = importlib.import_module(f"sympow_jax.data.corpus.{piece.format}")
                self._readers[piece.format] = module.Reader(self._encoding.column)
            positions, read = self._readers[piece.format].read(piece)
        key, fraction = piece.file.key, self._encoding.heldout_fraction
        heldout = files.held_out([key], np.array(positions, np.int64), fraction)
        for index in np.flatnonzero(heldout == self._encoding.heldout).tolist():
            yield read[index], functools.partial(piece.name, positions[index])


def _checked_ids(
    values: Shaped[np.ndarray, " tokens"], name: Callable[[], str]
) -> Int32[np.ndarray, " tokens"]:
    """Returns token ids, which may be Python integers of any size, as int32."""
    kind = values.dtype.kind
    if kind not in "iuO" or (kind == "O" and any(type(x) is not int for x in values)):
        raise ValueError(f"{name()} has token ids that are not all integers; correct the document")
    for id in (values.min(initial=0), values.max(initial=0)):
        if not 0 <= id < 1 << 31:
            raise ValueError(
                f"{name()} has token id {id}; ids are from 0 to {(1 << 31) - 1}; correct the document"
            )
    return values.astype(np.int32)


def open_workers(encoding: Encoding, workers: int) -> contextlib.AbstractContextManager[Submit]:
    """Starts the worker processes of a run, or a thread if `workers` is 0; the context is their `submit`."""
    make = functools.partial(Encoder, encoding)
    return processes.pool(make, workers=workers, setting="data.tokenizer_workers")


def in_order(submit: Submit, groups: Iterable[pieces.Group], *, ahead: int) -> Iterator[Tokens]:
    """Returns the tokens of each group of pieces, in order.

    The first group is submitted at once. While the caller uses the tokens of a group, `ahead` more are submitted.
    """
    futures = map(submit, groups)
    submitted = collections.deque(itertools.islice(futures, 1))

    def results() -> Iterator[Tokens]:
        while True:
            submitted.extend(itertools.islice(futures, ahead + 1 - len(submitted)))
            if not submitted:
                return
            yield submitted.popleft().result()

    return results()
