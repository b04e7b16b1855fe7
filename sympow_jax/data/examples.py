"""Interface of every source of rows, and helpers for sources of labeled examples."""

from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32, Integer

from sympow_jax import config as config_lib
from sympow_jax.data import rows

__all__ = ["NO_LABEL", "Examples", "Row", "label_dtype", "padded"]

NO_LABEL = -1

Row = dict[str, Any]  # arrays by name


class Examples(Protocol):
    """The training or the held-out rows of a source.

    `together` is the number of consecutive rows that storage groups. If any order of reading costs the same, it is
    the number of all rows.
    """

    @property
    def together(self) -> int: ...

    def __len__(self) -> int: ...

    def row(self, index: int, key: tuple[int, ...]) -> Row:
        """Returns row `index`, whose random choices are a function of `key` only."""


def label_dtype(task: config_lib.TaskConfig) -> type[np.generic]:
    """Returns the dtype of labels."""
    return np.float32 if task.name == "regression" else np.int32


def padded(tokens: Integer[np.ndarray, " tokens"], length: int) -> dict[str, Int32[np.ndarray, " T"]]:
    """Returns `inputs` padded with 0 to `length`, and `segment_ids`, 0 for tokens and -1 for padding."""
    inputs = np.zeros(length, np.int32)
    inputs[: len(tokens)] = tokens
    segment_ids = np.full(length, rows.PADDING, np.int32)
    segment_ids[: len(tokens)] = 0
    return {"inputs": inputs, "segment_ids": segment_ids}
