"""Text from text: prompts are encoded, continued and decoded."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import sympow_jax
from sympow_jax import models
from sympow_jax.generation import loop, transcript
from sympow_jax.generation import sampling as sampling_lib
from sympow_jax.ops import arguments

_SAMPLING = sampling_lib.Sampling()


class Piece(NamedTuple):
    """New text of a continuation.

    Attributes:
        text: text after that of earlier pieces; may be empty.
        done: whether the continuation ends with this piece.
    """

    text: str
    done: bool


def complete(
    model: models.DecoderLM,
    codec: "sympow_jax.data.Codec",
    prompts: Sequence[str],
    *,
    max_tokens: int,
    sampling: sampling_lib.Sampling = _SAMPLING,
    stops: Sequence[str] = (),
    samples: int = 1,
    seed: int = 0,
) -> list[str]:
    """Returns `samples` continuations of each prompt, without the prompt; those of a prompt are adjacent.

    Args:
        model: the decoder.
        codec: tokenizer of the model, such as `data.codec_of_run(config)` or
            `data.Codec(data.tokenizer.load("byte"), vocab_size=256)`.
        prompts: texts to continue.
        max_tokens: maximum number of tokens after each prompt.
        sampling: options of sampling; ids that the codec does not have are never sampled.
        stops: texts to end before.
        samples: number of continuations of each prompt. Sample s has the seed `seed + s` modulo 2^32.
        seed: seed of the draws.

    Raises:
        ValueError: the prompts or stops are not lists of texts, `codec` cannot encode a prompt, a stop is empty, or as
            `generate`.

    Examples:
        >>> from sympow_jax import config, data, generation, models
        >>> settings = config.ModelConfig(vocab_size=256, layers=1, width=32, heads=2)
        >>> model = models.DecoderLM(settings, rngs=0)
        >>> codec = data.Codec(data.tokenizer.load("byte"), vocab_size=256)
        >>> texts = generation.complete(model, codec, ["def ", "class "], max_tokens=3, samples=2)
        >>> len(texts)
        4
    """
    listed = transcript.texts(prompts, "prompts")
    tokens = [codec.encode(prompt.encode(), f"prompt {number}") for number, prompt in enumerate(listed, 1)]
    options: Any = {"sampling": sampling, "stops": stops, "samples": samples, "seed": seed}
    blocks = list(stream(model, codec, tokens, max_tokens=max_tokens, **options))
    return ["".join(piece.text for piece in pieces) for pieces in zip(*blocks)]


def stream(
    model: models.DecoderLM,
    codec: "sympow_jax.data.Codec",
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: sampling_lib.Sampling = _SAMPLING,
    stops: Sequence[str] = (),
    samples: int = 1,
    seed: int = 0,
    prompt_length: int | None = None,
) -> Iterator[list[Piece]]:
    """Yields the new text of each continuation, until all have ended; text that was yielded never changes.

    Arguments and errors are those of `complete`, but prompts are tokens. `prompt_length` is that of `generate`.
    """
    prompts, stops = loop.token_rows(prompts), transcript.texts(stops, "stops")
    samples = arguments.check_integer("samples", samples, 1)
    rows = [
        transcript.Transcript(codec, prompt, max_tokens=max_tokens, stops=stops)
        for prompt in prompts
        for _ in range(samples)
    ]
    size = codec.sampled_vocab_size
    sampling = dataclasses.replace(sampling, vocab_size=min(sampling.vocab_size or size, size))
    blocks = loop.generate(
        model,
        prompts,
        max_tokens=max_tokens,
        sampling=sampling,
        samples=samples,
        seed=seed,
        prompt_length=prompt_length,
    )

    def pieces() -> Iterator[list[Piece]]:
        for block in blocks:
            yield [Piece(row.add(tokens.tolist()), row.done) for row, tokens in zip(rows, block)]
            if all(row.done for row in rows):
                break

    return pieces()
