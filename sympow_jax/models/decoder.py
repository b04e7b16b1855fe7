"""Decoder-only language model with GPT-2's architecture and the attention of this package."""

import dataclasses
from typing import Any, Literal, overload

import jax

from sympow_jax import layers
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.models import trunk
from sympow_jax.ops import documents
from sympow_jax.ops._shared import arguments

__all__ = ["DecoderLM", "DecoderState"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderState:
    """State of a decoder after a prefix of tokens.

    Attributes:
        layers: state of every layer.
        position: position in the current document; None unless positions are added to the embedding.
    """

    layers: tuple[layers.AttentionState, ...]
    position: documents.PositionState | None


class DecoderLM(trunk.TokenTrunk):
    """Pre-norm decoder with a LayerNorm after the embedding and a tied unembedding.

    The default is the architecture of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025,
    section 4). With `biases` and position `learned_absolute`, and without `embedding_norm`, it is GPT-2's. The sizes
    of Llama 3, Qwen and StarCoder2 in `config.MODEL_SIZES`, with the presets of their names, make it theirs. Matrix
    products are in `config.dtype`. Parameters, the residual stream and logits are float32.
    """

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
        """Returns float32 logits of the next tokens and, with `return_state`, the state after `tokens`.

        Consecutive calls, each given the previous state, equal one call. A document starts wherever the segment id
        changes. A negative id is padding, whose logits are meaningless. Logits beyond learned absolute positions are
        NaN.

        Raises:
            ValueError: a document has more tokens than there are learned absolute positions (`stem`), the state is of
                a model with another number of layers, or `return_state` is set without a state and the attention needs
                a KV cache (start from `init_state`).
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
        """Returns the final normalized hidden states instead of the logits that `unembed` computes from them."""
        x = self.embed(tokens)
        if state is None and not return_state:
            return self.encode(x, segment_ids)
        if state is not None and len(state.layers) != len(self.blocks):
            raise ValueError(
                f"the state has {len(state.layers)} layers and the model {len(self.blocks)}; make it with this model's "
                f"init_state"
            )
        segment_ids = arguments.to_segment_ids(segment_ids, x.shape[:2])
        x, position = self.stem(x, segment_ids, None if state is None else state.position)
        x = trunk.residual_stream(x)
        layer_states: list[Any] = []
        for index, block in enumerate(self.blocks):
            layer_state = None if state is None else state.layers[index]
            x, layer_state = block(x, segment_ids=segment_ids, state=layer_state, return_state=return_state)
            layer_states.append(layer_state)
        x = layers.normalize(self.final_norm, x, segment_ids)
        return (x, DecoderState(layers=tuple(layer_states), position=position)) if return_state else x

    def init_state(self, batch: int, *, max_length: int, kv_cache: bool | None = None) -> DecoderState:
        """Returns the state before any token.

        Args:
            batch: number of rows.
            max_length: capacity of a KV cache, in tokens of a document over all calls; at least 1. Outputs beyond are
                NaN.
            kv_cache: whether layers use a KV cache instead of the recurrent state. None chooses the cheaper one.

        Raises:
            ValueError: the recurrent state would exceed memory, or the attention does not support `kv_cache`.
        """
        added = self.config.attention.adds_position
        return DecoderState(
            layers=tuple(
                block.attention.init_state(batch, max_length=max_length, kv_cache=kv_cache)
                for block in self.blocks
            ),
            position=documents.PositionState.zeros(batch) if added else None,
        )

    @property
    def kv_cache_length(self) -> int | None:
        """Longest KV cache that takes no more memory than the recurrent state.

        0 if a cache is never used, None if always.
        """
        return self.blocks[0].attention.kv_cache_length

    def fold(self, state: DecoderState) -> DecoderState:
        """Returns the state with KV caches replaced by the recurrent states of their tokens, which do not grow.

        A row whose document has exceeded the capacity of the cache becomes NaN.

        Raises:
            ValueError: the attention has no recurrent state.
        """
        folded = (block.attention.fold(layer) for block, layer in zip(self.blocks, state.layers))
        return dataclasses.replace(state, layers=tuple(folded))
