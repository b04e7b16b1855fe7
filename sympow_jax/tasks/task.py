"""Base class of the tasks: the sums of a loss, its metrics and its FLOPs."""

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from sympow_jax import config as config_lib
from sympow_jax.array_types import Array, Bool, Float, Int
from sympow_jax.config import fields, serialize
from sympow_jax.tasks import flops

Batch = Mapping[str, Array]
"""`inputs`, optional `segment_ids`, and `targets [B T]` or `labels [B]`, as `data.train_dataset` has them."""


class Sums(NamedTuple):
    """Sums over the targets or labels of a batch that count, in float32.

    Attributes:
        loss: loss that is reported: cross-entropies in nats, or squared errors.
        terms: what an update minimizes besides, by name; each is reported too.
        metrics: what is reported only, by name, such as `accuracy`.
    """

    loss: Float[Array, ""]
    terms: dict[str, Float[Array, ""]]
    metrics: dict[str, Float[Array, ""]]

    @property
    def total(self) -> Float[Array, ""]:
        """The loss with its terms, which an update minimizes."""
        return sum(self.terms.values(), self.loss)

    def means(self, count: Int[Array, ""]) -> dict[str, Float[Array, ""]]:
        """Returns `loss` and the metrics, divided by the number of targets or labels that count."""
        return {"loss": self.loss / count} | {name: value / count for name, value in self.metrics.items()}


class Task(abc.ABC):
    """A quantity that a model is trained to predict.

    Attributes:
        config: config of the run.
        unembedded: fraction of the tokens for which logits of the vocabulary are computed.
    """

    unembedded: float = 0.0

    def __init__(self, config: config_lib.Config):
        self.config = config

    @abc.abstractmethod
    def sums(self, model: Any, batch: Batch) -> Sums:
        """Returns the sums of a model over a batch; within an update, the model is in training mode."""

    def evaluate(self, model: Any, batch: Batch) -> tuple[Sums, Float[Array, "B outputs"] | None]:
        """Returns the sums, and the outputs for each row that `scores` needs; None for a task without labels."""
        return self.sums(model, batch), None

    def scores(
        self, mean: float, labels: np.ndarray, outputs: Float[np.ndarray, "n outputs"] | None
    ) -> dict[str, float]:
        """Returns the metrics of held-out rows besides their mean loss.

        Args:
            mean: mean of `Sums.loss`.
            labels: targets or labels that count.
            outputs: those of `evaluate` for them.
        """
        return {}

    def shown(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Returns what a terminal shows of the metrics of held-out rows."""
        return metrics

    def trains(self, name: str) -> bool:
        """Returns whether the parameter of this name is trained."""
        return True

    def settings_of_initial_run(self, model: config_lib.ModelConfig) -> dict[str, Any]:
        """Returns the settings of a model that must be those of `task.initial_run`.

        A decoder may change its attention.
        """
        causal = self.config.task.is_causal
        occasion = fields.Occasion.INITIAL_DECODER if causal else fields.Occasion.INITIAL_ENCODER
        return serialize.flatten(model, occasion, prefix="model.")

    def flops_per_token(self) -> float:
        """Returns the model FLOPs of a token in an update; see `flops`."""
        config = self.config
        return flops.model_flops_per_token(
            config.model, config.data.context_length, unembedded=self.unembedded
        )


def counts(wanted: Array | np.ndarray) -> Bool[Array | np.ndarray, "..."]:
    """Returns which targets or labels count: integers >= 0, and numbers except NaN."""
    if not jnp.issubdtype(wanted.dtype, jnp.floating):
        return wanted >= 0
    # That of NumPy for arrays of the host, which need not wait for the device.
    return ~wanted.__array_namespace__().isnan(wanted)


def count(batch: Batch) -> Int[Array, ""]:
    """Returns the number of targets or labels that count.

    It is at least 1, so that the mean over none is 0 instead of NaN.
    """
    return jnp.maximum(jnp.sum(counts(batch["targets" if "targets" in batch else "labels"])), 1)
