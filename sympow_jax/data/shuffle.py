"""Shuffled orders of any length, computed from the index without storing a permutation, and rows in such an order."""

import functools

import numpy as np

from sympow_jax.data import rows

# More rows than a run can read. sys.maxsize would overflow in Grain's batching, which divides in floating point.
_ENDLESS = 1 << 48
# Number of batches that are read ahead.
_PREFETCH = 4

# Grain's own index shuffle takes up to 30 ms per index for fewer than 2^16 indices, and repeats indices above 2^32.
_ROUNDS = 8
_WORD = (1 << 64) - 1


@functools.lru_cache(maxsize=64)
def _round_keys(key: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(word) for word in np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64))


def permuted(index: int, size: int, key: tuple[int, ...]) -> int:
    """Returns the image of `index` under the permutation of 0 .. size - 1 that `key` chooses.

    A Feistel network permutes the even number of bits that hold `size`; it is applied until the result is
    below `size`, at most four times on average (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_key in _round_keys(key):
            # SplitMix64's finalizer.
            word = right ^ round_key
            word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
            word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
            left, right = right, left ^ ((word ^ (word >> 31)) & mask)
        index = left << half | right
        if index < size:
            return index


class Shuffle:
    """Map from the i-th draw to one of `count` rows, with every row once per epoch in a new order.

    Storage groups rows in blocks of `block`. The blocks are permuted, and so are the rows within each block. A
    shorter last block stays last. With `block=count` it is a plain shuffle.
    """

    def __init__(self, count: int, *, block: int, seed: int):
        self._count, self._block, self._seed = count, min(block, count), seed

    def __call__(self, draw: int) -> int:
        epoch, position = divmod(int(draw), self._count)
        block, inside = divmod(position, self._block)
        full = self._count // self._block
        if block < full:
            block = permuted(block, full, (self._seed, epoch))
        size = min(self._block, self._count - block * self._block)
        # Blocks are keyed from 1, because in SeedSequence a key that ends in 0 equals the shorter key.
        return block * self._block + permuted(inside, size, (self._seed, epoch, 1 + block))


class ShuffledRows:
    """Training rows of a source that can be read in any order.

    Row i is a function of i, the source and the seed only, and batch i is the rows from i * batch_size.
    """

    def __init__(self, source: rows.Examples, *, seed: int):
        self._source, self._seed = source, seed
        self._order = Shuffle(len(source), block=source.together, seed=seed)

    def __getitem__(self, draw: int) -> rows.Row:
        return self._source.row(self._order(draw), (self._seed, int(draw), rows.TRAINING))

    def example(self) -> rows.Row:
        """Returns a row with the shapes and types of every row."""
        return self[0]

    def batches(self, batch_size: int, *, share: int = 0, shares: int = 1) -> rows.Batches:
        """Returns an iterator of shard `share` of every batch, as described in `rows.TrainRows`."""
        import grain  # not above, because it would delay the start of programs that do not train

        size = len(rows.shard(batch_size, share=share, shares=shares))
        batches = grain.MapDataset.range(_ENDLESS).map(self.__getitem__).batch(size)[share::shares]
        return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH)))
