"""Prefill and single-token decoding.

A model whose parameters are on a mesh with the axes of `layers.partitioning` is computed on that mesh: rows are sharded
over `data` and `fsdp`, heads and their states over `tensor`, and the time of a prompt over `context` in layers whose
state allows it (`layers.attention.memory.may_shard_time`). An axis that does not divide the number of rows or of
key/value heads does not shard them: every device along it then has them all. Functions that are called within `jax.jit`
use the mesh in scope.
"""

import contextlib
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import config as config_lib
from sympow_jax import models
from sympow_jax.array_types import Array, Float, Int
from sympow_jax.layers import partitioning
from sympow_jax.ops import arguments
from sympow_jax.ops.promotion import by_default_rules

# A prompt and its continuation are one document. Padding after shorter prompts leaves the state unchanged.
_SEGMENT, _PADDING = 0, -1


@jax.tree_util.register_pytree_node_class
class Program:
    """Prefill and decoding of a model, whose parameters are flattened once instead of once per token.

    It has the parameters that the model had when it was made. It is a pytree of them, which `jax.jit` takes as an
    argument. All methods are pure functions. In `jax.jit`, a program on a mesh must be an argument, not a constant.

    Args:
        model: the decoder, with its blocks in a list.

    Raises:
        ValueError: `model` is no `DecoderLM`.

    Examples:
        >>> import numpy as np
        >>> from sympow_jax import config, generation, models
        >>> settings = config.ModelConfig(vocab_size=256, layers=1, width=32, heads=2)
        >>> program = generation.Program(models.DecoderLM(settings, rngs=0))
        >>> logits, state = program.prefill(np.array([[5, 6, 7]]), np.array([3]))
        >>> logits, state = program.decode(state, logits.argmax(-1))
        >>> logits.shape
        (1, 256)
    """

    def __init__(self, model: models.DecoderLM):
        if not isinstance(model, models.DecoderLM):
            raise ValueError(f"model is a {type(model).__name__}; it must be a models.DecoderLM")
        self.config = model.config
        self.leaves, self._structure = jax.tree.flatten(model)

    def tree_flatten(self) -> tuple[list[Array], tuple[config_lib.ModelConfig, Any]]:
        """Returns the parameters, and the settings and structure of the model."""
        return self.leaves, (self.config, self._structure)

    @classmethod
    def tree_unflatten(cls, static: tuple[config_lib.ModelConfig, Any], leaves: list[Array]) -> Self:
        """Returns the program of a model with these settings, structure and parameters."""
        program = object.__new__(cls)
        program.leaves, (program.config, program._structure) = leaves, static
        return program

    @property
    def model(self) -> models.DecoderLM:
        """The model."""
        model: models.DecoderLM = jax.tree.unflatten(self._structure, self.leaves)
        return model

    def init_state(self, batch: int, *, max_length: int | None = None) -> models.DecoderState:
        """Returns the state before any token.

        A layer uses a KV cache if `max_length` tokens fit in no more memory than its recurrent state, or if it has no
        recurrent state. The cache has room for `max_length` tokens per row, including the prompt. Outputs beyond are
        NaN. To continue beyond, `fold` the caches first, if every layer has a recurrent state or a window. The cache of
        a sliding window needs room for window - 1 tokens only; with that, outputs are never NaN. If `max_length` is
        None, layers use the fixed-size recurrent state or the cache of a whole window.

        Raises:
            ValueError: `max_length` is None and a layer has neither a recurrent state nor a window, or the recurrent
                state would exceed the memory of the device.
        """
        with mesh_in_scope(self.leaves):
            return self.model.init_state(batch, max_length=max_length)

    def prefill(
        self,
        tokens: Int[Array | np.ndarray, "B T"],
        lengths: Int[Array | np.ndarray, " B"],
        *,
        max_length: int | None = None,
        initial_state: models.DecoderState | None = None,
    ) -> tuple[Float[Array, "B V"], models.DecoderState]:
        """Returns the logits of the token that follows each row, in float32, and the state after the rows.

        Rows are independent of each other. Logits are computed for the last token of each row only.

        Args:
            tokens: row b is the first `lengths[b]` tokens; later tokens are ignored.
            lengths: number of tokens of each row, from 1 to T.
            max_length: argument of `init_state` if `initial_state` is None.
            initial_state: state after earlier tokens, for instance after a long context. None starts with
                `init_state(B, max_length=max_length)`.

        Raises:
            ValueError: a row is empty, is longer than T or exceeds the model's learned positions, a token is not in the
                vocabulary, the state is of another model or batch size, or `max_length` is missing (`init_state`).
        """
        check_batch(tokens, lengths)
        if not isinstance(lengths, jax.core.Tracer):
            counts, longest = np.asarray(lengths), self.config.longest_document
            _check_rows(self.config, tokens, counts)
            before: Any = np.zeros_like(counts)
            if isinstance(initial_state, models.DecoderState) and initial_state.position is not None:
                before = initial_state.position.position
            # `padded` refuses other numbers of rows.
            if (
                longest is not None
                and not isinstance(before, jax.core.Tracer)
                and before.shape == counts.shape
            ):
                after = np.asarray(before) + counts
                if (after > longest).any():
                    row = int(after.argmax())
                    raise ValueError(
                        f"row {row} has {counts[row]} tokens after {before[row]} others, but the model's learned "
                        f"positions end at {longest} tokens; shorten it"
                    )
        state = initial_state
        if state is None:
            state = self.init_state(tokens.shape[0], max_length=max_length)
        lengths = jnp.asarray(lengths)
        with mesh_in_scope(self.leaves):
            # To equal shards of time.
            if missing := -tokens.shape[1] % partitioning.size(partitioning.CONTEXT):
                tokens = jnp.pad(tokens, [(0, 0), (0, missing)])
            ids, segment_ids = padded(self, jnp.asarray(tokens), lengths, state)
            options: Any = {"compiled": True, "donate_state": initial_state is None}
            hidden, state = self.model.extend_hidden(ids, state, segment_ids=segment_ids, **options)
            return _last_logits(self, hidden, lengths), state

    def decode(
        self, state: models.DecoderState, token: Int[Array | np.ndarray, " B"]
    ) -> tuple[Float[Array, "B V"], models.DecoderState]:
        """Returns the logits of the token after `token`, in float32, and the state after `token`.

        `state` is not modified. Logits are NaN beyond the capacity of a KV cache and beyond learned absolute positions,
        and for a token outside the vocabulary, which is not checked where it would wait for the device.

        Raises:
            ValueError: the state is of another model or batch size, or the tokens are not integers of shape [B] or, in
                a NumPy array, not in the vocabulary.
        """
        arguments.check_array("token", token)
        if token.ndim != 1 or not jnp.issubdtype(token.dtype, jnp.integer):
            raise ValueError(f"token is {token.dtype} {list(token.shape)}; it must be integers of shape [B]")
        if isinstance(token, np.ndarray):
            _check_rows(self.config, token[:, None], np.ones(len(token), int))
        with mesh_in_scope(self.leaves):
            return _decode(self, state, jnp.asarray(token))

    def fold(self, state: models.DecoderState) -> models.DecoderState:
        """Converts a KV cache to the recurrent state of its tokens, which does not grow.

        Decoding continues with the same results. The cache of a sliding window gets room for the whole window.
        Recurrent states are returned unchanged, and so are caches of layers that have neither. Rows that have already
        exceeded the capacity of a cache that is converted become NaN.

        Raises:
            ValueError: the state is of another model, or no layer has a recurrent state or a window.
        """
        with mesh_in_scope(self.leaves):
            return _fold(self, state)


def mesh_in_scope(leaves: list[Array]) -> contextlib.AbstractContextManager[Any]:
    """Returns a context with the mesh of a model's parameters in scope; traced ones leave the scope as it is."""
    parameter: Any = leaves[0]
    mesh = None if isinstance(parameter, jax.core.Tracer) else getattr(parameter.sharding, "mesh", None)
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.size == 1:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def check_batch(tokens: Array | np.ndarray, lengths: Array | np.ndarray) -> None:
    """Raises ValueError unless these are arrays of integers of shapes [B, T] and [B]."""
    arguments.check_array("tokens", tokens)
    arguments.check_array("lengths", lengths)
    if tokens.ndim != 2 or 0 in tokens.shape or lengths.shape != tokens.shape[:1]:
        raise ValueError(
            f"tokens have shape {tokens.shape} and lengths {lengths.shape}; they must be [B, T] and [B], T at least 1"
        )
    for name, array in {"tokens": tokens, "lengths": lengths}.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} have dtype {array.dtype}; it must be an integer dtype")


def _check_rows(config: config_lib.ModelConfig, tokens: Array | np.ndarray, lengths: np.ndarray) -> None:
    time, vocab_size = tokens.shape[1], config.vocab_size
    for row, length in enumerate(lengths):
        if not 1 <= length <= time:
            raise ValueError(
                f"row {row} has length {length}; it must be at least 1 and at most the {time} tokens given"
            )
    if isinstance(tokens, jax.core.Tracer):
        return
    inside = np.arange(time) < lengths[:, None]
    array = np.asarray(tokens)
    wrong = inside & ((array < 0) | (array >= vocab_size))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"token {array[row, column]} at position {column} of row {row} is not in the vocabulary of {vocab_size}"
        )


@jax.jit
@by_default_rules
def padded(program, tokens, lengths, state):
    """Returns tokens without those after each row, and segment ids; raises ValueError for a state of another model."""
    program.model.check_state(state, tokens.shape[0])
    inside = jnp.arange(tokens.shape[1]) < lengths[:, None]
    return jnp.where(inside, tokens, 0), jnp.where(inside, _SEGMENT, _PADDING).astype(jnp.int32)


@jax.jit
@by_default_rules
def _last_logits(program, hidden, lengths):
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    return program.model.unembed(last)[:, 0]


@jax.jit
@by_default_rules
def _decode(program, state, token):
    model = program.model
    logits, state = model.extend(token[:, None], state)
    is_known = (token >= 0) & (token < model.config.vocab_size)
    return jnp.where(is_known[:, None], logits[:, 0], jnp.nan), state


@jax.jit
@by_default_rules
def _fold(program, state):
    model = program.model
    return model.fold(state)
