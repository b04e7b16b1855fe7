"""A model as two functions: what a batch of prompts leaves behind, and the next token from there."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax import models, ops
from sympow_jax.array_types import Array, Float, Int

__all__ = ["decode", "fold", "init_state", "prefill", "require_state"]

# A prompt and what follows it are one document; padding behind shorter prompts passes state through.
_SEGMENT, _PADDING = 0, -1


def init_state(model: models.DecoderLM, batch: int, *, max_length: int | None = None) -> models.DecoderState:
    """The state before any token.

    It keeps keys and values where `max_length` of them take no more memory than the recurrent state, or where the
    attention has no other. They have room for `max_length` tokens of a row, prompt included, and give NaN beyond:
    `fold` them before, where there is a recurrent state. None is the state that never grows.

    Raises:
      ValueError: no `max_length`, and the attention has no recurrent state; or that would exceed memory.
    """
    kept = model.kv_cache_length
    if max_length is None:
        if kept is None:
            raise ValueError(
                f"attention of kernel {model.config.attention.kernel!r} keeps keys and values and needs room for them; "
                f"pass max_length, the tokens of the longest prompt and of what follows it"
            )
        return model.init_state(batch, max_length=1, kv_cache=False)
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be at least 1")
    return model.init_state(batch, max_length=max_length, kv_cache=kept is None or max_length <= kept)


def prefill(
    model: models.DecoderLM,
    tokens: Int[Array | np.ndarray, "B T"],
    lengths: Int[Array | np.ndarray, " B"],
    *,
    max_length: int | None = None,
    state: models.DecoderState | None = None,
) -> tuple[Float[Array, "B V"], models.DecoderState]:
    """The logits of the token that follows each row, float32, and the state behind the row.

    Nothing passes between rows. Logits are computed of the last tokens alone.

    Args:
      model: with the parameters to use.
      tokens: row b is its first `lengths[b]` tokens; what is behind them does not matter.
      lengths: of the rows, at least 1 and at most T.
      max_length: for `init_state`, where there is no `state`.
      state: what came before, for instance a long context that is continued; None starts with
        `init_state(model, B, max_length=max_length)`.

    Raises:
      ValueError: a row is empty or longer than T, or goes on beyond the model's learned positions, a token is not in
        the vocabulary, the state is of another model or batch, or `max_length` is missing (`init_state`).
    """
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise ValueError(
            f"tokens have shape {tokens.shape} and lengths {lengths.shape}; they must be [B, T] and [B]"
        )
    if not isinstance(lengths, jax.core.Tracer):
        _check_rows(model, tokens, np.asarray(lengths))
        _check_places(model, np.asarray(lengths), state)
    if state is None:
        state = init_state(model, tokens.shape[0], max_length=max_length)
    return _prefill(*nnx.split(model), jnp.asarray(tokens), jnp.asarray(lengths), state)


def decode(
    model: models.DecoderLM, state: models.DecoderState, token: Int[Array | np.ndarray, " B"]
) -> tuple[Float[Array, "B V"], models.DecoderState]:
    """The logits of the token behind `token`, float32, and the state behind it; `state` stays as it is.

    Logits are NaN beyond a KV cache, and beyond the learned positions of models that have some. Raises ValueError for a
    state of another model or batch.
    """
    return _decode(*nnx.split(model), state, jnp.asarray(token))


def fold(model: models.DecoderLM, state: models.DecoderState) -> models.DecoderState:
    """The state with a KV cache folded into the recurrent state, which never grows.

    Decoding goes on as it would have. A recurrent state is returned as it is; rows that have already outgrown the
    a KV cache gives NaN. Raises ValueError for a state of another model, or attention without a recurrent state.
    """
    return _fold(*nnx.split(model), state)


def require_state(model: models.DecoderLM, state: models.DecoderState, batch: int | None = None) -> None:
    """Raises ValueError unless `state` is one of this model, of so many rows."""
    if not isinstance(state, models.DecoderState) or not state.layers:
        raise ValueError(f"the state is a {type(state).__name__}; make it with generation.prefill")
    memory = state.layers[0].memory
    kept = isinstance(memory, ops.KVCache)
    capacity = memory.key.shape[1] if isinstance(memory, ops.KVCache) else 1
    rows = jax.tree.leaves(memory)[0].shape[0]
    if batch is not None and rows != batch:
        raise ValueError(f"the state has {rows} rows and there are tokens for {batch}; these must be as many")
    if len(state.layers) != len(model.blocks):
        raise ValueError(
            f"the state is of another model: it has {len(state.layers)} layers, this one {len(model.blocks)}"
        )
    if (not kept) if model.kv_cache_length is None else (kept and not model.kv_cache_length):
        kind = "keeps keys" if kept else "is recurrent"
        kernel = model.config.attention.kernel
        raise ValueError(
            f"the state is of another model: it {kind}, as this one's kernel {kernel!r} does not"
        )
    expected = jax.eval_shape(lambda: model.init_state(rows, max_length=capacity, kv_cache=kept))
    found = dict(jax.tree_util.tree_leaves_with_path(state))
    wanted = dict(jax.tree_util.tree_leaves_with_path(expected))
    for path in (*wanted, *found):
        one, other = (
            None if path not in tree else (tree[path].shape, str(tree[path].dtype))
            for tree in (found, wanted)
        )
        if one != other:
            name = jax.tree_util.keystr(path)
            raise ValueError(f"the state is of another model: {name} is {_said(one)}, not {_said(other)}")


def _said(leaf: tuple[tuple[int, ...], str] | None) -> str:
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
        row, place = np.argwhere(wrong)[0]
        raise ValueError(
            f"token {array[row, place]} at place {place} of row {row} is not in the vocabulary of {vocab_size}"
        )


def _check_places(model: models.DecoderLM, lengths: np.ndarray, state: models.DecoderState | None) -> None:
    longest = model.config.attention.longest_document
    position = None if state is None else state.position
    if longest is None or isinstance(position and position.position, jax.core.Tracer):
        return
    before = np.zeros_like(lengths) if position is None else np.asarray(position.position)
    if before.shape == lengths.shape and (before + lengths).max() > longest:
        row = int((before + lengths).argmax())
        raise ValueError(
            f"row {row} has {lengths[row]} tokens behind {before[row]} others, but the model's learned positions end "
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
