"""Decoder-only language model with GPT-2's architecture and the attention of this package."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax

from sympow_jax import layers
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.models import trunk
from sympow_jax.ops import arguments, documents
from sympow_jax.ops.pytree import State

__all__ = ["DecoderLM", "DecoderState"]


class DecoderState(State):
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
        initial_state: DecoderState | None = None,
        return_state: Literal[False] = False,
    ) -> Float[Array, "B T V"]: ...

    @overload
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        initial_state: DecoderState | None = None,
        return_state: Literal[True],
    ) -> tuple[Float[Array, "B T V"], DecoderState]: ...

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        initial_state: DecoderState | None = None,
        return_state: bool = False,
    ) -> Float[Array, "B T V"] | tuple[Float[Array, "B T V"], DecoderState]:
        """Returns float32 logits of the next tokens and, with `return_state`, the state after `tokens`.

        `initial_state` is the state after earlier tokens. Consecutive calls, each given the previous state, equal one
        call. A document starts wherever the segment id changes. A negative id is padding, whose logits are meaningless.
        Logits beyond learned absolute positions are NaN.

        Raises:
            ValueError: a document has more tokens than there are learned absolute positions, the state is of a model
                with another number of layers, or `return_state` is set without an initial state and the attention needs
                a KV cache (start from `init_state`).
        """
        if not return_state:
            return self.unembed(self.hidden(tokens, segment_ids=segment_ids, initial_state=initial_state))
        hidden, state = self.hidden(
            tokens, segment_ids=segment_ids, initial_state=initial_state, return_state=True
        )
        return self.unembed(hidden), state

    @overload
    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        initial_state: DecoderState | None = None,
        return_state: Literal[False] = False,
        compiled: bool = False,
    ) -> Float[Array, "B T M"]: ...

    @overload
    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        initial_state: DecoderState | None = None,
        return_state: Literal[True],
        compiled: bool = False,
        donate_state: bool = False,
    ) -> tuple[Float[Array, "B T M"], DecoderState]: ...

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        initial_state: DecoderState | None = None,
        return_state: bool = False,
        compiled: bool = False,
        donate_state: bool = False,
    ) -> Float[Array, "B T M"] | tuple[Float[Array, "B T M"], DecoderState]:
        """Returns the final normalized hidden states instead of the logits that `unembed` computes from them.

        `compiled` compiles one program for all blocks of equal structure, so that a call outside of `jax.jit` takes
        no longer to compile with more layers; what blocks store in themselves is lost. `donate_state` does so too,
        and the new state reuses the memory of `initial_state`, which can no longer be read.
        """
        x = self.embed(tokens)
        state = initial_state
        if state is None and not return_state and (not compiled or hasattr(self, "stacked_blocks")):
            return self.encode(x, segment_ids)
        if state is not None and not isinstance(state, DecoderState):
            raise ValueError(f"the state is a {type(state).__name__}; make it with this model's init_state")
        if state is not None and len(state.layers) != len(self.blocks):
            raise ValueError(
                f"the state has {len(state.layers)} layers and the model {len(self.blocks)}; make it with this model's "
                f"init_state"
            )
        segment_ids = arguments.to_segment_ids(segment_ids, x.shape[:2])
        x, position = self._stem(x, segment_ids, None if state is None else state.position)
        x = trunk.shard_tokens(x)
        apply: Any = _compiled if compiled else trunk.Block.__call__
        if donate_state:
            apply = _compiled_in_place
        layer_states: list[Any] = []
        for index, block in enumerate(self.blocks):
            layer_state = None if state is None else state.layers[index]
            x, layer_state = apply(
                block, x, segment_ids=segment_ids, initial_state=layer_state, return_state=return_state
            )
            layer_states.append(layer_state)
        x = layers.normalize(self.final_norm, x, segment_ids)
        return (x, DecoderState(layers=tuple(layer_states), position=position)) if return_state else x

    def init_state(
        self, batch: int, *, max_length: int | None = None, kv_cache: bool | Sequence[bool] | None = None
    ) -> DecoderState:
        """Returns the state before any token.

        Args:
            batch: number of rows.
            max_length: capacity of a KV cache, in tokens of a document over all calls; at least 1. Outputs beyond are
                NaN. None for memories that do not grow: recurrent states, and caches of a whole window.
            kv_cache: whether layers use a KV cache instead of the recurrent state, for all layers or for each. None
                chooses the cheaper one for each layer.

        Raises:
            ValueError: the recurrent state would exceed memory, the attention of a layer does not support `kv_cache` or
                needs `max_length`, or `kv_cache` is for another number of layers.
        """
        choices = kv_cache if isinstance(kv_cache, Sequence) else [kv_cache] * len(self.blocks)
        if len(choices) != len(self.blocks):
            raise ValueError(f"kv_cache is for {len(choices)} layers; the model has {len(self.blocks)}")
        return DecoderState(
            layers=tuple(
                block.attention.init_state(batch, max_length=max_length, kv_cache=choice)
                for block, choice in zip(self.blocks, choices)
            ),
            position=None if self.config.added_position is None else documents.PositionState.zeros(batch),
        )

    @property
    def kv_cache_lengths(self) -> tuple[int | None, ...]:
        """For each layer, the longest KV cache that takes no more memory than its recurrent state.

        0 if a cache is never used, None if always.
        """
        return tuple(block.attention.kv_cache_length for block in self.blocks)

    def fold(self, state: DecoderState) -> DecoderState:
        """Returns the state with KV caches replaced by the recurrent states of their tokens, which do not grow.

        Layers with neither a recurrent state nor a window keep their cache. The cache of a sliding window gets room
        for the whole window. A row whose document has exceeded the capacity of a cache
        that is replaced becomes NaN.

        Raises:
            ValueError: no layer has a recurrent state or a window.
        """
        kernels = [block.attention.kernel for block in self.blocks]
        bounded = [x.supports_memory(kv_cache=False) or x.cache_limit is not None for x in kernels]
        if not any(bounded):
            # The error of a layer names the reason.
            self.blocks[0].attention.fold(state.layers[0])
        folded = [
            block.attention.fold(layer) if folds else layer
            for block, layer, folds in zip(self.blocks, state.layers, bounded)
        ]
        return dataclasses.replace(state, layers=tuple(folded))


_compiled = jax.jit(trunk.Block.__call__, static_argnames="return_state")
_compiled_in_place = jax.jit(
    trunk.Block.__call__, static_argnames="return_state", donate_argnames="initial_state"
)
