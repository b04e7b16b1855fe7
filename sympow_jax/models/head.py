"""Output layer for classification and regression of rows."""

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as configs
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import initializers

__all__ = ["Head"]


class Head(nnx.Module):
    """Float32 linear layer on the mean over a row's tokens, without padding."""

    def __init__(self, config: configs.ModelConfig, outputs: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(
            config.width,
            outputs,
            dtype=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,
            kernel_init=nnx.initializers.normal(initializers.STANDARD_DEVIATION),
            rngs=rngs,
        )

    def __call__(
        self, hidden: Float[Array, "B T M"], segment_ids: Int[Array, "B T"] | None
    ) -> Float[Array, "B outputs"]:
        """Returns the logits of classes, or the predicted number; meaningless for rows of padding only."""
        hidden = hidden.astype(jnp.float32)
        if segment_ids is None:
            return self.linear(hidden.mean(axis=1))
        valid = segment_ids[..., None] >= 0
        total = jnp.sum(hidden, axis=1, where=valid)
        return self.linear(total / jnp.maximum(jnp.sum(valid, axis=1), 1))
