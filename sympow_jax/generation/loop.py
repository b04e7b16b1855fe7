"""Generation loop over compiled blocks of tokens."""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sympow_jax import models
from sympow_jax.array_types import Array, Bool, Float, Int, UInt32
from sympow_jax.generation import decoding
from sympow_jax.generation import sampling as sampling_lib

__all__ = ["decode_block", "generate"]

_SEEDS = 2**32
# Positions are int32.
_POSITIONS = 2**31


def generate(
    model: models.DecoderLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: sampling_lib.Sampling,
    seed: int = 0,
    block: int = 32,
) -> Iterator[Int[np.ndarray, "prompts tokens"]]:
    """Yields the `max_tokens` tokens that follow each prompt, at most `block` tokens per prompt at a time.

    The host waits for the device once per block. The continuation of a prompt depends on the prompt, `sampling` and
    `seed` only. The rest of the batch has no influence, except on the rounding of logits. Equal prompts have equal
    continuations. A KV cache is used until the recurrent state takes less memory, and is then folded into it.

    Raises:
        ValueError: before the first block: there is no prompt, a prompt is empty or has a token outside the
            vocabulary, `max_tokens` is outside [1, 2^31), the tokens exceed learned positions, or the seed is
            outside [0, 2^32). Later: logits are not finite.
    """
    if not prompts or min(map(len, prompts)) == 0:
        raise ValueError(
            "there is no prompt" if not prompts else "a prompt is empty; it needs at least one token"
        )
    if not 1 <= max_tokens < _POSITIONS:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1 and below {_POSITIONS}")
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed is {seed}; it must be at least 0 and below {_SEEDS}")
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    used = int(lengths.max())
    longest = model.config.longest_document
    if longest is not None and used + max_tokens > longest:
        raise ValueError(
            f"the longest prompt has {used} tokens and max_tokens is {max_tokens}, but the model's learned positions "
            f"end at {longest} tokens; shorten one of them"
        )
    total = used + -(-max_tokens // block) * block
    room = _room(model.kv_cache_lengths, used + block, total)
    logits, state = decoding.prefill(model, tokens, lengths, max_length=room)
    return _blocks(model, logits, state, lengths, room, used, max_tokens, sampling, seed, block)


def _room(kv_cache_lengths: Sequence[int | None], least: int, total: int) -> int | None:
    """Returns the initial capacity of KV caches; None to start with recurrent states."""
    lengths = [length for length in kv_cache_lengths if length is not None]
    if len(lengths) < len(kv_cache_lengths):
        return total  # A cache that cannot be folded needs room for all tokens.
    return min(*lengths, total) if least <= min(lengths) else None


def _blocks(model, logits, state, position, room, used, max_tokens, sampling, seed, block):
    graph, variables = nnx.split(model)
    for left in range(max_tokens, 0, -block):
        if room is not None and used + block > room:
            state, room = decoding.fold(model, state), None
        logits, state, position, tokens, finite = decode_block(
            graph, variables, sampling, block, np.uint32(seed), logits, state, position
        )
        used += block
        tokens, finite = np.asarray(tokens)[:, :left], np.asarray(finite)[:, :left]
        if not finite.all():
            row, _ = np.argwhere(~finite)[0]
            raise ValueError(f"the logits of prompt {row + 1} are not finite; has training diverged?")
        yield tokens


@functools.partial(
    jax.jit, static_argnames=("graph", "sampling", "block"), donate_argnames=("logits", "state")
)
def decode_block(
    graph: nnx.GraphDef,
    variables: nnx.State,
    sampling: sampling_lib.Sampling,
    block: int,
    seed: UInt32[Array, ""],
    logits: Float[Array, "B V"],
    state: models.DecoderState,
    position: Int[Array, " B"],
) -> tuple[
    Float[Array, "B V"], models.DecoderState, Int[Array, " B"], Int[Array, "B block"], Bool[Array, "B block"]
]:
    """Samples `block` tokens of each row, one after another, from the logits and state after `position` tokens.

    The logits and the state are donated.

    Returns:
        The logits, state and position after these tokens, the tokens, and whether the logits that each token was
        sampled from are finite.
    """
    model = nnx.merge(graph, variables)

    def step(carry, _):
        logits, state, position = carry
        token = sampling_lib.sample(logits, sampling, seed=seed, position=position)
        finite = jnp.isfinite(logits).all(axis=-1)
        logits, state = model(token[:, None], state=state, return_state=True)
        return (logits[:, 0], state, position + 1), (token, finite)

    carry, (tokens, finite) = jax.lax.scan(step, (logits, state, position), length=block)
    return *carry, tokens.T, finite.T
