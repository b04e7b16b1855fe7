"""Shuffled orders of any length as arithmetic on the index: nothing is stored, no draw needs another."""

import functools

import numpy as np

__all__ = ["Shuffle", "permuted"]

# Grain's own index shuffle takes up to 30 ms an index below 2^16 of them and repeats indices above 2^32.
_ROUNDS = 8
_WORD = (1 << 64) - 1


@functools.lru_cache(maxsize=64)
def _round_keys(key: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(word) for word in np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64))


def _mixed(word: int) -> int:
    """SplitMix64's finalizer."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def permuted(index: int, size: int, key: tuple[int, ...]) -> int:
    """Where the permutation of 0 .. size - 1 that `key` chooses takes `index`.

    A Feistel network permutes the even number of bits that hold `size`; it is applied until the result is
    below `size`, four times on average or less (Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for round_key in _round_keys(key):
            left, right = right, left ^ (_mixed(right ^ round_key) & mask)
        index = left << half | right
        if index < size:
            return index


class Shuffle:
    """Which of `count` rows the i-th draw takes: every row once an epoch, each epoch in another order.

    Rows that storage keeps together form blocks of `block`. The order of the blocks and the order within each
    are permutations; a shorter last block comes last. One block of all rows is a plain shuffle.
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
        # Blocks of one epoch are keyed from 1: a key that ends in 0 equals the shorter key in SeedSequence.
        return block * self._block + permuted(inside, size, (self._seed, epoch, 1 + block))
