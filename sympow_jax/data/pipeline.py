"""What training and evaluation read: shuffled rows without end, and whole held-out documents."""

from typing import Any

import grain

from sympow_jax import config as config_lib
from sympow_jax.data import documents, longcrawl64, rows, shuffle, text, tokens

__all__ = ["batches", "describe", "heldout_documents", "train_dataset"]

_SOURCES = {"text": text, "tokens": tokens, "longcrawl64": longcrawl64}

# More rows than a run can take. Grain's batches of sys.maxsize rows overflow: it divides in floating point.
_ENDLESS = 1 << 48


def _documents(config: config_lib.DataConfig, *, vocab_size: int, heldout: bool) -> documents.Documents:
    found = _SOURCES[config.source].open_documents(config, heldout=heldout)
    if found.lead is not None and not 0 <= found.lead < vocab_size:
        raise ValueError(
            f"the id in front of every row is {found.lead}, but model.vocab_size is {vocab_size}; set "
            f"data.document_separator to the id that the data was prepared with"
        )
    return found


def train_dataset(config: config_lib.DataConfig, *, vocab_size: int) -> grain.MapDataset:
    """The training rows, shuffled anew each epoch, without end.

    Element i is a function of i, the data and `config.seed` alone: a dict of `inputs [T]` and `targets [T]`,
    int32, and `segment_ids [T]` where packing is `documents`, as `rows.Rows` describes. A target of -1 does
    not count.

    Raises:
      ValueError: the data cannot be found, opened or read as configured; on reading a row, an id lies outside
        the vocabulary or a Zarr chunk is missing.
    """
    found = rows.Rows(_documents(config, vocab_size=vocab_size, heldout=False), config, vocab_size=vocab_size)
    order = shuffle.Shuffle(len(found), block=found.together, seed=config.seed)
    return grain.MapDataset.range(_ENDLESS).map(lambda draw: found[order(draw)])


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


def heldout_documents(config: config_lib.DataConfig, *, vocab_size: int) -> documents.HeldoutDocuments:
    """The documents held out from training, in the source's order.

    Raises:
      ValueError: as `train_dataset`, or no document is held out.
    """
    found = _documents(config, vocab_size=vocab_size, heldout=True)
    if not len(found.lengths):
        raise ValueError(
            f"no document is held out: data.heldout_paths is empty and data.heldout_fraction is "
            f"{config.heldout_fraction}; name held-out files, or hold out a part of at least two documents"
        )
    return documents.HeldoutDocuments(found, vocab_size=vocab_size)


def describe(config: config_lib.DataConfig) -> dict[str, Any]:
    """What the data is, for the record of a run: source, paths, counts on both sides, bytes and a digest."""
    return {
        "source": config.source,
        "paths": list(config.paths),
        "heldout_paths": list(config.heldout_paths),
        **_SOURCES[config.source].describe(config),
    }
