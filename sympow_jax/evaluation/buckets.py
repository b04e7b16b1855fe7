"""Buckets of positions, the selection of documents, and mean losses.

A document is x_1 .. x_L, and position t is predicted from x_1 .. x_{t-1}. Position 1 is predicted only if the data
has a begin token before every document. Otherwise the first predicted position is 2, and the first bucket has one
prediction per document less than its length.
"""

import dataclasses
import itertools
import sys
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

# Between the shortest and the longest length that are chosen.
_DOUBLINGS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Predictions of the positions in (previous length, `context_length`] over all documents.

    Attributes:
        context_length: last position of the bucket.
        loss: mean loss in nats per token.
        standard_error: standard error of `loss` over the documents' means; None for a single document.
        tokens: number of predictions.
        documents: number of documents.
    """

    context_length: int
    loss: float
    standard_error: float | None
    tokens: int
    documents: int


def parse_lengths(text: str) -> tuple[int, ...]:
    """Parses context lengths such as `64,128,256`; `64,...,65536` stands for every doubling in between.

    A last length that is not a doubling of the first is rounded down to one, with a warning on stderr.

    Raises:
        ValueError: the text is not such a list.
    """
    words = text.replace(" ", "").split(",")
    lengths: list[int] = []
    for index, word in enumerate(words):
        if word == "..." and 0 < index < len(words) - 1:
            last = _parse_length(words[index + 1], text)
            if last <= lengths[-1]:
                raise ValueError(
                    f"context lengths {text!r}: {last} is not above {lengths[-1]}; write them in increasing order"
                )
            while lengths[-1] * 2 <= last:
                lengths.append(lengths[-1] * 2)
            if lengths[-1] != last:
                print(
                    f"warning: context lengths {text!r}: {last} is rounded down to {lengths[-1]}, the last doubling; "
                    f"write the lengths out to end at {last}",
                    file=sys.stderr,
                    flush=True,
                )
        elif index == 0 or words[index - 1] != "...":  # a length after "..." is the end of the doublings
            lengths.append(_parse_length(word, text))
    return tuple(lengths)


def choose_lengths(
    documents: Int[np.ndarray, " documents"], longest: int, *, few: int, first_position: int
) -> tuple[int, ...]:
    """Returns up to seven powers of two, as high as documents reach but at most `longest`.

    Args:
        documents: length of each document.
        longest: upper limit of the last length.
        few: number of documents that must reach the last length, or all of them if there are fewer.
        first_position: first position that is predicted.
    """
    reached = np.sort(documents)[-min(few, len(documents))]
    last = int(min(reached, longest)).bit_length() - 1
    lengths = tuple(2**exponent for exponent in range(max(0, last - _DOUBLINGS), last + 1))
    return tuple(length for length in lengths if length >= first_position)


def _parse_length(word: str, text: str) -> int:
    if not word.isascii() or not word.isdigit() or int(word) == 0:
        raise ValueError(
            f"context lengths {text!r}: {word!r} is not a positive integer; "
            f"write them as 64,128,256 or 64,...,4096"
        )
    return int(word)


def check_lengths(lengths: Sequence[int], *, first_position: int) -> None:
    """Raises ValueError unless `lengths` are positive and increasing and no bucket is empty."""
    if not lengths:
        raise ValueError("no context lengths are given; write them as 64,128,256 or 64,...,4096")
    if lengths[0] < 1 or any(a >= b for a, b in itertools.pairwise(lengths)):
        raise ValueError(f"context lengths {','.join(map(str, lengths))} must be positive and increasing")
    if lengths[0] < first_position:
        raise ValueError(
            f"context length {lengths[0]} holds no prediction: this data has no begin token, so position "
            f"{first_position} is the first predicted; start at {first_position} or above"
        )


def select_documents(
    document_lengths: Int[np.ndarray, " n"], longest: int, count: int, *, together: int | None = None
) -> Int[np.ndarray, " d"]:
    """Returns the indices of at most `count` documents of at least `longest` tokens, evenly spaced.

    If storage groups `together` consecutive documents, so that reading one costs as much as reading all, the documents
    are spaced over the first groups that have enough. Otherwise they are spaced over the corpus. The result depends on
    the arguments only, so all runs over the same data are evaluated on the same documents.

    Raises:
        ValueError: no document is long enough, or `count` is not positive.
    """
    if count < 1:
        raise ValueError(f"the number of documents is {count}; it must be at least 1")
    available = int(document_lengths.max(initial=0))
    if available < longest:
        raise ValueError(
            f"context length {longest} is longer than any held-out document; the longest has {available} tokens; "
            f"evaluate shorter contexts, or hold out more or longer documents"
        )
    eligible = np.flatnonzero(document_lengths >= longest)
    count = min(count, len(eligible))
    if together is not None:
        group = eligible // together
        eligible = eligible[group <= group[count - 1]]
    return eligible[np.arange(count) * len(eligible) // count]


def bucket_means(
    losses: Float[np.ndarray, "documents positions"], lengths: Sequence[int], *, first_position: int
) -> list[Bucket]:
    """Returns the mean loss of each bucket; column i of `losses` is position `first_position + i`.

    Sums are float64. If a loss in a bucket is not finite, neither is the mean.
    """
    buckets = []
    for previous, length in itertools.pairwise((0, *lengths)):
        start = max(previous + 1 - first_position, 0)
        part = losses[:, start : length + 1 - first_position].astype(np.float64)
        documents, positions = part.shape
        means = part.mean(axis=1)
        with np.errstate(invalid="ignore"):  # inf - inf, if a model diverges
            error = float(means.std(ddof=1) / np.sqrt(documents)) if documents > 1 else None
        buckets.append(
            Bucket(
                context_length=length,
                loss=float(means.mean()),
                standard_error=error,
                tokens=documents * positions,
                documents=documents,
            )
        )
    return buckets
