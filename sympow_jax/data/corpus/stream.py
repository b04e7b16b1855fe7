"""Training batches of a corpus, in an order that one integer resumes."""

import functools
import itertools
from collections.abc import Callable, Generator, Sequence

import numpy as np
from jaxtyping import Int64

from sympow_jax.data import documents, rows
from sympow_jax.data.corpus import encoding as encoding_lib
from sympow_jax.data.corpus import pieces

__all__ = ["BatchIterator", "CorpusRows"]

# A position is the number of a group in the order of all epochs, shifted by these bits, and the number of a row in it.
_ROW_BITS = 32


class CorpusRows:
    """Training rows of a corpus, repeated indefinitely.

    Each epoch has the groups of pieces in a new random order; the pieces of a compressed file stay in order, one after
    the other. The documents of a group are packed into rows of `length` tokens. Its whole rows are read in a random
    order, and the tokens after the last of them are dropped.
    """

    def __init__(
        self,
        encoding: encoding_lib.Encoding,
        groups: Sequence[pieces.Group],
        pack: Callable[[documents.Spans], rows.Rows],
        *,
        length: int,
        seed: int,
        workers: int,
    ):
        self._encoding, self._groups, self._pack, self.length = encoding, groups, pack, length
        self._seed, self._workers = seed, workers
        # Number of each group's unit: a group, or the groups of a compressed file.
        begins = [not group[0].index or pieces.compression(group[0].file.path) is None for group in groups]
        self._unit = np.cumsum(begins) - 1
        self._order = functools.lru_cache(maxsize=2)(self._new_order)  # of the epoch that ends and the next

    def example(self) -> rows.Row:
        """Returns a row of the shapes and types of every row. Nothing is read."""
        count = self.length + 1
        zeros = encoding_lib.Tokens(np.zeros(count, np.int32), np.array([count]))
        return self._pack(zeros.spans("an example")).row(0, (self._seed, rows.TRAINING))

    def batches(self, batch_size: int, *, share: int = 0, shares: int = 1) -> "BatchIterator":
        """Returns an iterator of shard `share` of every batch, as described in `rows.TrainRows`."""
        return BatchIterator(self, batch_size, rows.shard(batch_size, share=share, shares=shares))

    def tokens(self, start: int) -> Generator[encoding_lib.Tokens]:
        """Yields the tokens of each group, from number `start` in the order of all epochs."""
        order = (self._group(number) for number in itertools.count(start))
        return encoding_lib.in_order(self._encoding, order, workers=self._workers)

    def rows_of_group(self, number: int, tokens: encoding_lib.Tokens) -> Sequence[Callable[[], rows.Row]]:
        """Returns functions that make the whole rows of group `number`, in their order."""
        # A row needs one more token, the last target.
        if len(tokens.tokens) <= self.length:
            return ()
        packed = self._pack(tokens.spans(pieces.name_of(self._group(number))))
        order = np.random.default_rng((self._seed, number, rows.ROW_ORDER)).permutation(packed.whole)
        keys = ((self._seed, number << _ROW_BITS | row, rows.TRAINING) for row in range(packed.whole))
        return [functools.partial(packed.row, int(index), key) for index, key in zip(order, keys)]

    @property
    def groups_per_epoch(self) -> int:
        """Number of groups, each of which is read once per epoch."""
        return len(self._groups)

    def _group(self, number: int) -> pieces.Group:
        epoch, index = divmod(number, len(self._groups))
        return self._groups[self._order(epoch)[index]]

    def _new_order(self, epoch: int) -> Int64[np.ndarray, " groups"]:
        rank = np.random.default_rng((self._seed, epoch, rows.GROUP_ORDER)).permutation(self._unit[-1] + 1)
        return np.argsort(rank[self._unit], kind="stable")


class BatchIterator:
    """Iterator over rows `shard` of every batch.

    Every process tokenizes all documents, because only then does it know which rows are its own.
    """

    def __init__(self, corpus: CorpusRows, batch_size: int, shard: range):
        self._corpus, self._batch_size, self._shard = corpus, batch_size, shard
        self._group = self._row = 0
        # Of the group at the position; none if it is still to be read.
        self._rows: Sequence[Callable[[], rows.Row]] = []
        self._tokens = corpus.tokens(0)

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns this shard of the next batch. If it raises, the position stays at this batch.

        Raises:
            ValueError: data cannot be read, or no group has a whole row, or the saved position is not in the data.
        """
        position, batch, start = self.get_state(), [], 0  # start: row of the batch that is next
        try:
            while start < self._batch_size:
                empty = 0
                while not self._rows:
                    self._rows = self._corpus.rows_of_group(self._group, next(self._tokens))
                    if self._row and self._row >= len(self._rows):
                        raise ValueError(
                            f"the run was saved at row {self._row} of a part of the data that now has "
                            f"{len(self._rows)} rows; restore the data and the tokenizer that the run began with"
                        )
                    if not self._rows:
                        self._group += 1
                        empty += 1
                    # Two epochs, because the first group of one may be the last of the next.
                    if empty == 2 * self._corpus.groups_per_epoch:
                        raise ValueError(
                            f"no part of the data has the {self._corpus.length + 1} tokens of a whole row; name more "
                            f"data in data.paths, or lower data.context_length, data.shortest_document or "
                            f"data.heldout_fraction"
                        )
                stop = min(start + len(self._rows) - self._row, self._batch_size)
                # The other rows up to `stop` are those of other processes.
                for index in range(max(start, self._shard.start), min(stop, self._shard.stop)):
                    batch.append(self._rows[self._row + index - start]())
                self._row += stop - start
                start = stop
                if self._row == len(self._rows):
                    self._group, self._row, self._rows = self._group + 1, 0, []
        except BaseException:
            self.set_state(position)  # an error ends the generator of tokens, which would end this iterator
            raise
        return rows.stacked(batch)

    def get_state(self) -> dict[str, int]:
        """Returns the position of the next batch as one integer."""
        return {"next_row": self._group << _ROW_BITS | self._row}

    def set_state(self, state: dict[str, int]) -> None:
        """Sets the position; the group at it is read again."""
        self.close()
        self._group, self._row = state["next_row"] >> _ROW_BITS, state["next_row"] & ((1 << _ROW_BITS) - 1)
        self._rows, self._tokens = [], self._corpus.tokens(self._group)

    def close(self) -> None:
        """Ends the workers."""
        self._tokens.close()
