"""Context-length evaluation of trained runs: restores models, streams documents, writes results."""

import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import rich.console
from jaxtyping import Int

from sympow_jax import config as config_lib
from sympow_jax import data, models, training
from sympow_jax.config import fields, serialize
from sympow_jax.evaluation import buckets, report, scores
from sympow_jax.evaluation import workdirs as workdirs_lib
from sympow_jax.process import hosts
from sympow_jax.training import checkpoint

__all__ = [
    "context_loss",
    "evaluate_runs",
    "lengths_of",
    "require_documents",
    "require_places",
    "require_same_documents",
    "select_documents",
]

_FEW_DOCUMENTS = 20
# Longest context length that is chosen, divided by that of training.
_CONTEXTS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Documents of an evaluation.

    Attributes:
        documents: the held-out documents.
        indices: those to evaluate.
        lead: number of tokens before position 1.
    """

    documents: data.HeldoutDocuments
    indices: Int[np.ndarray, " documents"]
    lead: int

    @property
    def first_position(self) -> int:
        """Position of a document's second token, which is the first to be predicted."""
        return 2 - self.lead

    def read(self, length: int) -> list[Int[np.ndarray, " length"]]:
        """Returns the tokens of each document up to position `length`."""
        return [self.documents[int(index)][: length + self.lead] for index in self.indices]


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
    console: rich.console.Console | None = None,
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
        console: console to print to.

    Returns:
        The rows of the CSV.

    Raises:
        ValueError: a workdir holds no run or no checkpoint, the runs' data or vocabularies differ, a length exceeds
            every document or a model's learned positions, or `out` cannot be written.
    """
    console = (console or report.make_console()) if hosts.is_first() else rich.console.Console(quiet=True)
    paths, configs = workdirs_lib.read_runs(workdirs, changes)
    require_same_documents(paths, configs)
    workdirs_lib.require_held_apart(configs[0].data, paths)
    for path in paths:  # checked before hours are spent on earlier runs
        checkpoint.require_checkpoint(path)
    folder = workdirs_lib.writable_folder(out)
    if heldout is None:
        heldout = workdirs_lib.open_heldout(console, paths[0], configs[0])
    if lengths is None:
        lengths = lengths_of(configs[0], heldout)
    if documents is None:
        documents = configs[0].evaluation.documents
    for path, config in zip(paths, configs):
        require_places(config, lengths, f"the model of {path}")
    chosen = select_documents(configs[0], heldout, lengths, documents)
    tokens = chosen.read(lengths[-1])
    count = len(tokens)
    if count < _FEW_DOCUMENTS:
        workdirs_lib.warn(
            console,
            f"{count} held-out document{'s' if count > 1 else ''} of at least {lengths[-1]:,} tokens; "
            f"a mean over fewer than {_FEW_DOCUMENTS} is noisy",
        )
    if not changes:
        workdirs_lib.warn_of_changed_data(console, paths, configs[0])

    rows: list[report.Row] = []
    runs = []
    for name, path, config in zip(workdirs_lib.run_names(paths, configs), paths, configs):
        means, step, trained = _evaluate(console, name, path, tokens, lengths, chosen.first_position)
        rows += report.make_rows(workdirs_lib.describe_run(name, path, trained, step), means)
        runs.append({"run": name, "workdir": str(path), "step": step, "config": dataclasses.asdict(config)})
    workdirs_lib.warn_of_different_training(console, rows)
    diverged = sorted({row.run for row in rows if not math.isfinite(row.loss)})
    if diverged:
        workdirs_lib.warn(
            console, f"losses of {', '.join(diverged)} are not finite; they are null in the JSON"
        )
    if hosts.is_first():
        _write(folder, rows, chosen, runs)
    report.print_table(rows, console)
    return rows


def _evaluate(
    console: rich.console.Console,
    name: str,
    path: pathlib.Path,
    tokens: Sequence[Int[np.ndarray, " length"]],
    lengths: Sequence[int],
    first_position: int,
) -> tuple[list[buckets.Bucket], int, config_lib.Config]:
    """Returns the buckets, the step and the config of one run; its model is freed after this call."""
    started = time.perf_counter()
    trained, restored, step = training.restore_model(path)
    model = cast(models.DecoderLM, restored)  # the task is 'next_token'
    count = len(tokens)
    with workdirs_lib.progress(console, name, count * lengths[-1]) as advance:
        means = context_loss(model, tokens, lengths, first_position=first_position, on_call=advance)
    workdirs_lib.say(
        console,
        f"{name}: step {step:,}, {count} documents of {lengths[-1]:,} tokens, "
        f"{time.perf_counter() - started:.1f} s",
    )
    return means, step, trained


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
    lead = 0 if heldout.lead is None else 1
    longest = _CONTEXTS * config.data.context_length
    if model.longest_document is not None:
        longest = min(longest, model.longest_document)
    return buckets.choose_lengths(
        heldout.lengths - lead, longest, few=_FEW_DOCUMENTS, first_position=2 - lead
    )


def select_documents(
    config: config_lib.Config, opened: data.HeldoutData, lengths: Sequence[int], count: int
) -> Selection:
    """Selects the documents to evaluate; their tokens are read later.

    Raises:
        ValueError: no document is held out, or none is as long as the last of `lengths`.
    """
    heldout = require_documents(opened)
    lead = 0 if heldout.lead is None else 1  # a begin token before position 1
    buckets.check_lengths(lengths, first_position=2 - lead)
    indices = buckets.select_documents(heldout.lengths - lead, lengths[-1], count, together=heldout.together)
    return Selection(documents=heldout, indices=indices, lead=lead)


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


def require_same_documents(paths: Sequence[pathlib.Path], configs: Sequence[config_lib.Config]) -> None:
    """Raises ValueError unless all runs have the same held-out documents and vocabulary."""
    values = [{"model": {"vocab_size": config.model.vocab_size}, "data": config.data} for config in configs]
    settings = [serialize.flatten(value, fields.Occasion.HELDOUT_DOCUMENTS) for value in values]
    workdirs_lib.require_comparable(paths, settings)


def _write(folder: pathlib.Path, rows: Sequence[report.Row], chosen: Selection, runs: list[dict]) -> None:
    with workdirs_lib.writing(folder):
        report.write_csv(folder / "context_loss.csv", rows)
        report.write_json(
            folder / "context_loss.json",
            rows,
            first_position=chosen.first_position,
            document_indices=chosen.indices.tolist(),
            runs=runs,
        )
        report.write_plot(folder / "context_loss.png", rows)
