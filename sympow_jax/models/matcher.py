"""Decoder whose new attention is trained to give the outputs of the attention that it replaces."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as configs
from sympow_jax import layers
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.models import trunk
from sympow_jax.ops._shared import arguments

__all__ = ["AttentionMatcher"]


class _MatchedBlock(trunk.Block):
    """Block with the attention of its layer and, if that differs, with the `original` in front.

    Attributes:
        original: the model's `attention` setting as a layer; only in layers whose pattern names another attention.
    """

    original: layers.Attention

    def __init__(self, config: configs.ModelConfig, layer: int, *, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs=rngs)
        if config.attentions[layer] != config.attention:
            unchanged = dataclasses.replace(config, attention_pattern=())
            self.original = layers.make_attention(unchanged, rngs=rngs)

    def match(
        self, x: Float[Array, "B T M"], segment_ids: Int[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T M"], Float[Array, "B T"]]:
        """Returns the residual stream after the original block, and the squared error of the new attention.

        The error of a token is |new - old|^2, divided by the mean of |old|^2 over the tokens that are not padding. It
        is 0 in a layer that keeps its attention.
        """
        normed = layers.normalize(self.attention_norm, x, segment_ids)
        error = jnp.zeros(x.shape[:2], jnp.float32)
        if hasattr(self, "original"):
            old = jax.lax.stop_gradient(self.original(normed, segment_ids=segment_ids)).astype(jnp.float32)
            new = self.attention(jax.lax.stop_gradient(normed), segment_ids=segment_ids)
            counts = jnp.ones(x.shape[:2], bool) if segment_ids is None else segment_ids >= 0
            size = jnp.sum(jnp.square(old).sum(-1), where=counts) / jnp.maximum(counts.sum(), 1)
            error = jnp.square(new - old).sum(-1) / jnp.maximum(size, jnp.finfo(jnp.float32).tiny)
        else:
            old = self.attention(normed, segment_ids=segment_ids)
        x = x + old
        x = x + self.mlp(layers.normalize(self.mlp_norm, x, segment_ids))
        return jax.lax.stop_gradient(x), error


class AttentionMatcher(trunk.TokenTrunk):
    """Decoder with `config.attention` in all layers, and beside it the new attention of layers that the pattern names.

    Every new layer reads what the layer that it replaces reads in the original model, and its loss is the difference of
    their outputs. So all layers are trained at once and independently of each other.
    """

    block_type = _MatchedBlock

    @classmethod
    def trains(cls, config: configs.ModelConfig, name: str) -> bool:
        """Returns whether a parameter is one of the new attention, the only ones that have gradients."""
        first, *rest = name.split(".")
        return (
            first == "blocks"
            and rest[1] == "attention"
            and config.attentions[int(rest[0])] != config.attention
        )

    def errors(
        self, tokens: Int[Array, "B T"], *, segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T"]:
        """Returns the squared error of each token, relative to the outputs of a layer, as mean over the new layers.

        1 is the error of layers whose outputs are 0. Gradients are those of the new attention alone.

        Raises:
            ValueError: as `TokenTrunk.embed` and `stem`.
        """
        segment_ids = arguments.to_segment_ids(segment_ids, tokens.shape)
        x, _ = self.stem(self.embed(tokens), segment_ids)
        x = jax.lax.stop_gradient(x)

        def step(
            block: trunk.Block, carry: tuple[Float[Array, "B T M"], Float[Array, "B T"]]
        ) -> tuple[Float[Array, "B T M"], Float[Array, "B T"]]:
            assert isinstance(block, _MatchedBlock)
            x, error = block.match(carry[0], segment_ids)
            return x, carry[1] + error

        zeros = jnp.zeros(x.shape[:2], jnp.float32)
        _, total = self.over_blocks(step, (trunk.residual_stream(x), zeros))
        return total / sum(attention != self.config.attention for attention in self.config.attentions)
