"""The context-length evaluation of trained runs: restore, stream the documents, write the results."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import rich.console
import rich.markup
import rich.progress
from jaxtyping import Int

from sympow_jax import config as config_lib
from sympow_jax import data, models
from sympow_jax.evaluation import buckets, plot, report, streaming
from sympow_jax.training import checkpoint, hosts, workdir

__all__ = ["check_settings", "context_loss", "evaluate_runs"]

_FEW_DOCUMENTS = 20
# What decides which documents are held out and how they become tokens; the rest of two runs may differ.
_SHARED_DATA_FIELDS = (
    "source",
    "paths",
    "heldout_paths",
    "heldout_fraction",
    "token_dtype",
    "document_separator",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Documents:
    """The documents of an evaluation: their indices among the held-out ones, and their tokens."""

    indices: Int[np.ndarray, " documents"]
    tokens: list[Int[np.ndarray, " length"]]
    first_position: int


def context_loss(
    model: models.DecoderLM,
    documents: Sequence[Int[np.ndarray, " length"]],
    lengths: Sequence[int],
    *,
    first_position: int = 2,
    on_call: Callable[[int], None] | None = None,
) -> list[buckets.Bucket]:
    """The mean loss of predicting positions in (previous length, this length], for each of `lengths`.

    `first_position` is that of a document's second token, the first to be predicted: 2, or 1 where a begin
    token, which is no position of the document, comes first. The documents reach position `lengths[-1]` and
    are cut there, so that every bucket is a mean over the same documents. Memory is that of `token_losses`;
    `on_call` is called with the number of tokens each call of the model has done.

    Raises `ValueError` for lengths that are not positive and increasing and for documents that are too short.
    """
    buckets.check_lengths(lengths, first_position=first_position)
    size = lengths[-1] + 2 - first_position
    shortest = min(len(document) for document in documents)
    if shortest < size:
        raise ValueError(
            f"context length {lengths[-1]} needs documents of {size} tokens; the shortest has {shortest}"
        )
    tokens = np.stack([np.asarray(document[:size], np.int32) for document in documents])
    losses = streaming.token_losses(model, tokens, on_call=on_call)
    return buckets.bucket_means(losses, lengths, first_position=first_position)


def check_settings(config: config_lib.Config) -> None:
    """Raises `ValueError` where no held-out document is as long as `config.evaluation` asks for.

    For a training run that ends with an evaluation: better before hours of training than after.
    """
    evaluation = config.evaluation
    if evaluation.context_lengths:
        _select_documents(config, evaluation.context_lengths, evaluation.documents)


def evaluate_runs(
    workdirs: Sequence[str | os.PathLike[str]],
    lengths: Sequence[int] | None = None,
    *,
    out: str | os.PathLike[str],
    documents: int | None = None,
    console: rich.console.Console | None = None,
) -> list[report.Row]:
    """Evaluates the newest checkpoint of every run and writes `context_loss.{csv,json,png}` into `out`.

    `lengths` and `documents` (at most so many) default to the first run's `evaluation` settings. All runs see
    the same held-out documents, chosen by `buckets.select_documents`. Prints a table and, below 20 documents,
    a warning. Of several processes each evaluates by itself; the first alone writes and prints. Returns the rows of
    the CSV. Raises `ValueError` where a workdir holds no run or no checkpoint, the
    runs' data or vocabularies differ, a length exceeds every document, or `out` cannot be written.
    """
    console = (console or report.make_console()) if hosts.is_first() else rich.console.Console(quiet=True)
    paths = [pathlib.Path(path) for path in workdirs]
    folder = _writable_folder(out)
    configs = [workdir.read_config(path) for path in paths]
    _require_same_data(paths, configs)
    for path in paths:  # before hours are spent on the runs in front of it
        checkpoint.require_checkpoint(path)
    if lengths is None:
        lengths = configs[0].evaluation.context_lengths
    if documents is None:
        documents = configs[0].evaluation.documents
    chosen = _choose_documents(configs[0], lengths, documents)
    count = len(chosen.tokens)
    if count < _FEW_DOCUMENTS:
        _warn(
            console,
            f"{count} held-out document{'s' if count > 1 else ''} of at least {lengths[-1]:,} tokens; "
            f"a mean over fewer than {_FEW_DOCUMENTS} is noisy",
        )
    _warn_of_changed_data(console, paths, configs[0])

    rows: list[report.Row] = []
    runs = []
    for name, path, config in zip(_run_names(paths, configs), paths, configs):
        means, step = _evaluate(console, name, path, chosen, lengths)
        rows += report.make_rows(name, means, train_context=config.data.context_length)
        runs.append({"run": name, "workdir": str(path), "step": step, "config": dataclasses.asdict(config)})
    diverged = sorted({row.run for row in rows if not math.isfinite(row.loss)})
    if diverged:
        _warn(console, f"losses of {', '.join(diverged)} are not finite; they are null in the JSON")
    if hosts.is_first():
        _write(folder, rows, chosen, runs)
    report.print_table(rows, console)
    return rows


def _evaluate(
    console: rich.console.Console,
    name: str,
    path: pathlib.Path,
    chosen: _Documents,
    lengths: Sequence[int],
) -> tuple[list[buckets.Bucket], int]:
    """The buckets and the step of one run, whose model lives no longer than this call."""
    started = time.perf_counter()
    _, restored, step = checkpoint.restore_model(path)
    model = cast(models.DecoderLM, restored)  # of the task 'next_token'
    count = len(chosen.tokens)
    with _progress(console, name, count * lengths[-1]) as advance:
        means = context_loss(
            model, chosen.tokens, lengths, first_position=chosen.first_position, on_call=advance
        )
    console.print(
        f"{name}: step {step:,}, {count} documents of {lengths[-1]:,} tokens, "
        f"{time.perf_counter() - started:.1f} s",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return means, step


def _choose_documents(config: config_lib.Config, lengths: Sequence[int], count: int) -> _Documents:
    heldout, lead, indices = _select_documents(config, lengths, count)
    return _Documents(
        indices=indices,
        tokens=[heldout[int(index)][: lengths[-1] + lead] for index in indices],
        first_position=2 - lead,
    )


def _select_documents(
    config: config_lib.Config, lengths: Sequence[int], count: int
) -> tuple[data.HeldoutDocuments, int, Int[np.ndarray, " documents"]]:
    heldout = data.heldout_documents(config.data, vocab_size=config.model.vocab_size)
    lead = 0 if heldout.lead is None else 1  # a token in front of position 1
    buckets.check_lengths(lengths, first_position=2 - lead)
    indices = buckets.select_documents(heldout.lengths - lead, lengths[-1], count, together=heldout.together)
    return heldout, lead, indices


def _require_same_data(paths: Sequence[pathlib.Path], configs: Sequence[config_lib.Config]) -> None:
    """Raises `ValueError` unless all runs predict the same tokens: losses could not be compared."""
    if not paths:
        raise ValueError("no workdir is given")
    resolved = Counter(path.resolve() for path in paths)
    for path in paths:
        if resolved[path.resolve()] > 1:
            raise ValueError(f"workdir {path} is given more than once")
    first = configs[0]
    for path, other in zip(paths[1:], configs[1:]):
        pairs = {"model.vocab_size": (first.model.vocab_size, other.model.vocab_size)}
        for name in _SHARED_DATA_FIELDS:
            pairs[f"data.{name}"] = (getattr(first.data, name), getattr(other.data, name))
        for name, (a, b) in pairs.items():
            if a != b:
                raise ValueError(
                    f"{paths[0]} and {path} cannot be compared: {name} is {a!r} in one and {b!r} in the "
                    f"other; evaluate them apart"
                )


def _warn_of_changed_data(
    console: rich.console.Console, paths: Sequence[pathlib.Path], config: config_lib.Config
) -> None:
    """All runs see the same held-out documents; that one was trained beside others should be known."""
    digest = data.describe(config.data)["digest"]
    for path in paths:
        record = path / "data.json"
        if record.is_file() and json.loads(record.read_text())["digest"] != digest:
            _warn(console, f"the data has changed since {path} was trained on it; see its data.json")


def _run_names(paths: Sequence[pathlib.Path], configs: Sequence[config_lib.Config]) -> list[str]:
    """The workdirs' base names; with the preset, or else in full, where they would be ambiguous."""
    base = [path.absolute().name for path in paths]
    with_preset = [f"{name} ({_preset_name(config.model)})" for name, config in zip(base, configs)]
    for names in (base, with_preset):
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _preset_name(model: config_lib.ModelConfig) -> str:
    attention = model.attention
    for name, fields in config_lib.PRESETS.items():
        if all(getattr(attention, field) == value for field, value in fields.items()):
            return name
    return f"{attention.kernel}, {attention.decay}, {attention.position}"


def _warn(console: rich.console.Console, message: str) -> None:
    console.print(f"warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _progress(
    console: rich.console.Console, name: str, tokens: int
) -> Iterator[Callable[[int], None] | None]:
    """A bar of tokens done; None without a terminal."""
    if not console.is_terminal:
        yield None
        return
    with rich.progress.Progress(console=console, transient=True) as progress:
        task = progress.add_task(rich.markup.escape(name), total=tokens)
        yield lambda done: progress.advance(task, done)


@contextlib.contextmanager
def _writing(folder: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write the results to {folder}: {error.strerror}") from error


def _writable_folder(out: str | os.PathLike[str]) -> pathlib.Path:
    """`out` as a folder that exists; found out before the work, not after it."""
    folder = pathlib.Path(out)
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return folder


def _write(folder: pathlib.Path, rows: Sequence[report.Row], chosen: _Documents, runs: list[dict]) -> None:
    with _writing(folder):
        report.write_csv(folder / "context_loss.csv", rows)
        report.write_json(
            folder / "context_loss.json",
            rows,
            first_position=chosen.first_position,
            document_indices=chosen.indices.tolist(),
            runs=runs,
        )
        plot.write_plot(folder / "context_loss.png", rows)
