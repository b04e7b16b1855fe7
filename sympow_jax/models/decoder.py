"""Decoder-only language model with GPT-2's architecture and the attention of this package."""

import dataclasses
from typing import Any

import jax

from sympow_jax import layers
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers.attention import memory
from sympow_jax.models import trunk
from sympow_jax.ops import arguments, documents, pytree


class DecoderState(pytree.State):
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

    def __call__(
        self, tokens: Int[Array, "B T"], *, segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T V"]:
        """Returns float32 logits of the next tokens.

        A document starts wherever the segment id changes. A negative id is padding, whose logits are meaningless.

        Raises:
            ValueError: a document has more tokens than there are learned absolute positions.
        """
        return self.unembed(self.hidden(tokens, segment_ids=segment_ids))

    def extend(
        self, tokens: Int[Array, "B T"], state: DecoderState, *, segment_ids: Int[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T V"], DecoderState]:
        """Returns float32 logits of the next tokens after those of a state, and the state after `tokens`.

        Consecutive calls, the first from `init_state` and each from the state before it, equal one call of the model.
        Logits beyond learned absolute positions are NaN.

        Raises:
            ValueError: the state is not one of this model, or `tokens` have a document with more tokens than there are
                learned absolute positions.
        """
        hidden, state = self.extend_hidden(tokens, state, segment_ids=segment_ids)
        return self.unembed(hidden), state

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        initial_state: DecoderState | None = None,
        compiled: bool = False,
    ) -> Float[Array, "B T M"]:
        """Returns the final normalized hidden states, from which `unembed` computes logits.

        Args:
            tokens: tokens of each row.
            segment_ids: as in `__call__`.
            initial_state: state after earlier tokens. Blocks are then always `compiled`.
            compiled: whether to compile one program for all blocks of equal structure, so that a call outside of
                `jax.jit` takes no longer to compile with more layers. What blocks store in themselves is lost.
        """
        if initial_state is None and (not compiled or hasattr(self, "stacked_blocks")):
            return self.encode(self.embed(tokens), segment_ids)
        return self._over_states(_compiled_output, tokens, segment_ids, initial_state)[0]

    def extend_hidden(
        self,
        tokens: Int[Array, "B T"],
        state: DecoderState,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        compiled: bool = False,
        donate_state: bool = False,
    ) -> tuple[Float[Array, "B T M"], DecoderState]:
        """Returns the hidden states instead of the logits of `extend`; `compiled` is as in `hidden`.

        `donate_state` compiles too, and the new state reuses the memory of `state`, which can no longer be read.
        """
        apply = _compiled_in_place if donate_state else _compiled if compiled else trunk.Block.extend
        return self._over_states(apply, tokens, segment_ids, state)

    def _over_states(self, apply, tokens, segment_ids, state):
        """Returns the hidden states and the new state, whose layers are those that `apply` returns for each block."""
        x = self.embed(tokens)
        if state is not None:
            self._check_outside_layers(state)
        layer_states = [None] * len(self.blocks) if state is None else state.layers
        segment_ids = arguments.to_segment_ids(segment_ids, x.shape[:2])
        x, position = self._stem(x, segment_ids, None if state is None else state.position)
        x, after = trunk.shard_tokens(x), []
        for block, layer_state in zip(self.blocks, layer_states):
            x, layer_state = apply(block, x, layer_state, segment_ids=segment_ids)
            after.append(layer_state)
        x = layers.normalize(self.final_norm, x, segment_ids)
        return x, DecoderState(layers=tuple(after), position=position)

    def init_state(
        self, batch: int, *, max_length: int | None = None, kv_cache: bool | None = None
    ) -> DecoderState:
        """Returns the state before any token.

        Args:
            batch: number of rows.
            max_length: capacity of a KV cache, in tokens of a document over all calls; at least 1. Outputs beyond are
                NaN. None for memories that do not grow: recurrent states, and caches of a whole window.
            kv_cache: whether layers use a KV cache instead of the recurrent state. None chooses the one that takes less
                memory for each layer.

        Raises:
            ValueError: the recurrent state would exceed memory, or the attention of a layer does not support `kv_cache`
                or needs `max_length`.
        """
        return DecoderState(
            layers=tuple(
                block.attention.init_state(batch, max_length=max_length, kv_cache=kv_cache)
                for block in self.blocks
            ),
            position=self.init_position(batch),
        )

    def init_position(self, batch: int) -> documents.PositionState | None:
        """Returns the position of a state before any token."""
        return None if self.config.added_position is None else documents.PositionState.zeros(batch)

    def check_state(self, state: Any, batch: int | None = None) -> None:
        """Raises ValueError unless `state` is one of this model, for `batch` rows or, if None, for any number."""
        self._check_outside_layers(state)
        batch = _rows(state) if batch is None else batch
        for layer, (block, own) in enumerate(zip(self.blocks, state.layers)):
            try:
                block.attention.check_state(own, batch)
            except ValueError as error:
                raise ValueError(f"layer {layer}: {error}") from None

    def _check_outside_layers(self, state: Any) -> None:
        """Raises ValueError unless a state has this model's layers and position; each layer checks its own state."""
        if not isinstance(state, DecoderState):
            raise ValueError(f"the state is a {type(state).__name__}; make it with init_state of the model")
        if len(state.layers) != len(self.blocks):
            raise ValueError(
                f"the state has {len(state.layers)} layers and the model {len(self.blocks)}; make it with init_state "
                f"of the model"
            )
        if different := pytree.difference(state.position, self.init_position(_rows(state))):
            raise ValueError(
                f"the state is not one of this model: its position{different}; make it with init_state of the model"
            )

    @property
    def kv_cache_lengths(self) -> tuple[int | None, ...]:
        """For each layer, the longest KV cache that takes no more memory than its recurrent state.

        0 if a cache is never used, None if always.
        """
        return tuple(block.attention.kernel.max_cache_length for block in self.blocks)

    def fold(self, state: DecoderState) -> DecoderState:
        """Returns the state with KV caches replaced by the recurrent states of their tokens, which do not grow.

        Layers with neither a recurrent state nor a window keep their cache. The cache of a sliding window gets room
        for the whole window. A row whose document has exceeded the capacity of a cache that is replaced
        becomes NaN.

        Raises:
            ValueError: a layer's state is not its own, or no layer has a recurrent state or a window.
        """
        self._check_outside_layers(state)
        bounded = [memory.is_bounded(block.attention.kernel) for block in self.blocks]
        if not any(bounded):
            # The error of a layer names the reason.
            self.blocks[0].attention.fold(state.layers[0])
        folded = [
            block.attention.fold(layer) if folds else layer
            for block, layer, folds in zip(self.blocks, state.layers, bounded)
        ]
        return dataclasses.replace(state, layers=tuple(folded))


def _rows(state: DecoderState) -> int:
    return len(jax.tree.leaves(state.layers[0])[0])


@jax.jit
def _compiled_output(block, x, state, *, segment_ids):
    """Applies a block without computing its new state."""
    if state is None:
        return block(x, segment_ids=segment_ids), None
    return block.extend(x, state, segment_ids=segment_ids)[0], None


_compiled = jax.jit(trunk.Block.extend)
_compiled_in_place = jax.jit(trunk.Block.extend, donate_argnames="state")
