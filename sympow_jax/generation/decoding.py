"""Prefill and single-token decoding.

A model whose parameters are on a mesh with the axes of `layers.partitioning` is computed on that mesh: rows are sharded
over `data` and `fsdp`, heads and their states over `tensor`. An axis that does not divide the number of rows or of
key/value heads does not shard them: every device along it then has them all. Functions that are called within `jax.jit`
use the mesh in scope.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax import models, ops
from sympow_jax.array_types import Array, Float, Int

__all__ = ["cache_sizes", "decode", "fold", "init_state", "mesh_in_scope", "prefill", "require_state"]

# A prompt and its continuation are one document. Padding after shorter prompts leaves the state unchanged.
_SEGMENT, _PADDING = 0, -1


def init_state(model: models.DecoderLM, batch: int, *, max_length: int | None = None) -> models.DecoderState:
    """Returns the state before any token.

    A layer uses a KV cache if `max_length` tokens fit in no more memory than its recurrent state, or if it has no
    recurrent state. The cache has room for `max_length` tokens per row, including the prompt. Outputs beyond are NaN.
    To continue beyond, `fold` the caches first, if every layer has a recurrent state or a window. The cache of a
    sliding window needs room for window - 1 tokens only; with that, outputs are never NaN. If `max_length` is None,
    layers use the fixed-size recurrent state or the cache of a whole window.

    Raises:
        ValueError: `max_length` is None and a layer has neither a recurrent state nor a window, or the recurrent state
            would exceed the memory of the device.
    """
    limits = model.kv_cache_lengths
    if max_length is None:
        kernels = [block.attention.kernel for block in model.blocks]
        growing = [
            kernel.attention.kernel
            for kernel, limit in zip(kernels, limits)
            if limit is None and kernel.cache_limit is None
        ]
        if growing:
            raise ValueError(
                f"attention of kernel {growing[0]!r} uses a KV cache, which has a fixed length; pass max_length, the "
                f"longest prompt plus the tokens after it"
            )
        max_length = max(kernel.cache_limit or 1 for kernel in kernels)
        kv_cache = [limit is None for limit in limits]
    elif max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be at least 1")
    else:
        kv_cache = [limit is None or max_length <= limit for limit in limits]
    with mesh_in_scope(nnx.state(model)):
        return model.init_state(batch, max_length=max_length, kv_cache=kv_cache)


def prefill(
    model: models.DecoderLM,
    tokens: Int[Array | np.ndarray, "B T"],
    lengths: Int[Array | np.ndarray, " B"],
    *,
    max_length: int | None = None,
    state: models.DecoderState | None = None,
) -> tuple[Float[Array, "B V"], models.DecoderState]:
    """Returns the logits of the token that follows each row, in float32, and the state after the rows.

    Rows are independent of each other. Logits are computed for the last token of each row only.

    Args:
        model: the decoder.
        tokens: row b is the first `lengths[b]` tokens; later tokens are ignored.
        lengths: number of tokens of each row, from 1 to T.
        max_length: argument of `init_state` if `state` is None.
        state: state after earlier tokens, for instance after a long context. None starts with
            `init_state(model, B, max_length=max_length)`.

    Raises:
        ValueError: a row is empty, is longer than T or exceeds the model's learned positions, a token is not in the
            vocabulary, the state is of another model or batch size, or `max_length` is missing (`init_state`).
    """
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise ValueError(
            f"tokens have shape {tokens.shape} and lengths {lengths.shape}; they must be [B, T] and [B]"
        )
    for name, array in {"tokens": tokens, "lengths": lengths}.items():
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} have dtype {array.dtype}; it must be an integer dtype")
    if not isinstance(lengths, jax.core.Tracer):
        _check_rows(model, tokens, np.asarray(lengths))
        _check_places(model, np.asarray(lengths), state)
    if state is None:
        state = init_state(model, tokens.shape[0], max_length=max_length)
    graph, variables = nnx.split(model)
    with mesh_in_scope(variables):
        return _prefill(graph, variables, jnp.asarray(tokens), jnp.asarray(lengths), state)


def decode(
    model: models.DecoderLM, state: models.DecoderState, token: Int[Array | np.ndarray, " B"]
) -> tuple[Float[Array, "B V"], models.DecoderState]:
    """Returns the logits of the token after `token`, in float32, and the state after `token`.

    `state` is not modified. Logits are NaN beyond the capacity of a KV cache and beyond learned absolute positions.

    Raises:
        ValueError: the state is of another model or batch size.
    """
    graph, variables = nnx.split(model)
    with mesh_in_scope(variables):
        return _decode(graph, variables, state, jnp.asarray(token))


def fold(model: models.DecoderLM, state: models.DecoderState) -> models.DecoderState:
    """Converts a KV cache to the recurrent state of its tokens, which does not grow.

    Decoding continues with the same results. Recurrent states are returned unchanged, and so are caches of layers that
    have no recurrent state. Rows that have already exceeded the capacity of a cache that is converted become NaN.

    Raises:
        ValueError: the state is of another model, or no layer has a recurrent state.
    """
    graph, variables = nnx.split(model)
    with mesh_in_scope(variables):
        return _fold(graph, variables, state)


def mesh_in_scope(variables: nnx.State) -> contextlib.AbstractContextManager[Any]:
    """Returns a context with the mesh of a model's variables in scope, which is kept if they are traced."""
    parameter: Any = jax.tree.leaves(variables)[0]
    mesh = None if isinstance(parameter, jax.core.Tracer) else getattr(parameter.sharding, "mesh", None)
    if not isinstance(mesh, jax.sharding.Mesh) or mesh.size == 1:
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def require_state(model: models.DecoderLM, state: models.DecoderState, batch: int | None = None) -> None:
    """Raises ValueError unless `state` is a state of this model with `batch` rows, or any number if None."""
    if not isinstance(state, models.DecoderState) or not state.layers:
        raise ValueError(f"the state is a {type(state).__name__}; make it with generation.prefill")
    rows = jax.tree.leaves(state.layers[0].memory)[0].shape[0]
    if batch is not None and rows != batch:
        raise ValueError(f"the state has {rows} rows and there are tokens for {batch}; they must be equal")
    if len(state.layers) != len(model.blocks):
        raise ValueError(
            f"the state is of another model: it has {len(state.layers)} layers, this one {len(model.blocks)}"
        )
    capacity, kv_cache = cache_sizes(state)
    for block, cached in zip(model.blocks, kv_cache):
        if not block.attention.kernel.supports_memory(kv_cache=cached):
            kind = "has a KV cache" if cached else "is recurrent"
            kernel = block.attention.kernel.attention.kernel
            raise ValueError(
                f"the state is of another model: it {kind}, which this one's kernel {kernel!r} does not support"
            )
    expected = jax.eval_shape(lambda: model.init_state(rows, max_length=capacity, kv_cache=kv_cache))
    actual = dict(jax.tree_util.tree_leaves_with_path(state))
    needed = dict(jax.tree_util.tree_leaves_with_path(expected))
    for path in (*needed, *actual):
        one, other = (
            None if path not in tree else (tree[path].shape, str(tree[path].dtype))
            for tree in (actual, needed)
        )
        if one != other:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"the state is of another model: {name} is {_described(one)}, not {_described(other)}"
            )


def cache_sizes(state: models.DecoderState) -> tuple[int, list[bool]]:
    """Returns the capacity of the KV caches of a state, 1 if it has none, and whether each layer has one."""
    memories = [layer.memory for layer in state.layers]
    capacities = [memory.capacity for memory in memories if isinstance(memory, ops.KVCache)]
    return max(capacities, default=1), [isinstance(memory, ops.KVCache) for memory in memories]


def _described(leaf: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if leaf is None else f"{leaf[1]} {list(leaf[0])}"


def _check_rows(model: models.DecoderLM, tokens: Array | np.ndarray, lengths: np.ndarray) -> None:
    time, vocab_size = tokens.shape[1], model.config.vocab_size
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


def _check_places(model: models.DecoderLM, lengths: np.ndarray, state: models.DecoderState | None) -> None:
    longest = model.config.longest_document
    position = None if state is None else state.position
    if longest is None or isinstance(position and position.position, jax.core.Tracer):
        return
    before = np.zeros_like(lengths) if position is None else np.asarray(position.position)
    if before.shape == lengths.shape and (before + lengths).max() > longest:
        row = int((before + lengths).argmax())
        raise ValueError(
            f"row {row} has {lengths[row]} tokens after {before[row]} others, but the model's learned positions end "
            f"at {longest} tokens; shorten it"
        )


@functools.partial(jax.jit, static_argnames="graph")
def _prefill(graph, variables, tokens, lengths, state):
    model = nnx.merge(graph, variables)
    require_state(model, state, tokens.shape[0])
    inside = jnp.arange(tokens.shape[1]) < lengths[:, None]
    segment_ids = jnp.where(inside, _SEGMENT, _PADDING).astype(jnp.int32)
    tokens = jnp.where(inside, tokens, 0)
    hidden, state = model.hidden(tokens, segment_ids=segment_ids, state=state, return_state=True)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    return model.unembed(last)[:, 0], state


@functools.partial(jax.jit, static_argnames="graph")
def _decode(graph, variables, state, token):
    model = nnx.merge(graph, variables)
    require_state(model, state, token.shape[0])
    logits, state = model(token[:, None], state=state, return_state=True)
    return logits[:, 0], state


@functools.partial(jax.jit, static_argnames="graph")
def _fold(graph, variables, state):
    model = nnx.merge(graph, variables)
    require_state(model, state)
    return model.fold(state)
