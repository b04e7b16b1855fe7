"""Sources of data, one module each with a subclass of `Source` of that name."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from sympow_jax import config as config_lib
from sympow_jax.config import data as data_lib
from sympow_jax.config import task as task_lib
from sympow_jax.data import files

__all__ = ["ANY_VOCABULARY", "Source", "described", "locations", "open_source"]

ANY_VOCABULARY = (1 << 31) - 1
"""Vocabulary of data that is opened without a model: more ids than any tokenizer has."""


class Source:
    """Data of a config, for a task and a vocabulary.

    A subclass has `side(heldout=)`, which returns `documents.Documents` or `rows.Labeled`, or raises ValueError if they
    do not fit the settings, and `describe() -> dict`. One that is read in order only has `rows(pack)` too.
    """

    def __init__(self, config: config_lib.DataConfig, task: config_lib.TaskConfig, vocab_size: int):
        self.config, self.task, self.vocab_size = config, task, vocab_size
        self._opened: dict[tuple[str, tuple[str, ...]], Any] = {}

    def opened(self, *, heldout: bool) -> Any:
        """Returns what `open_paths` makes of the paths of a side, once for both sides if they have the same."""
        side = files.side(self.config, heldout=heldout)
        if side not in self._opened:
            self._opened[side] = self.open_paths(*side)
        return self._opened[side]

    def all_opened(self) -> list[Any]:
        """Returns what `open_paths` makes of all paths."""
        return [self.opened(heldout=side) for side in files.sides(self.config)]

    def open_paths(self, setting: str, paths: tuple[str, ...]) -> Any:
        """Returns the files that `paths` name, or what a subclass makes of them; errors name the `setting`."""
        return files.find(setting, paths, suffix=self.config.kind.suffixes)


def open_source(
    config: config_lib.DataConfig,
    task: config_lib.TaskConfig | None = None,
    *,
    vocab_size: int = ANY_VOCABULARY,
) -> Any:
    """Returns the opened source of a config; raises ValueError if it is not for the task, if one is given."""
    fitting = config.kind.predicted
    if task is not None and task.predicted not in fitting:
        names = " and ".join(name for name, kind in task_lib.TASKS.items() if kind.predicted in fitting)
        raise ValueError(
            f"task.name is {task.name!r}, but data.source {config.source!r} is for {names}; change one of them"
        )
    # Imported on demand, because some need libraries that would delay the start of a run, or may not be installed.
    module = importlib.import_module(f"sympow_jax.data.sources.{config.kind.module}")
    return module.Source(config, task or config_lib.TaskConfig(), vocab_size)


def locations(setting: str, paths: Sequence[str], source: str) -> set[str]:
    """Returns the real path, or the URL, of each file that a setting names."""
    suffixes = data_lib.SOURCES[source].suffixes
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
