"""A decoder-only language model: GPT-2's shape with the attention of this family."""

import dataclasses
import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config as configs
from sympow_jax import layers
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import initializers, parallel, partitioning
from sympow_jax.ops import documents, rotary

__all__ = ["Block", "DecoderLM", "DecoderState", "logits", "parameter_specs"]

_NORM_EPSILON = 1e-5  # GPT-2's
# What the backward pass finds of a block, by `config.remat`, beside its input.
_KEPT = {
    "attention": jax.checkpoint_policies.save_only_these_names("power_attention_out"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderState:
    """What a model carries from one call to the next.

    layers: the state of every layer.
    position: where the document has got to; None unless positions are sinusoidal.
    """

    layers: tuple[layers.AttentionState, ...]
    position: documents.PositionState | None


class DecoderLM(nnx.Module):
    """Pre-norm decoder with a LayerNorm after the embedding and the embedding's transpose as output.

    The architecture of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025,
    section 4). Matrix products are in `config.dtype`; parameters, the residual stream and logits are
    float32.
    """

    def __init__(self, config: configs.ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        normal = nnx.initializers.normal(initializers.STANDARD_DEVIATION)
        self.embedding = nnx.Param(normal(rngs.params(), (config.vocab_size, config.width), jnp.float32))
        self.embedding_norm = _norm(config, jnp.float32, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.final_norm = _norm(config, jnp.dtype(config.dtype), rngs=rngs)

    @overload
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: DecoderState | None = None,
        return_state: Literal[False] = False,
    ) -> Float[Array, "B T V"]: ...

    @overload
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: DecoderState | None = None,
        return_state: Literal[True],
    ) -> tuple[Float[Array, "B T V"], DecoderState]: ...

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: DecoderState | None = None,
        return_state: bool = False,
    ) -> Float[Array, "B T V"] | tuple[Float[Array, "B T V"], DecoderState]:
        """Logits of the next token in float32, and with `return_state` the state behind `tokens`.

        Consecutive calls, each given the state of the one before, equal one call. A document starts
        wherever the segment id changes; a negative id is padding, whose logits mean nothing. Raises
        ValueError for `return_state` without a state where keys are kept: start from `init_state`.
        """
        if not return_state:
            return self.unembed(self.hidden(tokens, segment_ids=segment_ids, state=state))
        hidden, state = self.hidden(tokens, segment_ids=segment_ids, state=state, return_state=True)
        return self.unembed(hidden), state

    @overload
    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: DecoderState | None = None,
        return_state: Literal[False] = False,
    ) -> Float[Array, "B T M"]: ...

    @overload
    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: DecoderState | None = None,
        return_state: Literal[True],
    ) -> tuple[Float[Array, "B T M"], DecoderState]: ...

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: DecoderState | None = None,
        return_state: bool = False,
    ) -> Float[Array, "B T M"] | tuple[Float[Array, "B T M"], DecoderState]:
        """As a call of the model, but the final normalised hidden states that `unembed` turns into logits."""
        x = self.embedding_norm(parallel.lookup(self.embedding[...], tokens))
        position = None
        if self.config.attention.position == "sinusoidal":
            places, position = self._places(tokens, segment_ids, None if state is None else state.position)
            # After the norm, so that tokens and positions are of one scale.
            x += rotary.sinusoidal(places, self.config.width)
        layer_states = []
        x = _divided(x)
        for index, block in enumerate(self.blocks):
            if state is None and not return_state:
                x = _divided(_rematerialised(block, x, segment_ids, self.config.remat))
                continue
            layer_state = None if state is None else state.layers[index]
            x, layer_state = block(x, segment_ids=segment_ids, state=layer_state, return_state=return_state)
            if layer_state is not None:
                layer_states.append(layer_state)
        x = self.final_norm(x)
        return (x, DecoderState(layers=tuple(layer_states), position=position)) if return_state else x

    def unembed(self, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """Logits in float32: hidden states times the embedding's transpose."""
        return logits(hidden, self.embedding[...], jnp.dtype(self.config.dtype))

    def init_state(self, batch: int, *, max_length: int) -> DecoderState:
        """The state before any token, for documents streamed in calls of up to `max_length` tokens in all.

        Every layer carries its recurrent state, or keeps that many keys and values where this is cheaper;
        kept keys of a document longer than `max_length` give NaN. Raises ValueError where the recurrent
        state would exceed memory.
        """
        sinusoidal = self.config.attention.position == "sinusoidal"
        return DecoderState(
            layers=tuple(block.attention.init_state(batch, max_length=max_length) for block in self.blocks),
            position=documents.PositionState.zeros(batch) if sinusoidal else None,
        )

    def _places(self, tokens, segment_ids, state):
        if segment_ids is None:
            segment_ids = jnp.zeros_like(tokens)
        return documents.positions(segment_ids, state or documents.PositionState.zeros(len(tokens)))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x is float32."""

    def __init__(self, config: configs.ModelConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.attention_norm = _norm(config, dtype, rngs=rngs)
        self.attention = layers.Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config, dtype, rngs=rngs)
        self.mlp = layers.MLP(config, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T M"],
        *,
        segment_ids: Int[Array, "B T"] | None,
        state: layers.AttentionState | None,
        return_state: bool,
    ) -> tuple[Float[Array, "B T M"], layers.AttentionState | None]:
        """The new residual stream and, with `return_state`, the layer's state."""
        normed = self.attention_norm(x)
        if return_state:
            mixed, state = self.attention(normed, segment_ids=segment_ids, state=state, return_state=True)
        else:
            mixed, state = self.attention(normed, segment_ids=segment_ids, state=state), None
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state


def _norm(config: configs.ModelConfig, dtype, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.width, epsilon=_NORM_EPSILON, dtype=dtype, rngs=rngs)


def logits(
    hidden: Float[Array, "B T M"], embedding: Float[Array, "V M"], dtype: Any
) -> Float[Array, "B T V"]:
    """hidden . embedding^T, a product in `dtype` whose sums and result are float32."""
    return jnp.einsum(
        "btm,vm->btv", hidden.astype(dtype), embedding.astype(dtype), preferred_element_type=jnp.float32
    )


def parameter_specs(config: configs.ModelConfig) -> dict[tuple[Any, ...], jax.sharding.PartitionSpec]:
    """How the model's matrices are divided over a mesh, by path; all other parameters are on every device."""
    model = nnx.eval_shape(lambda: DecoderLM(config, rngs=nnx.Rngs(0)))
    specs: dict[tuple[Any, ...], jax.sharding.PartitionSpec] = {("embedding",): partitioning.ROWS}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, initializers.Linear):
            specs[*path, "kernel"] = module.spec
    return specs


def _divided(x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
    return partitioning.constrain(x, partitioning.TOKENS)


def _rematerialised(
    block: Block, x: Float[Array, "B T M"], segment_ids: Int[Array, "B T"] | None, remat: str
) -> Float[Array, "B T M"]:
    """The block's new residual stream, the backward pass computing again what `remat` says."""
    if remat == "none":
        return block(x, segment_ids=segment_ids, state=None, return_state=False)[0]
    graph, params = nnx.split(block)

    @functools.partial(jax.checkpoint, policy=_KEPT[remat])
    def call(params: nnx.State, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        layer = nnx.merge(graph, params)
        return layer(x, segment_ids=segment_ids, state=None, return_state=False)[0]

    return call(params, x)
