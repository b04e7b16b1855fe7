"""What every source of rows provides, and what the sources of labeled examples share."""

from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32, Integer

from sympow_jax import config as config_lib
from sympow_jax.data import rows

__all__ = ["NO_LABEL", "Examples", "Row", "label_dtype", "padded"]

NO_LABEL = -1

Row = dict[str, Any]  # of arrays


class Examples(Protocol):
    """The rows of one side, training or held out.

    `together` says how many consecutive rows storage keeps together, as many as there are where any order of reading
    costs the same.
    """

    @property
    def together(self) -> int: ...

    def __len__(self) -> int: ...

    def row(self, index: int, key: tuple[int, ...]) -> Row:
        """Row `index`; what is drawn at random of it is a function of `key` alone."""


def label_dtype(task: config_lib.TaskConfig) -> type[np.generic]:
    """The dtype of labels."""
    return np.float32 if task.name == "regression" else np.int32


def padded(tokens: Integer[np.ndarray, " tokens"], length: int) -> dict[str, Int32[np.ndarray, " T"]]:
    """`inputs` filled up to `length` with 0, and `segment_ids`, 0 and after the tokens -1."""
    inputs = np.zeros(length, np.int32)
    inputs[: len(tokens)] = tokens
    segment_ids = np.full(length, rows.PADDING, np.int32)
    segment_ids[: len(tokens)] = 0
    return {"inputs": inputs, "segment_ids": segment_ids}
