"""ListOps: nested operations on lists of digits; the class is the value.

Nangia and Bowman, "ListOps: A diagnostic dataset for latent tree learning" (2018), in the settings of Long-Range
Arena (Tay et al. 2020). `[MAX 2 9 [MIN 4 7 ] 0 ]` is 9. A node is an operation with probability 1/4 and a digit
otherwise. An operation has 2 to 10 arguments, and nodes are at most at depth 10 (the root is at 1). An expression that
is too short or too long is drawn again. MED is the median; for an even number of arguments it is the mean of the middle
two, rounded down. SM is the sum modulo 10.

The ids are: 0 padding, 1 to 10 the digits 0 to 9, 11 to 14 `[MAX`, `[MIN`, `[MED` and `[SM`, 15 `]`.
"""

import hashlib
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int64

from sympow_jax.data import rows, sources

CLASSES = 10
SYMBOLS = ("", *"0123456789", "[MAX", "[MIN", "[MED", "[SM", "]")  # symbols by id

# Long Range Arena's tokens of the shortest and the longest example, and numbers of training and held-out examples.
LENGTHS = 500, 2000
EXAMPLES = 96_000, 2000
_DEPTH = 10
_ARGUMENTS = (2, 10)
_OPERATION_PROBABILITY = 0.25
_DIGIT, _OPERATION, _END = 1, 11, 15

_DESCRIBED = 16  # number of examples per side that enter the digest


_OPERATIONS: dict[int, Callable[[list[int]], int]] = {
    _OPERATION: max,
    _OPERATION + 1: min,
    _OPERATION + 2: lambda values: int(statistics.median(values)),
    _OPERATION + 3: lambda values: sum(values) % 10,
}


def _draw_shape(rng: np.random.Generator, longest: int) -> tuple[list[Int64[np.ndarray, " nodes"]], int]:
    """Returns the numbers of arguments of the nodes at each depth, 0 for digits, and the number of tokens.

    Children of one parent are next to each other. A tree of more than `longest` tokens is left incomplete.
    """
    levels, length, nodes = [], 0, 1
    for depth in range(1, _DEPTH + 1):
        # The root is always an operation, because a single digit would be too short and drawn again.
        chance = 1.0 if depth == 1 else _OPERATION_PROBABILITY * (depth < _DEPTH)
        operation = rng.random(nodes) < chance
        levels.append(np.where(operation, rng.integers(*_ARGUMENTS, nodes, endpoint=True), 0))
        length += nodes + int(operation.sum())
        nodes = int(levels[-1].sum())
        if not nodes or length + nodes > longest:
            break
    return levels, length + nodes


def generate(key: tuple[int, ...], shortest: int, longest: int) -> tuple[Int64[np.ndarray, " tokens"], int]:
    """Returns the ids and the value of an expression of `shortest` to `longest` tokens, a function of the arguments."""
    rng = np.random.default_rng(key)
    levels, length = _draw_shape(rng, longest)
    while not shortest <= length <= longest:  # one draw in three fits Long-Range Arena's lengths
        levels, length = _draw_shape(rng, longest)
    symbols = [
        np.where(
            counts > 0,
            _OPERATION + rng.integers(len(_OPERATIONS), size=len(counts)),
            _DIGIT + rng.integers(10, size=len(counts)),
        ).tolist()
        for counts in levels
    ]
    ends = [np.cumsum(counts).tolist() for counts in levels]
    tokens: list[int] = []

    def write(depth: int, node: int) -> int:
        symbol, count = symbols[depth][node], int(levels[depth][node])
        tokens.append(symbol)
        if not count:
            return symbol - _DIGIT
        first = ends[depth][node] - count
        values = [write(depth + 1, first + argument) for argument in range(count)]
        tokens.append(_END)
        return _OPERATIONS[symbol](values)

    value = write(0, 0)
    return np.array(tokens), value


class Source(sources.Source):
    """The generated examples, each a function of its side, its index and the seed."""

    def example(self, index: int, *, heldout: bool) -> tuple[Int64[np.ndarray, " tokens"], int]:
        """Returns the ids and the value of an example."""
        # The last number is never 0, because in SeedSequence a key that ends in 0 equals the shorter key.
        return generate((self.config.seed, index, 1 + heldout), *LENGTHS)

    def side(self, *, heldout: bool) -> rows.Labeled:
        """Returns the training or the held-out examples; raises ValueError if they do not fit the settings."""
        length, outputs, vocab_size = self.config.context_length, self.task.outputs, self.vocab_size
        for name, value, needed, fits in (
            ("task.classes", outputs, CLASSES, outputs == CLASSES),
            ("model.vocab_size", vocab_size, f"{len(SYMBOLS)} or more", vocab_size >= len(SYMBOLS)),
            ("data.context_length", length, f"{LENGTHS[1]} or more", length >= LENGTHS[1]),
        ):
            if not fits:
                raise ValueError(f"{name} is {value}, but data.source 'listops' needs {needed}; change it")

        def row(index: int, key: tuple[int, ...]) -> rows.Row:
            tokens, value = self.example(index, heldout=heldout)
            return {**rows.padded([tokens], length), "labels": np.array(value, np.int32)}

        return rows.Labeled(EXAMPLES[heldout], row)

    def describe(self) -> dict[str, Any]:
        """Returns the numbers of training and held-out examples, and the SHA-256 of the first of each."""
        digest = hashlib.sha256()
        for heldout in (False, True):
            for index in range(min(_DESCRIBED, EXAMPLES[heldout])):
                tokens, value = self.example(index, heldout=heldout)
                digest.update(bytes([*tokens, value]))
        return {
            "examples": EXAMPLES[0],
            "heldout_examples": EXAMPLES[1],
            "digest": digest.hexdigest(),
            "digest_of": f"the first {_DESCRIBED} examples of each side",
        }
