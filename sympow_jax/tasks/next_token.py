"""Prediction of the next token."""

import jax.numpy as jnp

from sympow_jax import models
from sympow_jax.tasks import loss, task


class NextToken(task.Task):
    """Cross-entropy of each token given those before it, in nats."""

    unembedded = 1.0

    def sums(self, model: models.DecoderLM | models.Encoder, batch: task.Batch) -> task.Sums:
        """Returns the sums over the targets >= 0, with the term `z_loss` if `optimizer.z_loss` is positive."""
        hidden = model.hidden(batch["inputs"], segment_ids=batch.get("segment_ids"))
        weight, dtype = self.config.optimizer.z_loss, jnp.dtype(model.config.dtype)
        losses, z = loss.token_sums(hidden, model.output_table, batch["targets"], dtype, z_loss=weight)
        return task.Sums(losses, {} if z is None else {"z_loss": z}, {})
