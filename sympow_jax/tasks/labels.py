"""Prediction of a class or a number for each row."""

import jax.numpy as jnp
import numpy as np
import optax

from sympow_jax import models
from sympow_jax.array_types import Array, Float
from sympow_jax.tasks import metrics, task


class Classification(task.Task):
    """Cross-entropy of the class of each row, in nats, and the accuracy."""

    def sums(self, model: models.Encoder | models.ImageClassifier, batch: task.Batch) -> task.Sums:
        """Returns the sums over the labels that count."""
        return self.evaluate(model, batch)[0]

    def evaluate(
        self, model: models.Encoder | models.ImageClassifier, batch: task.Batch
    ) -> tuple[task.Sums, Float[Array, "B outputs"]]:
        """Returns the sums over the labels that count, and the outputs of the model's head for each row."""
        if isinstance(model, models.ImageClassifier):
            outputs = model.classify(batch["inputs"])
        else:
            outputs = model.classify(batch["inputs"], segment_ids=batch.get("segment_ids"))
        return self.sums_of(outputs, batch["labels"]), outputs

    def sums_of(self, outputs: Float[Array, "B outputs"], labels: Array) -> task.Sums:
        """Returns the sums of `outputs`."""
        counts = task.counts(labels)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.maximum(labels, 0))
        correct = jnp.sum(outputs.argmax(-1) == labels, where=counts, dtype=jnp.float32)
        return task.Sums(jnp.sum(losses, where=counts), {}, {"accuracy": correct})

    def scores(
        self, mean: float, labels: np.ndarray, outputs: Float[np.ndarray, "n outputs"] | None
    ) -> dict[str, float]:
        """Returns `accuracy` and `matthews`; for two classes also `f1`."""
        assert outputs is not None
        predicted = outputs.argmax(-1)
        scores = {
            "accuracy": metrics.accuracy(labels, predicted),
            "matthews": metrics.matthews(labels, predicted),
        }
        return scores | ({"f1": metrics.f1(labels, predicted)} if self.config.task.classes == 2 else {})


class Regression(Classification):
    """Squared error of the number of each row."""

    def sums_of(self, outputs: Float[Array, "B outputs"], labels: Array) -> task.Sums:
        """Returns the sums of `outputs`."""
        counts = task.counts(labels)
        errors = outputs[:, 0] - jnp.where(counts, labels, 0)
        return task.Sums(jnp.sum(jnp.square(errors), where=counts), {}, {})

    def scores(
        self, mean: float, labels: np.ndarray, outputs: Float[np.ndarray, "n outputs"] | None
    ) -> dict[str, float]:
        """Returns `pearson` and `spearman`; NaN if a prediction is not finite."""
        assert outputs is not None
        values = outputs[:, 0]
        return {"pearson": metrics.pearson(labels, values), "spearman": metrics.spearman(labels, values)}
