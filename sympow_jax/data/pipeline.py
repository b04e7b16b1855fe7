"""Data of training and evaluation: an infinite shuffled dataset, held-out documents and held-out rows."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sympow_jax import config as config_lib
from sympow_jax import spelling
from sympow_jax.config import loading
from sympow_jax.data import documents, files, masking, rows, shuffle, sources, tokenizer
from sympow_jax.data.sources import zarr

# Files that a run writes into its workdir, one of each kind.
_RUN_FILES = (
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "lock",
    "context_loss.csv",
    "context_loss.png",
    "events.out.tfevents.1",
    "checkpoints/1/commit_success.txt",
    "checkpoints/1/params/manifest.ocdbt",
)


def _rows(source: sources.Source, opened: documents.Documents | rows.Labeled) -> rows.Examples:
    """Returns the rows of a side of a source: those cut from documents, or labeled examples as they are."""
    if isinstance(opened, rows.Labeled):
        return opened
    if source.task.masks_tokens:
        return masking.MaskedRows(opened, source.config, source.task, vocab_size=source.vocab_size)
    return rows.Rows(opened, source.config, vocab_size=source.vocab_size)


def _may_hold_out(config: config_lib.DataConfig) -> bool:
    return config.kind.generated or bool(config.heldout_paths) or config.heldout_fraction > 0


def train_dataset(
    config: config_lib.DataConfig,
    *,
    task: config_lib.TaskConfig | None = None,
    vocab_size: int,
    source: Any = None,
) -> rows.TrainRows:
    """Returns the training rows of a task, shuffled anew each epoch and repeated indefinitely.

    The default task is to predict the next token. Row i is a function of i, the data, `config.seed` and the task only.
    Rows of `parquet` and `jsonl` can only be read as batches, on whose size their order depends; of others, row i is
    `dataset[i]`. A row is a dict:

    * `next_token`: `inputs [T]` and `targets [T]`, int32, and `segment_ids [T]` if packing is `documents`, as in
      `rows.Rows`. A target of -1 does not count.
    * `masked_token`: the same, with `targets` at the masked positions only, drawn anew each epoch.
    * `classification`, `regression`: `labels []`, int32 or float32. Texts have `inputs [T]` padded with 0, and
      `segment_ids [T]`, 0 for tokens and -1 for padding; the second text of a dual encoder follows the first, with
      segment id 1. Images are described in `images.Source`.

    `source` is the opened source, by default opened anew.

    Raises:
        ValueError: the data cannot be found, opened or read as configured, or does not fit the task. On access to a
            row, an id is outside the vocabulary, a Zarr chunk is missing or a file is not an image.
    """
    source = source or sources.open_source(config, task or config_lib.TaskConfig(), vocab_size=vocab_size)
    if config.kind.corpus:
        return source.rows(functools.partial(_rows, source))
    opened = source.side(heldout=False)
    count = len(opened if isinstance(opened, rows.Labeled) else opened.lengths)
    if not count and config.heldout_fraction and not config.heldout_paths:
        raise ValueError(
            f"nothing is left to train on: data.heldout_fraction {config.heldout_fraction} holds out all that "
            f"data.paths names; lower it, name more data, or set data.heldout_paths"
        )
    return shuffle.ShuffledRows(_rows(source, opened), seed=config.seed)


class HeldoutData:
    """Held-out data of a run, opened once.

    Attributes:
        documents: whole documents in the source's order; None if none is held out, or the source has labeled examples.
        rows: rows of the task; None if none with anything to predict is held out.
    """

    def __init__(
        self,
        config: config_lib.DataConfig,
        task: config_lib.TaskConfig | None = None,
        *,
        vocab_size: int,
        source: Any = None,
    ):
        """Opens the data, by default for predicting the next token. Arguments and errors are as in `train_dataset`."""
        self.documents: documents.HeldoutDocuments | None = None
        self.rows: rows.Examples | None = None
        self._config, self._vocab_size = config, vocab_size
        self._task = task = task or config_lib.TaskConfig()
        if not _may_hold_out(config):
            return
        source = source or sources.open_source(config, task, vocab_size=vocab_size)
        opened = source.side(heldout=True)
        if isinstance(opened, rows.Labeled):
            self.rows = opened if len(opened) else None
            return
        if len(opened.lengths):
            self.documents = documents.HeldoutDocuments(
                opened, vocab_size=vocab_size, stored=config.kind.stored
            )
        if rows.has_targets(opened, config):
            try:
                self.rows = _rows(source, opened)
            except ValueError as error:
                raise ValueError(f"held-out data: {error}") from error

    @functools.cached_property
    def parts(self) -> dict[str, "HeldoutData"]:
        """Held-out data of each path by its name in `data.heldout_names`; without names, all of it, named ""."""
        config, parts = self._config, {}
        for name, path in zip(config.heldout_names, config.heldout_paths):
            own = dataclasses.replace(config, heldout_paths=(path,), heldout_names=())
            parts[name] = HeldoutData(own, self._task, vocab_size=self._vocab_size)
        return parts or {"": self}

    @property
    def cause_of_absence(self) -> str:
        """Settings that hold out nothing, if nothing is held out, and what to do: the end of an error."""
        config = self._config
        return (
            f"data.heldout_paths is {config.heldout_paths}, data.heldout_fraction is {config.heldout_fraction}, and "
            f"data.shortest_document {config.shortest_document}; name other held-out files, or change one of the others"
        )

    def batches(self, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
        """Yields batches of the rows, each row once, in a fixed order.

        Rows are as in `train_dataset`, except that images are center crops, and that the masked tokens are a function
        of the row and `config.seed`. The last batch is padded with copies of its last row, whose `targets` or `labels`
        are -1 (NaN in `regression`) and do not count.
        """
        indices = range(0 if self.rows is None else len(self.rows))
        for start in range(0, len(indices), batch_size):
            chosen = indices[start : start + batch_size]
            yield self._batch(chosen, batch_size, filler=chosen[-1])

    def sample(self, *, share: int = 0, shares: int = 1) -> dict[str, np.ndarray] | None:
        """Returns shard `share` of a batch of rows, drawn by `config.seed`; None if there are no rows.

        The batch is a function of the data, the seed and the task only. It has the number of rows of a training batch,
        padded with uncounted copies of one if fewer are held out. Raises ValueError if `shares` does not divide it.
        """
        if self.rows is None:
            return None
        config = self._config
        own = rows.shard(config.batch_size, share=share, shares=shares)
        order = shuffle.Shuffle(len(self.rows), block=self.rows.together, seed=config.seed)
        chosen = [order(draw) for draw in range(min(config.batch_size, len(self.rows)))]
        return self._batch(chosen[own.start : own.stop], len(own), filler=chosen[0])

    def _batch(self, indices: Sequence[int], size: int, *, filler: int) -> dict[str, np.ndarray]:
        """Returns a batch of `size` rows: these, and uncounted copies of row `filler`."""
        assert self.rows is not None
        missing = [filler] * (size - len(indices))
        batch = [
            self.rows.row(index, (self._config.seed, index, rows.HELD_OUT))
            for index in (*indices, *missing[:1])
        ]
        if missing:
            row = batch.pop()
            answer = "labels" if "labels" in row else "targets"
            none = np.nan if row[answer].dtype == np.float32 else rows.NO_LABEL
            batch += [{**row, answer: np.full_like(row[answer], none)}] * len(missing)
        return rows.stacked(batch)


def require_held_apart(
    config: config_lib.DataConfig, trained: config_lib.DataConfig, *, name: str = "the run"
) -> bool:
    """Raises ValueError if held-out files were trained on, by whatever paths, patterns or symbolic links.

    Copies and hard links are not noticed.

    Args:
        config: settings that hold out.
        trained: settings of the data that a run was trained on.
        name: name of that run, for errors.

    Returns:
        False if the paths that were trained on cannot be read, so that it cannot be found out.
    """
    # What is generated has seeds of its own for each side.
    if not _may_hold_out(config) or config.kind.generated or trained.kind.generated:
        return True
    # Of the same documents, a smaller fraction is in a larger one. In token files, settings say what a document is.
    now, before = (
        (x.source, [*map(files.location, x.paths)], x.heldout_paths)
        + ((x.document_separator, x.token_dtype) if x.source == "tokens" else ())
        for x in (config, trained)
    )
    if now == before and not config.heldout_paths and config.heldout_fraction <= trained.heldout_fraction:
        return True
    if trained.paths != config.paths and any(map(loading.is_remote, trained.paths)):
        return False  # not opened, because they may be anybody's
    try:
        found = sources.locations("data.paths", trained.paths, trained.source)
    except ValueError:
        return False
    setting, paths = files.side(config, heldout=True)
    if shared := sorted(found & sources.locations(setting, paths, config.source)):
        owner, remedy = "", "change one of them, or leave data.heldout_paths empty to hold out a fraction"
        if trained != config:
            owner = f" of {name}"
            remedy = "it was trained on what is held out here: hold out other files, or what it did"
        raise ValueError(
            f"data.paths{owner} and {setting} share {len(shared)} of what they name, such as "
            f"{spelling.cut(shared[0], spelling.LINE)}; {remedy}"
        )
    return True


def require_outside_workdir(config: config_lib.DataConfig, workdir: pathlib.Path) -> None:
    """Raises ValueError if a folder or pattern of the data stands for files that a run writes into its workdir."""
    folder = pathlib.Path(os.path.realpath(workdir))
    for setting, paths in (("data.paths", config.paths), ("data.heldout_paths", config.heldout_paths)):
        for path in paths:
            if "://" not in files.location(path) and any(
                files.would_find(path, str(folder / name)) for name in _RUN_FILES
            ):
                raise ValueError(
                    f"{setting}: {path!r} stands for what the run writes into its workdir {folder}; choose a narrower "
                    f"path or pattern, or another --workdir"
                )


def open_run(
    config: config_lib.DataConfig, task: config_lib.TaskConfig | None = None, *, vocab_size: int
) -> tuple[rows.TrainRows, HeldoutData, dict[str, Any]]:
    """Returns training rows, held-out data and the description of a run, whose files are found and scanned once.

    Raises:
        ValueError: as `train_dataset`.
    """
    source = sources.open_source(config, task or config_lib.TaskConfig(), vocab_size=vocab_size)
    train = train_dataset(config, task=task, vocab_size=vocab_size, source=source)
    heldout = HeldoutData(config, task, vocab_size=vocab_size, source=source)
    return train, heldout, describe(config, source)


def describe(config: config_lib.DataConfig, source: Any = None) -> dict[str, Any]:
    """Returns a description of the data for the record of a run: source, paths, sizes and a digest."""
    paths = {"paths": list(config.paths), "heldout_paths": list(config.heldout_paths)}
    return {"source": config.source, **paths, **(source or sources.open_source(config)).describe()}


def compare_metadata(config: config_lib.Config) -> tuple[config_lib.Config, list[str]]:
    """Compares settings with what `prepare` recorded about the tokens.

    Returns:
        The settings, with the `data.tokenizer` of the metadata if they have none, and a line for each setting that the
        metadata contradicts, naming the first such file.
    """
    data, vocab_size = config.data, config.model.vocab_size
    found = sources.open_source(data).metadata() if data.kind.stored else {}
    if data.tokenizer is None:
        named = (metadata.get("tokenizer") for metadata in found.values())
        name = next((name for name in named if isinstance(name, str)), None)
        data = dataclasses.replace(data, tokenizer=name)
    separator = data.document_separator
    if separator is None and data.source == "longcrawl64":
        separator = zarr.DOCUMENT_START
    lines: dict[str, str] = {}
    for place, metadata in found.items():
        size, end = metadata.get("vocab_size"), metadata.get("separator")
        if isinstance(size, int) and size > vocab_size:
            line = f"{place} has ids below {size}, but model.vocab_size is {vocab_size}; raise it"
            lines.setdefault("size", line)
        if isinstance(end, int) and end != separator:
            shown = "none" if separator is None else separator
            line = f"{place} has the separator {end}, but data.document_separator is {shown}; set it to {end}"
            lines.setdefault("end", line)
        stored, fingerprint = metadata.get("tokenizer"), metadata.get("tokenizer_fingerprint")
        # Loaded only under another name, because training needs no tokenizer.
        if data.tokenizer in (None, stored) or fingerprint is None:
            continue
        problem = f"but data.tokenizer is {data.tokenizer}, whose ids are others; correct it"
        try:
            if tokenizer.load(data.tokenizer, setting="data.tokenizer").fingerprint == fingerprint:
                continue
        except ValueError as error:
            problem = f"with which data.tokenizer cannot be compared: {error}"
        lines.setdefault("tokenizer", f"{place} names the tokenizer {stored}, {problem}")
    return dataclasses.replace(config, data=data), list(lines.values())
