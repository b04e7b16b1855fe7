"""What training and evaluation read: shuffled rows without end, whole held-out documents, held-out rows."""

import importlib
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from sympow_jax import config as config_lib
from sympow_jax.data import documents, examples, longcrawl64, masking, rows, shuffle, text, tokens

__all__ = ["batches", "describe", "heldout_documents", "heldout_rows", "train_dataset"]

_DOCUMENTS = {"text": text, "tokens": tokens, "longcrawl64": longcrawl64}
_EXAMPLES = {  # the tasks of each source of labeled examples
    "tsv": ("classification", "regression"),
    "images": ("classification",),
    "listops": ("classification",),
}

# More rows than a run can take. Grain's batches of sys.maxsize rows overflow: it divides in floating point.
_ENDLESS = 1 << 48

# What ends the keys of random numbers, so that no draw in training has the key of a held-out row.
_TRAINING, _HELD_OUT = 1, 2


def _source(name: str) -> Any:
    # Sources of examples need libraries of their own, which runs on documents should not wait for.
    return _DOCUMENTS[name] if name in _DOCUMENTS else importlib.import_module(f"sympow_jax.data.{name}")


def _documents(config: config_lib.DataConfig, *, vocab_size: int, heldout: bool) -> documents.Documents:
    if config.source not in _DOCUMENTS:
        raise ValueError(
            f"data.source {config.source!r} holds labeled examples, but documents are asked for; use one of "
            f"{', '.join(_DOCUMENTS)}"
        )
    found = _DOCUMENTS[config.source].open_documents(config, heldout=heldout)
    if found.lead is not None and not 0 <= found.lead < vocab_size:
        raise ValueError(
            f"the id in front of every row is {found.lead}, but model.vocab_size is {vocab_size}; set "
            f"data.document_separator to the id that the data was prepared with"
        )
    return found


def _open(
    config: config_lib.DataConfig, task: config_lib.TaskConfig, *, vocab_size: int, heldout: bool
) -> examples.Examples:
    fitting = _EXAMPLES.get(config.source, ("next_token", "masked_token"))
    if task.name not in fitting:
        raise ValueError(
            f"task.name is {task.name!r}, but data.source {config.source!r} is for {' and '.join(fitting)}; change "
            f"one of them"
        )
    if config.source in _EXAMPLES:
        return _source(config.source).open_examples(config, task, vocab_size=vocab_size, heldout=heldout)
    found = _documents(config, vocab_size=vocab_size, heldout=heldout)
    if heldout and not len(found.lengths):
        raise _nothing_held_out(config, "document")
    if task.name == "masked_token":
        return masking.MaskedRows(found, config, task, vocab_size=vocab_size)
    return rows.Rows(found, config, vocab_size=vocab_size)


def train_dataset(
    config: config_lib.DataConfig, *, task: config_lib.TaskConfig | None = None, vocab_size: int
) -> grain.MapDataset:
    """The training rows of a task, by default to predict the next token, shuffled anew each epoch, without end.

    Element i is a function of i, the data, `config.seed` and the task alone, a dict:

    * `next_token`: `inputs [T]` and `targets [T]`, int32, and `segment_ids [T]` where packing is `documents`, as
      `rows.Rows` describes. A target of -1 does not count.
    * `masked_token`: the same, `targets` at the masked positions alone, which are drawn anew each epoch, as
      `masking.MaskedRows` describes.
    * `classification`, `regression`: `labels []`, int32 or float32, and of text `inputs [T]` filled up with 0 and
      `segment_ids [T]`, 0 and -1 behind the end; of images as `images.open_examples` describes.

    Raises:
      ValueError: the data cannot be found, opened or read as configured, or is not for this task; on reading a row,
        an id lies outside the vocabulary, a Zarr chunk is missing or a file is no image.
    """
    task = task or config_lib.TaskConfig()
    found = _open(config, task, vocab_size=vocab_size, heldout=False)
    order = shuffle.Shuffle(len(found), block=found.together, seed=config.seed)
    return grain.MapDataset.range(_ENDLESS).map(
        lambda draw: found.row(order(draw), (config.seed, int(draw), _TRAINING))
    )


def batches(
    dataset: grain.MapDataset, batch_size: int, *, share: int = 0, shares: int = 1
) -> grain.MapDataset:
    """Element i is one of the equal `shares`, in order, of the i-th batch, its rows stacked.

    The i-th batch is rows i * batch_size onwards however it is shared, so that a run may be resumed on another
    number of processes. The state of an iterator is i.

    Raises:
      ValueError: `shares` does not divide `batch_size`.
    """
    if batch_size % shares:
        raise ValueError(
            f"a batch has {batch_size} rows, which cannot be divided into {shares} equal shares; "
            f"change data.batch_tokens or data.context_length"
        )
    return dataset.batch(batch_size // shares)[share::shares]


def _nothing_held_out(config: config_lib.DataConfig, what: str) -> ValueError:
    return ValueError(
        f"no {what} is held out: data.heldout_paths is empty and data.heldout_fraction is "
        f"{config.heldout_fraction}; name held-out files, or hold out a part of at least two {what}s"
    )


def heldout_documents(config: config_lib.DataConfig, *, vocab_size: int) -> documents.HeldoutDocuments:
    """The documents held out from training, in the source's order.

    Raises:
      ValueError: as `train_dataset`, or no document is held out.
    """
    found = _documents(config, vocab_size=vocab_size, heldout=True)
    if not len(found.lengths):
        raise _nothing_held_out(config, "document")
    return documents.HeldoutDocuments(found, vocab_size=vocab_size)


def heldout_rows(
    config: config_lib.DataConfig, task: config_lib.TaskConfig, *, vocab_size: int, batch_size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Batches of the held-out rows of a task, each row once, in order, the same every time.

    Rows are those of `train_dataset`; images are cropped in the middle, and which tokens are masked is a function of
    the row and `config.seed`. The last batch is as large as the others: it is filled up with its last row, whose
    `targets` or `labels` are -1 there, NaN in `regression`, and do not count.

    Raises:
      ValueError: at once, as `train_dataset`, or nothing is held out.
    """
    found = _open(config, task, vocab_size=vocab_size, heldout=True)
    if not len(found):
        raise _nothing_held_out(config, "example")
    return _in_batches(found, config.seed, batch_size)


def _in_batches(found: examples.Examples, seed: int, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    for start in range(0, len(found), batch_size):
        stop = min(start + batch_size, len(found))
        batch = [found.row(index, (seed, index, _HELD_OUT)) for index in range(start, stop)]
        batch += [_uncounted(batch[-1])] * (batch_size - len(batch))
        yield {name: np.stack([row[name] for row in batch]) for name in batch[0]}


def _uncounted(row: examples.Row) -> examples.Row:
    answer = "labels" if "labels" in row else "targets"
    none = np.nan if row[answer].dtype == np.float32 else examples.NO_LABEL
    return {**row, answer: np.full_like(row[answer], none)}


def describe(config: config_lib.DataConfig) -> dict[str, Any]:
    """What the data is, for the record of a run: source, paths, counts on both sides, bytes and a digest."""
    return {
        "source": config.source,
        "paths": list(config.paths),
        "heldout_paths": list(config.heldout_paths),
        **_source(config.source).describe(config),
    }
