"""Training batches of a corpus, whose rows come from streams that processes read apart from each other."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Int64

from sympow_jax import config as config_lib
from sympow_jax.data import documents, rows
from sympow_jax.data.corpus import encoding as encoding_lib
from sympow_jax.data.corpus import pieces

# A position is the number of a group in the order of all epochs, shifted by these bits, and the number of a row in it.
_ROW_BITS = 32

# Functions that make the rows of a stream, and the position after each.
_StreamRows = Iterator[tuple[Callable[[], rows.Row], int]]


def _begins_unit(group: pieces.Group) -> bool:
    """Returns whether a group begins a unit: all groups of a compressed file are one, and so is each other group."""
    return not group[0].index or pieces.compression(group[0].file.path) is None


def count_streams(groups: Sequence[pieces.Group], batch_size: int) -> int:
    """Returns the number of streams: the largest that divides the batch, at most 8 and at most that of the units."""
    most = min(pieces.MOST_STREAMS, sum(map(_begins_unit, groups)))
    return max(count for count in range(1, most + 1) if batch_size % count == 0)


class CorpusRows:
    """Training rows of a corpus, repeated indefinitely.

    Each epoch has the groups of pieces in a new random order; the pieces of a compressed file stay in order, one after
    the other. The documents of a group are packed into rows of `length` tokens. Its whole rows are read in a random
    order, and the tokens after the last of them are dropped.

    The groups are dealt to streams, and each stream fills the same rows of every batch, so that a process needs the
    streams of its own rows only. Nothing of this depends on the number of processes.
    """

    def __init__(
        self,
        encoding: encoding_lib.Encoding,
        groups: Sequence[pieces.Group],
        config: config_lib.DataConfig,
        pack: Callable[[documents.Spans], rows.Rows],
    ):
        self._encoding, self._groups, self._pack = encoding, groups, pack
        self.length, self._seed, self._workers = config.context_length, config.seed, config.tokenizer_workers
        self._begins = [*map(_begins_unit, groups)]
        self._unit = np.cumsum(self._begins) - 1  # number of each group's unit
        self._text_bytes = [sum(piece.text_bytes for piece in group) for group in groups]
        self._order = functools.lru_cache(maxsize=2)(self._new_order)  # of the epoch that ends and the next

    def example(self) -> rows.Row:
        """Returns a row of the shapes and types of every row. Nothing is read."""
        zeros = np.zeros(self.length + 1, np.int32)
        source = documents.Spans([zeros].__getitem__, ["an example"], [np.array([len(zeros)])])
        return self._pack(source).row(0, (self._seed, rows.TRAINING))

    def batches(self, batch_size: int, *, share: int = 0, shares: int = 1) -> "BatchIterator":
        """Returns an iterator of shard `share` of every batch, as described in `rows.TrainRows`."""
        shard = rows.shard(batch_size, share=share, shares=shares)
        return BatchIterator(self, batch_size, shard, streams=count_streams(self._groups, batch_size))

    def numbers(self, stream: int, streams: int, *, start: int = 0) -> Iterator[int]:
        """Yields the numbers of a stream's groups in the order of all epochs, from number `start`.

        In that order, each unit goes to the stream that has been given the least text.
        """
        given, owner, number = [0] * streams, 0, 0
        for epoch in itertools.count():
            for group in self._order(epoch).tolist():
                if self._begins[group]:
                    owner = given.index(min(given))
                given[owner] += self._text_bytes[group]
                if owner == stream and number >= start:
                    yield number
                number += 1

    def open_workers(self) -> contextlib.AbstractContextManager[encoding_lib.Submit]:
        """Starts the workers; the context is the `submit` of `tokens`."""
        return encoding_lib.open_workers(self._encoding, self._workers)

    def tokens(
        self, submit: encoding_lib.Submit, numbers: Iterable[int], *, streams: int = 1
    ) -> Iterator[tuple[int, encoding_lib.Tokens]]:
        """Returns the numbers and the tokens of groups; the workers are shared by this number of streams."""
        numbers, groups = itertools.tee(numbers)
        ahead = -(-(self._workers + 1) // streams)  # each worker has a group, and one more waits for a worker
        return zip(numbers, encoding_lib.in_order(submit, map(self._group, groups), ahead=ahead))

    def rows_of_group(self, number: int, tokens: encoding_lib.Tokens) -> Sequence[Callable[[], rows.Row]]:
        """Returns functions that make the whole rows of group `number`, in their order."""
        # A row needs one more token, the last target.
        if len(tokens.tokens) <= self.length:
            return ()
        name = pieces.name_of(self._group(number))
        packed = self._pack(documents.Spans([tokens.tokens].__getitem__, [name], [tokens.lengths]))
        order = np.random.default_rng((self._seed, number, rows.ROW_ORDER)).permutation(packed.whole)
        keys = ((self._seed, number << _ROW_BITS | row, rows.TRAINING) for row in range(packed.whole))
        return [functools.partial(packed.row, int(index), key) for index, key in zip(order, keys)]

    def rows_of_stream(self, tokens: Iterable[tuple[int, encoding_lib.Tokens]], row: int) -> _StreamRows:
        """Yields functions that make the rows of groups, from `row` of the first one, and the position after each.

        Raises:
            ValueError: data cannot be read, or no group has a whole row, or the first group does not have `row`.
        """
        empty = 0
        for number, encoded in tokens:
            found = self.rows_of_group(number, encoded)
            if row and row >= len(found):
                raise ValueError(
                    f"the run was saved at row {row} of a part of the data that now has {len(found)} rows; restore the "
                    f"data and the tokenizer that the run began with"
                )
            for index in range(row, len(found)):
                end = number << _ROW_BITS | index + 1
                yield found[index], end if index + 1 < len(found) else (number + 1) << _ROW_BITS
            row = 0
            empty = 0 if found else empty + 1
            if empty == 2 * self.groups_per_epoch:
                raise ValueError(
                    f"no part of the data has the {self.length + 1} tokens of a whole row; name more data in "
                    f"data.paths, or lower data.context_length, data.shortest_document or data.heldout_fraction"
                )

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
    """Iterator over rows `shard` of every batch. It reads the streams of these rows, and no others.

    Stream s fills the s-th of equal ranges of rows.
    """

    def __init__(self, corpus: CorpusRows, batch_size: int, shard: range, *, streams: int):
        self._corpus, self._count, self._shard = corpus, streams, shard
        self._size = batch_size // streams  # rows of a stream
        self._positions = dict.fromkeys(range(shard[0] // self._size, shard[-1] // self._size + 1), 0)
        self._pool = contextlib.ExitStack()
        self._rows: dict[int, _StreamRows] = {}  # of the streams, if they are open

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """Returns this shard of the next batch. If it raises, the position stays at this batch.

        Raises:
            ValueError: as `CorpusRows.rows_of_stream`.
        """
        by_stream = self._rows or self._open()
        positions, batch = dict(self._positions), []
        try:
            for stream, made in by_stream.items():
                for place, (make, end) in enumerate(itertools.islice(made, self._size), stream * self._size):
                    positions[stream] = end
                    # The others are those of other processes.
                    if place in self._shard:
                        batch.append(make())
        except BaseException:
            self.close()  # an error ends the streams, which are opened again at the position
            raise
        self._positions = positions
        return rows.stacked(batch)

    def get_state(self) -> dict[str, int]:
        """Returns the position of the next batch in each stream that this process reads."""
        return {f"stream {stream} of {self._count}": place for stream, place in self._positions.items()}

    def set_state(self, state: dict[str, int]) -> None:
        """Sets the positions, and begins to read the groups at them. `state` has those of all processes."""
        own = self.get_state()
        if missing := [name for name in own if name not in state]:
            raise ValueError(
                f"the run was saved at {', '.join(sorted(state))} of the data, without {missing[0]}; restore the data "
                f"and the batch that the run began with"
            )
        self.close()
        self._positions = dict(zip(self._positions, map(state.__getitem__, own)))
        self._open()

    def close(self) -> None:
        """Ends the workers."""
        self._rows = {}
        self._pool.close()

    def _open(self) -> dict[int, _StreamRows]:
        """Opens the streams at their positions, and submits the first group of each at once."""
        submit = self._pool.enter_context(self._corpus.open_workers())
        for stream, position in self._positions.items():
            number, row = divmod(position, 1 << _ROW_BITS)
            numbers = self._corpus.numbers(stream, self._count, start=number)
            tokens = self._corpus.tokens(submit, numbers, streams=len(self._positions))
            self._rows[stream] = self._corpus.rows_of_stream(tokens, row)
        return self._rows
