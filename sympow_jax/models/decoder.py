"""A decoder-only language model: GPT-2's shape with the attention of this family."""

import dataclasses
from typing import Literal, overload

import jax

from sympow_jax import layers
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.models import trunk
from sympow_jax.ops import documents

__all__ = ["DecoderLM", "DecoderState"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecoderState:
    """What a model carries from one call to the next.

    Attributes:
        layers: the state of every layer.
        position: where the document has got to; None unless positions are added to the embedding.
    """

    layers: tuple[layers.AttentionState, ...]
    position: documents.PositionState | None


class DecoderLM(trunk.TokenTrunk):
    """Pre-norm decoder with a LayerNorm after the embedding and the embedding's transpose as output.

    The architecture of "Conformal Transformations for Symmetric Power Transformers" (Kumar et al. 2025,
    section 4); with `biases` and position `learned_absolute`, and without `embedding_norm`, that of GPT-2.
    Matrix products are in `config.dtype`; parameters, the residual stream and logits are float32.
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
        """Logits of the next token in float32, and with `return_state` the state behind `tokens`.

        Consecutive calls, each given the state of the one before, equal one call. A document starts
        wherever the segment id changes; a negative id is padding, whose logits mean nothing. Places beyond
        learned absolute positions give NaN. Raises ValueError for more tokens than these have, and for
        `return_state` without a state where keys are kept: start from `init_state`.
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
        """As a call of the model, but the final normalized hidden states that `unembed` turns into logits."""
        x = self.embed(tokens)
        if state is None and not return_state:
            return self.encode(x, segment_ids)
        x, position = self.stem(x, segment_ids, None if state is None else state.position)
        x = trunk.residual_stream(x)
        layer_states = []
        for index, block in enumerate(self.blocks):
            layer_state = None if state is None else state.layers[index]
            x, layer_state = block(x, segment_ids=segment_ids, state=layer_state, return_state=return_state)
            if layer_state is not None:
                layer_states.append(layer_state)
        x = layers.normalize(self.final_norm, x, segment_ids)
        return (x, DecoderState(layers=tuple(layer_states), position=position)) if return_state else x

    def init_state(self, batch: int, *, max_length: int, kv_cache: bool | None = None) -> DecoderState:
        """The state before any token, for documents streamed in calls of up to `max_length` tokens in all.

        Every layer carries its recurrent state, or keeps that many keys and values if `kv_cache`, None meaning
        where this is cheaper; the KV cache of a document longer than `max_length` give NaN. Raises ValueError where the
        recurrent state would exceed memory, and for `kv_cache` that the attention does not leave open.
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
        """For how many positions a KV cache takes no more memory than the recurrent state.

        0 where keys are never kept, None where they always are.
        """
        return self.blocks[0].attention.kv_cache_length

    def fold(self, state: DecoderState) -> DecoderState:
        """The state with a KV cache folded into recurrent states, which do not grow.

        A row whose document has outgrown the KV cache is NaN from there on. Raises ValueError where the attention
        has no recurrent state.
        """
        folded = (block.attention.fold(layer) for block, layer in zip(self.blocks, state.layers))
        return dataclasses.replace(state, layers=tuple(folded))
