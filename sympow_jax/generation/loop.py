"""Generation loop over compiled blocks of tokens."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import models, spelling
from sympow_jax.array_types import Array, Bool, Int, UInt32
from sympow_jax.config import checks
from sympow_jax.generation import batches, decoding
from sympow_jax.generation import sampling as sampling_lib
from sympow_jax.ops import arguments, target
from sympow_jax.ops.promotion import by_default_rules

_SEEDS = 2**32
# Positions are int32.
_POSITIONS = 2**31


class Rows(NamedTuple):
    """A running batch.

    Attributes:
        token: the newest token.
        state: state after the tokens before it.
        position: number of these.
        seen: tokens that have occurred, the newest included; None unless sampling uses them.
    """

    token: Int[Array, " B"]
    state: models.DecoderState
    position: Int[Array, " B"]
    seen: Bool[Array, "B V"] | None


def generate(
    model: models.DecoderLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: sampling_lib.Sampling,
    samples: int = 1,
    seed: int = 0,
    block: int = 32,
    prompt_length: int | None = None,
) -> Iterator[Int[np.ndarray, "rows tokens"]]:
    """Yields the `max_tokens` tokens that follow each prompt: the first one, then at most `block` at a time.

    The first token needs the prompt only, so it comes before the loop for the others is compiled. The host waits for
    the device once per block. A continuation depends on its prompt, `sampling` and its seed only. The rest of the batch
    has no influence, except on the rounding of logits. Equal prompts have equal continuations. A KV cache is used until
    the recurrent state takes less memory, and is then folded into it.

    Args:
        model: the decoder.
        prompts: tokens of each prompt.
        max_tokens: number of tokens after each prompt.
        sampling: options of sampling.
        samples: number of continuations of each prompt, which is prefilled once. Row p * samples + s of a block
            continues prompt p with the seed `seed + s` modulo 2^32.
        seed: seed of the draws.
        block: number of tokens between two waits for the device.
        prompt_length: length that prompts are padded to, so that batches of other prompts use the same compiled
            program; None means that of the longest.

    Raises:
        ValueError: before the first block: there is no prompt, a prompt is empty, is no list of integers or has a token
            outside the vocabulary, `max_tokens` is outside [1, 2^31), `samples` is below 1, the tokens exceed learned
            positions, or the seed is outside [0, 2^32). Later: logits are not finite.
    """
    prompts = token_rows(prompts)
    max_tokens = arguments.check_integer("max_tokens", max_tokens, 1)
    seed = arguments.check_integer("seed", seed)
    samples = arguments.check_integer("samples", samples, 1)
    block = arguments.check_integer("block", block, 1)
    checks.refuse(
        (not prompts, "there is no prompt"),
        (not all(prompts), "a prompt is empty; it needs at least one token"),
        (
            max_tokens >= _POSITIONS,
            f"max_tokens is {max_tokens}; it must be at least 1 and below {_POSITIONS}",
        ),
        (not 0 <= seed < _SEEDS, f"seed is {seed}; it must be at least 0 and below {_SEEDS}"),
    )
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(lengths.max())
    padded = longest if prompt_length is None else arguments.check_integer("prompt_length", prompt_length)
    # The last token that is sampled is not read.
    places, read = model.config.longest_document, longest + max_tokens - 1
    checks.refuse(
        (padded < longest, f"prompt_length is {padded}; it must be at least {longest}, the longest prompt"),
        (
            places is not None and read > places,
            f"the longest prompt and {max_tokens} tokens take {read} learned positions, and the model has {places}; "
            f"shorten the prompt, or lower max_tokens",
        ),
    )

    # Room of KV caches at the beginning: for all tokens if one of them cannot be folded, else for as many as take less
    # memory than the recurrent state, which replaces the caches then. None starts with recurrent states.
    total = padded + -(-(max_tokens - 1) // block) * block
    room: int | None = total
    limits = [limit for limit in model.kv_cache_lengths if limit is not None]
    if len(limits) == len(model.kv_cache_lengths):
        room = min(*limits, total) if padded + block <= min(limits) else None

    tokens = np.zeros((len(prompts), padded), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    program = decoding.Program(model)
    logits, state = program.prefill(tokens, lengths, max_length=room)
    seen = None
    if sampling.uses_seen:
        occurred = np.zeros(logits.shape, bool)
        for row, prompt in enumerate(prompts):
            occurred[row, prompt] = True
        seen = jnp.asarray(occurred)
    position = jnp.asarray(lengths)
    if samples > 1:
        logits, state, position, seen = batches.fork((logits, state, position, seen), samples)
    seeds = np.tile((seed + np.arange(samples)) % _SEEDS, len(prompts)).astype(np.uint32)
    with decoding.mesh_in_scope(program.leaves):
        token, seen, finite = _sampled(sampling, seeds, logits, position, seen)

    def blocks(rows: Rows, finite: Array, room: int | None) -> Iterator[Int[np.ndarray, "rows tokens"]]:
        yield checked(rows.token[:, None], finite[:, None])
        for done in range(1, max_tokens, block):
            if room is not None and padded + done - 1 + block > room:
                rows, room = rows._replace(state=program.fold(rows.state)), None
            with decoding.mesh_in_scope(program.leaves):
                rows, *results = decode_block(program, sampling, block, seeds, rows)
            yield checked(*(np.asarray(x)[:, : max_tokens - done] for x in results))

    def checked(tokens: Array | np.ndarray, finite: Array | np.ndarray) -> Int[np.ndarray, "rows tokens"]:
        wrong = np.argwhere(~np.asarray(finite))
        if len(wrong):
            raise ValueError(
                f"the logits of prompt {wrong[0, 0] // samples + 1} are not finite; has training diverged?"
            )
        return np.asarray(tokens)

    return blocks(Rows(token, state, position, seen), finite, room)


def token_rows(prompts: Iterable[Sequence[int]]) -> list[list[int]]:
    """Returns the tokens of each prompt as lists; raises ValueError if they are no integers."""
    try:
        rows = [np.asarray(prompt) for prompt in prompts]
    except (TypeError, ValueError):  # no prompts, or rows within one that differ in length
        rows = [np.asarray(None)]
    if not all(row.ndim == 1 and (not row.size or row.dtype.kind in "iu") for row in rows):
        raise ValueError(
            f"prompts is {spelling.shown(prompts)}; it must have the tokens of each prompt, such as [[1, 2], [3]]; "
            f"encode texts, or call `complete`"
        )
    return [row.tolist() for row in rows]


@functools.partial(jax.jit, static_argnames="sampling")
@by_default_rules
def _sampled(sampling, seeds, logits, position, seen):
    """Returns a token of each row, the tokens seen with it, and whether the logits are finite."""
    token = sampling_lib.sample(logits, sampling, seed=seeds, position=position, seen=seen)
    if seen is not None:
        seen = seen.at[jnp.arange(len(token)), token].set(True)
    return token, seen, jnp.isfinite(logits).all(axis=-1)


def _in_several_functions(token):
    """Returns the tokens, and keeps XLA from compiling the loop as one function, as it does on CPUs without a sort.

    One function is faster with up to 4 layers and no faster with 8, while the time to compile it is quadratic in their
    number (16: 76 s of CPU instead of 7).
    """
    return jnp.sort(jnp.stack([token, jnp.full_like(token, -1)]), axis=0)[1]


@functools.partial(jax.jit, static_argnames=("sampling", "block"), donate_argnames="rows")
@by_default_rules
def decode_block(
    program: decoding.Program,
    sampling: sampling_lib.Sampling,
    block: int,
    seeds: UInt32[Array, " B"],
    rows: Rows,
) -> tuple[Rows, Int[Array, "B block"], Bool[Array, "B block"]]:
    """Samples the next `block` tokens of each row, one after another.

    The rows are donated.

    Returns:
        The rows after these tokens, the tokens, and whether the logits that each token was sampled from are finite.
    """
    model = program.model

    def step(rows, _):
        logits, state = model.extend(rows.token[:, None], rows.state)
        position = rows.position + 1
        token, seen, finite = _sampled(sampling, seeds, logits[:, 0], position, rows.seen)
        if target.device().platform == "cpu" and model.config.layers > 4:
            token = _in_several_functions(token)
        return Rows(token, state, position, seen), (token, finite)

    rows, (tokens, finite) = jax.lax.scan(step, rows, length=block)
    return rows, tokens.T, finite.T
