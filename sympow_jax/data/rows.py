"""Interface of every source of rows, helpers for labeled ones, and the rows of documents.

Rows have a fixed length. Documents of any length become rows by index arithmetic on cumulative lengths.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32, Int64, Integer

from sympow_jax import config as config_lib
from sympow_jax.data import documents

NO_LABEL = -1
NO_TARGET = -1
PADDING = -1  # segment id

# Last numbers of random keys, so that no two random choices have one key.
TRAINING, HELD_OUT, GROUP_ORDER, ROW_ORDER = 1, 2, 3, 4

Row = dict[str, Any]  # arrays by name


class Labeled:
    """The labeled training or held-out rows of a source, any order of which costs the same to read.

    `row` returns a row by its index; its random choices are a function of a key only.
    """

    def __init__(self, count: int, row: Callable[[int, tuple[int, ...]], Row]):
        self.together, self.row = count, row

    def __len__(self) -> int:
        return self.together


class Batches(Protocol):
    """Infinite iterator of batches, which are rows with a first axis that counts them."""

    def __iter__(self) -> Iterator[Row]: ...

    def __next__(self) -> Row: ...

    def get_state(self) -> dict[str, int]:
        """Returns the position of the next batch, as integers by names; those that this process needs."""

    def set_state(self, state: dict[str, int]) -> None:
        """Sets the position to the states of all processes together, whose number may differ from now."""

    def close(self) -> None:
        """Ends the threads and processes that read ahead."""


class TrainRows(Protocol):
    """The training rows of a source, repeated indefinitely, each epoch in a new order."""

    def example(self) -> Row:
        """Returns a row with the shapes and types of every row."""

    def batches(self, batch_size: int, *, share: int = 0, shares: int = 1) -> Batches:
        """Returns an iterator of shard `share` of every batch, which reads ahead in the background.

        A batch is divided into `shares` equal shards, in the order of its rows. Batch i is independent of `shares`, so
        that a run can be resumed with a different number of processes.

        Raises:
            ValueError: `shares` does not divide `batch_size`.
        """


def stacked(found: Sequence[Row]) -> Row:
    """Returns rows as a batch."""
    return {name: np.stack([row[name] for row in found]) for name in found[0]}


def shard(batch_size: int, *, share: int, shares: int) -> range:
    """Returns the rows of a batch in shard `share` of `shares` equal ones; raises ValueError if they are not."""
    if batch_size % shares:
        raise ValueError(
            f"a batch has {batch_size} rows, which cannot be divided into {shares} equal shards; "
            f"change data.batch_tokens or data.context_length"
        )
    size = batch_size // shares
    return range(share * size, (share + 1) * size)


def padded(texts: Sequence[Integer[np.ndarray, " _"]], length: int) -> dict[str, Int32[np.ndarray, " T"]]:
    """Returns `inputs`, the texts padded with 0 to `length`, and `segment_ids` from 0, which are -1 for padding."""
    return {
        "inputs": filled(np.concatenate(texts), length, 0),
        "segment_ids": filled(np.repeat(np.arange(len(texts)), [*map(len, texts)]), length, PADDING),
    }


def filled(values: np.ndarray, length: int, fill: int) -> Int32[np.ndarray, " T"]:
    """Returns the values followed by `fill`, `length` numbers."""
    row = np.full(length, fill, np.int32)
    row[: len(values)] = values
    return row


def has_targets(source: documents.Documents, config: config_lib.DataConfig) -> bool:
    """Returns whether there is a token to predict: a second one, or any if there is a lead id."""
    if source.lead is not None:
        return len(source.lengths) > 0
    tokens = source.lengths.max(initial=0) if config.packing == "documents" else source.lengths.sum()
    return bool(tokens >= 2)


class Rows:
    """Rows of `data.context_length` tokens from the concatenated documents.

    Row r is a function of r and the seed only, and every token is in exactly one row. `targets` are the tokens that
    follow the `inputs`. They are -1 where there is none, and in the last row after the end of the data.

    * packing `windows`: a row crosses documents and predicts the next document's first token.
    * packing `documents`: `segment_ids` number the documents of the row from 0, and are -1 after the end of the data.
      The last token of a document has no target.

    If the documents have a lead id, targets are the row's own tokens. Inputs are these shifted right by one, with the
    lead id first in the row and, with packing `documents`, first in every document in it.

    The order of documents is drawn once from the seed, unless storage groups documents.

    Attributes:
        whole: number of rows without padding. They are the first ones.

    Raises:
        ValueError: there is nothing to predict. On access, an id is outside the vocabulary, data is missing, or a row
            of at least 64 stored tokens (`tokens`, `longcrawl64`) has one id only.
    """

    def __init__(self, source: documents.Documents, config: config_lib.DataConfig, *, vocab_size: int):
        self._source, self._vocab_size = source, vocab_size
        self._length, self._segmented = config.context_length, config.packing == "documents"
        self._stored = config.kind.stored
        self._order = np.arange(len(source.lengths))
        if source.together is None:
            self._order = np.random.default_rng(config.seed).permutation(self._order)
        self._offsets = np.concatenate([[0], np.cumsum(source.lengths[self._order])])
        self._total = int(self._offsets[-1])
        if not has_targets(source, config):
            raise ValueError(
                f"the training data has {len(source.lengths)} documents, the longest of "
                f"{int(source.lengths.max(initial=0))} tokens, and nothing to predict; name more data in data.paths"
                + (" or lower data.shortest_document" if config.shortest_document > 1 else "")
            )
        # A window's last target is the first input of the next one, so a single last token makes no window.
        self.whole, rest = divmod(self._total - (not self._segmented and source.lead is None), self._length)
        self._count = self.whole + (rest > 0)

    def __len__(self) -> int:
        return self._count

    @property
    def together(self) -> int:
        """Number of consecutive rows that storage groups."""
        if self._source.together is None:
            return len(self)
        return max(1, self._source.together * int(self._source.lengths[0]) // self._length)

    def row(self, index: int, key: tuple[int, ...] = ()) -> Row:
        """Returns row `index`; `key` is unused, because nothing is random."""
        lead = self._source.lead
        tokens, document = self._read(index, self._length + (lead is None))
        inputs = tokens[: self._length]
        if lead is None:
            targets = tokens[1:]
            if self._segmented:
                targets = np.where(document[1:] == document[:-1], targets, NO_TARGET)
        else:
            inputs, targets = np.insert(inputs[:-1], 0, lead), tokens
            if self._segmented:
                inputs = np.where(np.diff(document, prepend=-1) != 0, lead, inputs)
        row = self._inputs(inputs, document[: self._length])
        return {**row, "targets": filled(targets, self._length, NO_TARGET)}

    def _inputs(self, tokens: Int32[np.ndarray, " inputs"], document: Int64[np.ndarray, " inputs"]) -> Row:
        row = {"inputs": filled(tokens, self._length, 0)}
        if self._segmented:
            row["segment_ids"] = filled(document - document[0], self._length, PADDING)
        return row

    def _read(
        self, row: int, length: int
    ) -> tuple[Int32[np.ndarray, " tokens"], Int64[np.ndarray, " tokens"]]:
        """Returns `length` tokens from the start of a row, and for each the position of its document in their order."""
        start = row * self._length
        stop = min(start + length, self._total)
        first = int(np.searchsorted(self._offsets, start, side="right")) - 1
        last = int(np.searchsorted(self._offsets, stop, side="left"))
        pieces, counts = [], []
        for position in range(first, last):
            begin, document = int(self._offsets[position]), int(self._order[position])
            end = min(stop, int(self._offsets[position + 1]))
            piece = self._source.read(document, max(start, begin) - begin, end - begin)
            name = functools.partial(self._source.name, document)
            documents.check_vocabulary(piece, vocab_size=self._vocab_size, name=name)
            pieces.append(piece.astype(np.int32))
            counts.append(len(piece))
        tokens = np.concatenate(pieces)
        if self._stored and len(tokens) >= self._length:
            begin = start - int(self._offsets[first])
            documents.check_repeated(
                tokens[: self._length],
                name=self._source.name(int(self._order[first])),
                part=f"the {self._length} tokens of row {row}, which begins at its token {begin}",
            )
        return tokens, np.repeat(np.arange(first, last), counts)


Examples = Rows | Labeled
"""The training or the held-out rows of a task, of which storage groups `together` consecutive ones."""
