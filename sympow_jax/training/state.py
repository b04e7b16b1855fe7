"""Training state of plain arrays, which an update reads and replaces, and a checkpoint holds."""

import dataclasses
from typing import Any

import jax

from sympow_jax.array_types import Array, Int

Params = dict[str, Any]
"""Nested dict of arrays by the names of a model's modules."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Training state that an update reads and replaces.

    Attributes:
        step: number of updates done.
        params: parameters of the model.
        opt_state: optimizer state; `()` in a checkpoint of imported weights.
        statistics: running statistics of batch normalization; empty without it.
        average: moving average of the parameters; empty without `optimizer.ema_decay`.
        skips: numbers of skipped updates, `total` and `in_a_row`; empty in a checkpoint of imported weights.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: Any  # an `optax.OptState`, a type that only optax can resolve
    statistics: Params = dataclasses.field(default_factory=dict)
    average: Params = dataclasses.field(default_factory=dict)
    skips: dict[str, Array] = dataclasses.field(default_factory=dict)
