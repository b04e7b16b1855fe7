"""Output layers for classification and regression of rows, and of rows of two texts."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax.array_types import Array, Bool, Float, Int
from sympow_jax.layers import initializers

_EXACT: Any = {"dtype": jnp.float32, "precision": jax.lax.Precision.HIGHEST}


class Head(nnx.Module):
    """Float32 linear layer on the mean over a row's tokens, without padding."""

    def __init__(self, config: config_lib.ModelConfig, outputs: int, *, rngs: nnx.Rngs):
        self.linear = initializers.replicated(config.width, outputs, **_EXACT, rngs=rngs)

    def __call__(
        self, hidden: Float[Array, "B T M"], segment_ids: Int[Array, "B T"] | None
    ) -> Float[Array, "B outputs"]:
        """Returns the logits of classes, or the predicted number; the bias alone for rows of padding only."""
        if segment_ids is None:
            return self.linear(hidden.astype(jnp.float32).mean(axis=1))
        return self.linear(_mean(hidden, segment_ids >= 0))


class PairHead(nnx.Module):
    """Float32 layers on the means z1 and z2 over the tokens of a row's two texts.

    These are the head of the Long Range Arena's dual encoders (Tay et al. 2020, `classifier_head_dual` in their code):
    [z1, z2, z1 * z2, z1 - z2], two hidden layers with ReLU and a linear layer. The hidden layers have the width of a
    block's feed-forward layer and half of it.
    """

    def __init__(self, config: config_lib.ModelConfig, outputs: int, *, rngs: nnx.Rngs):
        width = config.hidden_width
        self.first = initializers.replicated(4 * config.width, width, **_EXACT, rngs=rngs)
        self.second = initializers.replicated(width, width // 2, **_EXACT, rngs=rngs)
        self.linear = initializers.replicated(width // 2, outputs, **_EXACT, rngs=rngs)

    def __call__(
        self, hidden: Float[Array, "B T M"], segment_ids: Int[Array, "B T"] | None
    ) -> Float[Array, "B outputs"]:
        """Returns the logits of classes, or the predicted number.

        The first text is segment 0 of its row, and the second is segment 1. The mean over a text without tokens is 0.

        Raises:
            ValueError: segment ids are None.
        """
        if segment_ids is None:
            raise ValueError(
                "segment_ids is None; it must tell two texts apart: pass 0 for the first, 1 for the second and -1 for "
                "padding"
            )
        one, two = (_mean(hidden, segment_ids == text) for text in (0, 1))
        combined = jnp.concatenate([one, two, one * two, one - two], axis=-1)
        return self.linear(jax.nn.relu(self.second(jax.nn.relu(self.first(combined)))))


def _mean(hidden: Float[Array, "B T M"], counts: Bool[Array, "B T"]) -> Float[Array, "B M"]:
    """Returns the float32 mean over the tokens of each row that count, or 0 where none does."""
    counts = counts[..., None]
    total = jnp.sum(hidden.astype(jnp.float32), axis=1, where=counts)
    return total / jnp.maximum(jnp.sum(counts, axis=1), 1)
