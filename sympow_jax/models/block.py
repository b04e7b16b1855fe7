"""What all models are made of: pre-norm blocks of attention and a feed-forward layer."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as configs
from sympow_jax import layers
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import initializers, parallel, partitioning
from sympow_jax.ops import documents, rotary

__all__ = ["Block", "divided", "logits", "position_table", "run", "stem"]

# What the backward pass finds of a block, by `config.remat`, beside its input.
_KEPT = {
    "attention": jax.checkpoint_policies.save_only_these_names("power_attention_out"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x is float32."""

    def __init__(self, config: configs.ModelConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.attention_norm = layers.make_norm(config, dtype, rngs=rngs)
        self.attention = layers.Attention(config, rngs=rngs)
        self.mlp_norm = layers.make_norm(config, dtype, rngs=rngs)
        self.mlp = layers.MLP(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T M"],
        *,
        segment_ids: Int[Array, "B T"] | None,
        state: layers.AttentionState | None = None,
        return_state: bool = False,
    ) -> tuple[Float[Array, "B T M"], layers.AttentionState | None]:
        """The new residual stream and, with `return_state`, the layer's state."""
        normed = layers.normalise(self.attention_norm, x, segment_ids)
        if return_state:
            mixed, state = self.attention(normed, segment_ids=segment_ids, state=state, return_state=True)
        else:
            mixed, state = self.attention(normed, segment_ids=segment_ids, state=state), None
        x = x + mixed
        return x + self.mlp(layers.normalise(self.mlp_norm, x, segment_ids)), state


def run(
    blocks: Iterable[Block], x: Float[Array, "B T M"], segment_ids: Int[Array, "B T"] | None, remat: str
) -> Float[Array, "B T M"]:
    """x through the blocks one after the other, the backward pass computing again what `remat` says."""
    x = divided(x)
    for block in blocks:
        x = divided(_rematerialised(block, x, segment_ids, remat))
    return x


def divided(x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    """The residual stream, divided over the mesh in scope."""
    return partitioning.constrain(x, partitioning.TOKENS)


def position_table(config: configs.ModelConfig, *, rngs: nnx.Rngs) -> nnx.Param:
    """What position `learned_absolute` adds at each place of a document, float32 [max_document_length, M]."""
    shape = (config.attention.max_document_length, config.width)
    return nnx.Param(
        nnx.initializers.normal(initializers.STANDARD_DEVIATION)(rngs.params(), shape, jnp.float32)
    )


def stem(
    model: Any,
    x: Float[Array, "B T M"],
    segment_ids: Int[Array, "B T"] | None,
    state: documents.PositionState | None = None,
) -> tuple[Float[Array, "B T M"], documents.PositionState | None]:
    """Embedded tokens or patches as a model's first block gets them, and the place reached from `state`.

    They are normalised by its `embedding_norm`, and positions are added, as `model.config` says. Places beyond the
    model's `position_embedding` give NaN. Raises ValueError where there are more tokens than it has rows.
    """
    attention = model.config.attention
    if model.config.embedding_norm:
        x = layers.normalise(model.embedding_norm, x, segment_ids)
    if not attention.adds_position:
        return x, None
    longest = attention.longest_document
    if longest is not None and x.shape[1] > longest:
        raise ValueError(
            f"there are {x.shape[1]} tokens, but learned positions end at model.attention.max_document_length, "
            f"{longest}; use shorter documents or another position"
        )
    if segment_ids is None:
        segment_ids = jnp.zeros(x.shape[:2], jnp.int32)
    places, state = documents.positions(segment_ids, state or documents.PositionState.zeros(len(x)))
    # After the norm, so that tokens and positions are of one scale.
    if longest is None:
        return x + rotary.sinusoidal(places, x.shape[-1]), state
    rows = parallel.lookup(model.position_embedding[...], jnp.clip(places - 1, 0, longest - 1))
    return x + jnp.where((places > longest)[..., None], jnp.nan, rows), state


def logits(
    hidden: Float[Array, "B T M"], embedding: Float[Array, "V M"], dtype: Any
) -> Float[Array, "B T V"]:
    """hidden . embedding^T, a product in `dtype` whose sums and result are float32."""
    return jnp.einsum(
        "btm,vm->btv", hidden.astype(dtype), embedding.astype(dtype), preferred_element_type=jnp.float32
    )


def _rematerialised(
    block: Block, x: Float[Array, "B T M"], segment_ids: Int[Array, "B T"] | None, remat: str
) -> Float[Array, "B T M"]:
    if remat == "none":
        return block(x, segment_ids=segment_ids)[0]
    graph, *variables = nnx.split(block, nnx.Param, nnx.BatchStat)

    @functools.partial(jax.checkpoint, policy=_KEPT[remat])
    def call(x: Float[Array, "B T M"], *variables: nnx.State) -> tuple[Float[Array, "B T M"], nnx.State]:
        layer = nnx.merge(graph, *variables)
        return layer(x, segment_ids=segment_ids)[0], nnx.state(layer, nnx.BatchStat)

    x, statistics = call(x, *variables)
    nnx.update(block, statistics)
    return x
