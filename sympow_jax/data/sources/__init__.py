"""Sources of data, one module each.

A module has a class `Source`, whose objects open the data of a config. It has `describe() -> dict` and
`side(task, *, vocab_size, heldout)`, which returns `documents.Documents` or `rows.Labeled`.
A source that is read in order only has `rows(pack, *, vocab_size) -> rows.TrainRows` too.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from sympow_jax import config as config_lib
from sympow_jax.config import data as data_config
from sympow_jax.data import files

__all__ = ["described", "find_all", "locations", "open_source"]


def open_source(config: config_lib.DataConfig) -> Any:
    """Returns the opened source of a config."""
    # Imported on demand, because some need libraries that would delay the start of a run, or may not be installed.
    module = importlib.import_module(f"sympow_jax.data.sources.{config.kind.module}")
    return module.Source(config)


def find_all(config: config_lib.DataConfig, *, heldout: bool) -> list[files.File]:
    """Returns the files that have the training or the held-out side of a source."""
    return files.find(*files.side(config, heldout=heldout), suffix=config.kind.suffixes)


def locations(setting: str, paths: Sequence[str], source: str) -> set[str]:
    """Returns the real path, or the URL, of each file that a setting names."""
    suffixes = data_config.SOURCES[source].suffixes
    if not suffixes:
        return set(map(files.location, paths))
    if paths:
        found = files.find(setting, paths, suffix=suffixes)
    else:  # the default of `text`
        found = importlib.import_module("sympow_jax.data.sources.text").standard_library()
    return {location for location, _ in files.located(found)}


def described(
    found: Sequence[files.File], train: np.ndarray | int | None, heldout: np.ndarray | int, **more: Any
) -> dict[str, Any]:
    """Returns the counts of a description: of files, bytes, and of documents of these lengths, or of examples."""
    counts: dict[str, Any] = {"files": len(found), "bytes": sum(file.size for file in found)}
    for prefix, side in (("", train), ("heldout_", heldout)):
        if isinstance(side, int):
            counts[f"{prefix}examples"] = side
        elif side is not None:
            counts |= {f"{prefix}documents": len(side), f"{prefix}tokens": int(np.sum(side))}
    return counts | more
