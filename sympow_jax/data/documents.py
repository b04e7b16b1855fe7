"""Documents of known lengths that can be read in part, the interface of every source of documents."""

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Int32, Int64, Integer, Shaped

# Tokens that were written earlier never have one id over a row or document of this number of tokens. Where they do, a
# copy was not completed: what is not written reads as 0.
_NEVER_REPEATED = 64

# Largest source. Opening a source takes up to 60 bytes of memory per document.
MAX_DOCUMENTS = 1 << 28


class Documents(Protocol):
    """The training or the held-out documents of a source.

    Attributes:
        lengths: number of tokens of each document, at least 1.
        lead: id before every row, so that the first token of a row is predicted too; None for none.
        together: number of consecutive documents that storage groups, so that reading one costs as much as reading
            all. None if any order of reading costs the same.
    """

    lengths: Int64[np.ndarray, " documents"]
    lead: int | None
    together: int | None

    def read(self, document: int, start: int, stop: int) -> Integer[np.ndarray, " tokens"]:
        """Returns tokens start .. stop - 1 of a document."""

    def name(self, document: int) -> str:
        """Returns the location of a document, for errors."""


class Spans:
    """Documents that follow each other in flat arrays, in memory or memory-mapped.

    Args:
        open_array: returns array i.
        names: names of the arrays, for errors.
        lengths: lengths of the documents of each array.
    """

    lead = None
    together = None

    def __init__(
        self,
        open_array: Callable[[int], Integer[np.ndarray, " tokens"]],
        names: Sequence[str],
        lengths: Sequence[Int64[np.ndarray, " documents"]],
    ):
        self._open_array, self._names = open_array, names
        self._array = np.repeat(np.arange(len(lengths), dtype=np.int32), [*map(len, lengths)])
        self._starts = np.concatenate([np.empty(0, np.int64), *(np.cumsum(part) - part for part in lengths)])
        self.lengths = np.concatenate([np.empty(0, np.int64), *lengths])

    def select(self, chosen: Shaped[np.ndarray, " chosen"]) -> "Spans":
        """Returns the chosen documents only, by index or mask."""
        spans = copy.copy(self)
        spans._array, spans._starts = self._array[chosen], self._starts[chosen]
        spans.lengths = self.lengths[chosen]
        return spans

    def read(self, document: int, start: int, stop: int) -> Integer[np.ndarray, " tokens"]:
        """Returns tokens start .. stop - 1 of a document."""
        begin = self._starts[document]
        return self._open_array(int(self._array[document]))[begin + start : begin + stop]

    def name(self, document: int) -> str:
        """Returns the name of the document's array and its start there, in tokens."""
        return f"{self._names[self._array[document]]} (document at token {self._starts[document]})"


def check_vocabulary(
    tokens: Integer[np.ndarray, " tokens"], *, vocab_size: int, name: Callable[[], str]
) -> None:
    """Raises ValueError if an id is not below `vocab_size`; `name` returns the name of the document."""
    highest = int(tokens.max(initial=0))
    if highest >= vocab_size:
        raise ValueError(
            f"{name()} holds id {highest}, but model.vocab_size is {vocab_size}; raise it to at least "
            f"{highest + 1}, or use the data and data.token_dtype that the model was made for"
        )


def check_repeated(tokens: Integer[np.ndarray, " tokens"], *, name: str, part: str) -> None:
    """Raises ValueError if 64 stored tokens or more are all one id; `part` says which tokens of `name` they are."""
    if len(tokens) >= _NEVER_REPEATED and np.all(tokens == tokens[0]):
        raise ValueError(
            f"{name} has only id {tokens[0]} in {part}; the data was not copied in full, or the file is damaged: copy "
            f"or prepare it again"
        )


class HeldoutDocuments(Sequence):
    """Whole documents as 1-D int32 arrays, read on access.

    If the source has a lead id (longcrawl64), it is the first token of each document, as in training, and `lengths`
    include it. `lead` and `together` are as in `Documents`; `stored` says whether the tokens were written earlier.

    Raises:
        ValueError: on access, a document is missing, damaged, or holds an id outside the vocabulary.
    """

    def __init__(self, documents: Documents, *, vocab_size: int, stored: bool):
        self._documents, self._vocab_size, self._stored = documents, vocab_size, stored
        self.lead, self.together = documents.lead, documents.together
        self.lengths = documents.lengths + (self.lead is not None)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Int32[np.ndarray, " tokens"]:  # type: ignore[override]
        index = range(len(self))[operator.index(index)]
        documents = self._documents
        tokens = documents.read(index, 0, int(documents.lengths[index]))
        check_vocabulary(tokens, vocab_size=self._vocab_size, name=lambda: documents.name(index))
        if self._stored:
            check_repeated(tokens, name=documents.name(index), part=f"all of its {len(tokens)} tokens")
        tokens = tokens.astype(np.int32)
        return tokens if self.lead is None else np.insert(tokens, 0, self.lead)
