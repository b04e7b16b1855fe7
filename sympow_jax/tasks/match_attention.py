"""First stage of a retrofit: new attention learns the outputs of the attention that it replaces."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from sympow_jax import config as config_lib
from sympow_jax import models
from sympow_jax.config import fields, serialize
from sympow_jax.tasks import flops, task


class MatchAttention(task.Task):
    """Squared error of the outputs of new attention, relative to those of the attention it replaces.

    The loss is the mean over the new layers. `loss_layer_N` is that of layer N.
    """

    def __init__(self, config: config_lib.Config):
        super().__init__(config)
        self._layers = [f"loss_layer_{layer}" for layer in sorted(config.model.replaced_layers)]

    def sums(self, model: models.AttentionMatcher, batch: task.Batch) -> task.Sums:
        """Returns the sums over the tokens whose target counts."""
        errors = model.errors(batch["inputs"], segment_ids=batch.get("segment_ids"))
        layers = jnp.sum(errors, axis=(0, 1), where=task.counts(batch["targets"])[..., None])
        return task.Sums(layers.mean(), {}, dict(zip(self._layers, layers, strict=True)))

    def shown(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Returns the loss, and that of the worst layer."""
        worst = max(self._layers, key=metrics.__getitem__)
        return {"loss": metrics["loss"], f"worst {worst}": metrics[worst]}

    def trains(self, name: str) -> bool:
        """Returns whether the parameter belongs to new attention."""
        return models.AttentionMatcher.is_trained(self.config.model, name)

    def settings_of_initial_run(self, model: config_lib.ModelConfig) -> dict[str, Any]:
        """Returns all settings except those that name the new attention, because the old one is kept."""
        fixed = serialize.flatten(model, fields.Occasion.INITIAL_ENCODER, prefix="model.")
        del fixed["model.attention_pattern"], fixed["model.attention.decay_bias"]
        if model.attention.kernel != "sliding_window" and not model.attention.softmax_window:
            # Only the new attention has a window.
            del fixed["model.attention.window"]
        return fixed

    def flops_per_token(self) -> float:
        """Returns the model FLOPs of a token: one pass of the original model, both passes of new attention."""
        model, length = self.config.model, self.config.data.context_length
        original = model.layers * flops.attention(model.original, 0, length)
        new = sum(flops.attention(model, layer, length) for layer in model.replaced_layers)
        return original + flops.feed_forward(model) + flops.PASSES * new
