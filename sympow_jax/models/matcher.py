"""Decoder whose new attention is trained to give the outputs of the attention that it replaces."""

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as config_lib
from sympow_jax import layers
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.models import trunk
from sympow_jax.ops import arguments


class _MatchedBlock(trunk.Block):
    """Block that runs the original attention and measures the error of the new one.

    Attributes:
        original: attention that `attention` replaces; None in layers that keep theirs.
    """

    original: layers.Attention | None

    def __init__(self, config: config_lib.ModelConfig, layer: int, *, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs=rngs)
        is_new = layer in config.replaced_layers
        self.original = layers.make_attention(config.original, rngs=rngs) if is_new else None

    def match(
        self, x: Float[Array, "B T M"], segment_ids: Int[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T M"], Float[Array, "B T"]]:
        """Returns the residual stream after the original block, and the squared error of the new attention.

        The error of a token is |new - old|^2, divided by the mean of |old|^2 over the tokens of the call that are not
        padding. It is 0 in a layer that keeps its attention.
        """
        normed = layers.normalize(self.attention_norm, x, segment_ids)
        error = jnp.zeros(x.shape[:2], jnp.float32)
        if self.original is not None:
            old = jax.lax.stop_gradient(self.original(normed, segment_ids=segment_ids)).astype(jnp.float32)
            new = self.attention(jax.lax.stop_gradient(normed), segment_ids=segment_ids)
            counts = jnp.ones(x.shape[:2], bool) if segment_ids is None else segment_ids >= 0
            size = jnp.sum(jnp.square(old).sum(-1), where=counts) / jnp.maximum(counts.sum(), 1)
            error = jnp.square(new - old).sum(-1) / jnp.maximum(size, jnp.finfo(jnp.float32).tiny)
        else:
            old = self.attention(normed, segment_ids=segment_ids)
        return jax.lax.stop_gradient(self._fed_forward(x + old, segment_ids)), error


class AttentionMatcher(trunk.TokenTrunk):
    """Original decoder, whose replaced layers also compute the new attention and its error.

    Each new layer reads the input of the layer that it replaces, so all are trained at once and independently. The
    final norm and the output table are not used here; the second stage starts from them.
    """

    block_type = _MatchedBlock

    @staticmethod
    def source(name: str) -> str:
        """Returns the name of a parameter in the original decoder."""
        return name.replace(".original.", ".attention.")

    @classmethod
    def is_trained(cls, config: config_lib.ModelConfig, name: str) -> bool:
        """Returns whether a parameter belongs to new attention; only these are trained."""
        first, *rest = name.split(".")
        return first == "blocks" and rest[1] == "attention" and int(rest[0]) in config.replaced_layers

    def errors(
        self, tokens: Int[Array, "B T"], *, segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T layers"]:
        """Returns the relative squared error of each token in each new layer.

        The mean over tokens is 1 if a new layer outputs zeros. Only the new attention has gradients.

        Raises:
            ValueError: as `TokenTrunk.embed`, or a document is longer than learned positions.
        """
        segment_ids = arguments.to_segment_ids(segment_ids, tokens.shape)
        x, _ = self._stem(self.embed(tokens), segment_ids)
        x = jax.lax.stop_gradient(x)

        def step(
            block: trunk.Block, carry: tuple[Float[Array, "B T M"], Float[Array, "B T layers"]]
        ) -> tuple[Float[Array, "B T M"], Float[Array, "B T layers"]]:
            assert isinstance(block, _MatchedBlock)
            (x, errors), is_new = carry, block.original is not None
            x, error = block.match(x, segment_ids)
            # The first in is the first after all blocks, because there is a place for each new layer.
            return x, jnp.concatenate([errors[..., 1:], error[..., None]], axis=-1) if is_new else errors

        zeros = jnp.zeros((*x.shape[:2], len(self.config.replaced_layers)), jnp.float32)
        return self._over_blocks(step, (trunk.shard_tokens(x), zeros))[1]
