"""Loss by position, within and beyond the training context."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import rich.console
from jaxtyping import Int

from sympow_jax import config as config_lib
from sympow_jax import data, models
from sympow_jax.evaluation import buckets, over_runs, report, scores

_FEW_DOCUMENTS = 20
# Longest context length that is chosen, divided by that of training.
_CONTEXTS = 4


def context_loss(
    model: models.DecoderLM,
    documents: Sequence[Int[np.ndarray, " length"]],
    lengths: Sequence[int],
    *,
    first_position: int = 2,
    on_call: Callable[[int], None] | None = None,
) -> list[buckets.Bucket]:
    """Returns the mean loss of the positions in (previous length, this length], for each of `lengths`.

    Memory is that of `token_losses`.

    Args:
        model: the decoder.
        documents: tokens of each document, at least up to position `lengths[-1]`. Later tokens are ignored, so that
            every bucket is a mean over the same documents.
        lengths: upper ends of the buckets.
        first_position: position of a document's second token, which is the first to be predicted. It is 2, or 1 if
            a begin token, which has no position, comes first.
        on_call: function of the number of tokens that each call of the model processed.

    Raises:
        ValueError: lengths are not positive and increasing, or a document is too short.
    """
    buckets.check_lengths(lengths, first_position=first_position)
    size = lengths[-1] + 2 - first_position
    shortest = min(len(document) for document in documents)
    if shortest < size:
        raise ValueError(
            f"context length {lengths[-1]} needs documents of {size} tokens; the shortest has {shortest}"
        )
    tokens = np.stack([np.asarray(document[:size], np.int32) for document in documents])
    losses = scores.token_losses(model, tokens, on_call=on_call)
    return buckets.bucket_means(losses, lengths, first_position=first_position)


def evaluate_runs(
    workdirs: Sequence[str | os.PathLike[str]],
    lengths: Sequence[int] | None = None,
    *,
    out: str | os.PathLike[str],
    documents: int | None = None,
    heldout: data.HeldoutData | None = None,
    changes: Mapping[str, str] | None = None,
) -> list[report.Row]:
    """Evaluates the newest checkpoint of every run and writes `context_loss.{csv,json,png,pdf}` into `out`.

    All runs see the same held-out documents, chosen by `buckets.select_documents`. Prints a table and, for fewer than
    20 documents, a warning. With several processes, each evaluates on its own, and only the first writes and prints.

    Args:
        workdirs: workdirs of the runs.
        lengths: context lengths; None means those of the first run (`lengths_of`).
        out: folder to write to.
        documents: maximum number of documents; None means that of the first run's `evaluation` settings.
        heldout: held-out data of the first run; None opens it.
        changes: settings of the data to replace in the runs' configs, such as {"data.heldout_paths": "a.bin,b.bin"}.

    Returns:
        The rows of the CSV.

    Raises:
        ValueError: a workdir holds no run or no checkpoint, the runs' data or vocabularies differ, a length exceeds
            every document or a model's learned positions, or `out` cannot be written.
    """
    return over_runs.evaluate(
        ContextLoss(lengths, documents), workdirs, out=out, heldout=heldout, changes=changes
    )


class ContextLoss(over_runs.Evaluation[report.Row]):
    """Evaluation of the loss by position, with the arguments of `evaluate_runs`."""

    def __init__(self, lengths: Sequence[int] | None = None, documents: int | None = None):
        self._lengths, self._documents = lengths, documents

    def prepare(self, runs: over_runs.Runs) -> int:
        first = runs.first
        lengths = lengths_of(first, runs.heldout) if self._lengths is None else self._lengths
        for path, config in zip(runs.paths, runs.configs):
            require_places(config, lengths, f"the model of {path}")
        count = first.evaluation.documents if self._documents is None else self._documents
        documents = require_documents(runs.heldout)
        lead = _lead(documents)
        buckets.check_lengths(lengths, first_position=2 - lead)
        self._indices = buckets.select_documents(
            documents.lengths - lead, lengths[-1], count, together=documents.together
        )
        self._lengths, self._first_position, self._heldout = lengths, 2 - lead, documents
        count = len(self._indices)
        if count < _FEW_DOCUMENTS:
            runs.warn(
                f"{count} held-out document{'s' if count > 1 else ''} of at least {lengths[-1]:,} tokens; a mean over "
                f"fewer than {_FEW_DOCUMENTS} is noisy"
            )
        return count * lengths[-1]

    @functools.cached_property
    def _tokens(self) -> list[Int[np.ndarray, " length"]]:
        size = cast(Sequence[int], self._lengths)[-1] + 2 - self._first_position
        return [self._heldout[int(index)][:size] for index in self._indices]

    def score(self, model: models.Model, run: report.Run, advance: Callable[[int], None]) -> list[report.Row]:
        means = context_loss(
            cast(models.DecoderLM, model),
            self._tokens,
            cast(Sequence[int], self._lengths),
            first_position=self._first_position,
            on_call=advance,
        )
        return report.make_rows(run, means)

    def write(self, folder: pathlib.Path, rows: list[report.Row], runs: list[dict[str, Any]]) -> None:
        report.write_csv(folder / "context_loss.csv", map(dataclasses.asdict, rows), report.COLUMNS)
        report.write_json(
            folder / "context_loss.json",
            rows,
            first_position=self._first_position,
            document_indices=self._indices.tolist(),
            runs=runs,
        )
        report.write_plot(folder / "context_loss.png", rows)

    def print(self, rows: list[report.Row], console: rich.console.Console) -> None:
        report.print_table(rows, console)


def lengths_of(config: config_lib.Config, opened: data.HeldoutData) -> tuple[int, ...]:
    """Returns the context lengths of a run's evaluation, chosen from the held-out documents unless they are set.

    They are empty if the settings turn the evaluation off, or nothing is held out.
    """
    lengths, model = config.evaluation.context_lengths, config.model
    if lengths is not None:
        return lengths
    heldout = opened.documents
    if heldout is None:
        return ()
    lead = _lead(heldout)
    longest = _CONTEXTS * config.data.context_length
    if model.longest_document is not None:
        longest = min(longest, model.longest_document)
    return buckets.choose_lengths(
        heldout.lengths - lead, longest, few=_FEW_DOCUMENTS, first_position=2 - lead
    )


def _lead(heldout: data.HeldoutDocuments) -> int:
    """Returns the number of tokens before position 1: 1 if the data has a begin token, else 0.

    The first position that is predicted, that of a document's second token, is 2 less this number.
    """
    return 0 if heldout.lead is None else 1


def require_documents(opened: data.HeldoutData) -> data.HeldoutDocuments:
    """Returns the held-out documents; raises ValueError if there are none."""
    if opened.documents is None:
        raise ValueError(f"no document is held out: {opened.cause_of_absence}")
    return opened.documents


def require_places(config: config_lib.Config, lengths: Sequence[int], name: str) -> None:
    """Raises ValueError if lengths exceed the learned positions of a model, which the error calls `name`."""
    longest = config.model.longest_document
    if longest is not None and lengths and lengths[-1] > longest:
        raise ValueError(
            f"{name} has learned positions for {longest} tokens (model.attention.max_document_length) and cannot be "
            f"evaluated at {lengths[-1]}; give context lengths up to {longest}"
        )
