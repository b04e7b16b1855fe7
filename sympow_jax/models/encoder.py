"""An encoder of tokens: bidirectional blocks, for masked tokens and for classes and numbers of whole rows."""

import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as configs
from sympow_jax import layers
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import initializers, parallel
from sympow_jax.models import block, head

__all__ = ["Encoder"]


class Encoder(nnx.Module):
    """Pre-norm encoder with a norm after the embedding; the shape of `DecoderLM`, but every token sees its document.

    RoBERTa (Liu et al. 2019) differs in this: its norms follow each half of a block, its projections have biases, a
    dense layer with a norm precedes the unembedding, and its classes are read from the first token. Matrix products
    are in `config.dtype`; parameters, the residual stream, logits and the head are float32.
    """

    def __init__(self, config: configs.ModelConfig, task: configs.TaskConfig, *, rngs: nnx.Rngs):
        self.config = config
        normal = nnx.initializers.normal(initializers.STANDARD_DEVIATION)
        self.embedding = nnx.Param(normal(rngs.params(), (config.vocab_size, config.width), jnp.float32))
        if config.embedding_norm:
            self.embedding_norm = layers.make_norm(config, jnp.float32, rngs=rngs)
        if config.attention.position == "learned_absolute":
            self.position_embedding = block.position_table(config, rngs=rngs)
        self.blocks = nnx.List([block.Block(config, rngs=rngs) for _ in range(config.layers)])
        self.final_norm = layers.make_norm(config, jnp.dtype(config.dtype), rngs=rngs)
        if task.outputs is not None:
            self.head = head.Head(config, task.outputs, rngs=rngs)

    def hidden(
        self, tokens: Int[Array, "B T"], *, segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T M"]:
        """The final normalised hidden states.

        A document starts wherever the segment id changes; a negative id is padding, which nothing sees and whose
        hidden states mean nothing.
        """
        x = parallel.lookup(self.embedding[...], tokens)
        x, _ = block.stem(self, x, segment_ids)
        x = block.run(self.blocks, x, segment_ids, self.config.remat)
        return layers.normalise(self.final_norm, x, segment_ids)

    def unembed(self, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """Logits of each position's own token in float32: hidden states times the embedding's transpose."""
        return block.logits(hidden, self.embedding[...], jnp.dtype(self.config.dtype))

    def classify(
        self, tokens: Int[Array, "B T"], *, segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B outputs"]:
        """Logits of the classes of each row, or the number predicted for it, in float32."""
        return self.head(self.hidden(tokens, segment_ids=segment_ids), segment_ids)
