"""Tests of text from text, which is the same as tokens that are encoded, generated and decoded one by one."""

import functools

import numpy as np
import pytest

from sympow_jax import config, data, generation, models
from tests.generation import small

BYTES = data.Codec(data.tokenizer.load("byte"), vocab_size=256)
SAMPLING = generation.Sampling(temperature=0.7)


@functools.cache
def model():
    settings = config.ModelConfig(
        vocab_size=256, layers=1, width=16, heads=2, attention=config.preset("softmax"), dtype="float32"
    )
    return models.DecoderLM(settings, rngs=0)


PROMPTS = ["def ", "é"]
TOKENS = [np.array([*prompt.encode()]) for prompt in PROMPTS]
OPTIONS = {"max_tokens": 40, "samples": 2, "seed": 3}


def complete(prompts, **options):
    return generation.complete(model(), BYTES, prompts, **{"sampling": SAMPLING, **OPTIONS, **options})


def test_texts_are_the_decoded_tokens():
    texts = complete(PROMPTS)
    blocks = list(generation.generate(model(), TOKENS, sampling=SAMPLING, **OPTIONS))
    assert texts == [bytes(row.tolist()).decode(errors="replace") for row in np.concatenate(blocks, axis=1)]
    assert len(set(texts)) == 4
    pieces = list(generation.stream(model(), BYTES, TOKENS, sampling=SAMPLING, **OPTIONS))
    # The first token, then blocks of 32.
    assert [[piece.done for piece in row] for row in pieces] == [[False] * 4, [False] * 4, [True] * 4]
    assert ["".join(piece.text for piece in row) for row in zip(*pieces)] == texts
    # A text ends before a stop. Prompts and stops may be arrays.
    stop = texts[0][20:23]
    assert complete(np.array(PROMPTS), stops=np.array([stop]))[0] == texts[0][: texts[0].index(stop)]
    stopped = generation.stream(
        model(), BYTES, [row.tolist() for row in TOKENS], sampling=SAMPLING, **OPTIONS
    )
    assert list(stopped) == pieces


def test_ids_that_the_codec_does_not_have_are_not_sampled():
    codec, sampling = (
        data.Codec(data.tokenizer.load("byte"), vocab_size=100),
        generation.Sampling(vocab_size=200),
    )
    (text,) = generation.complete(model(), codec, ["abca"], max_tokens=64, sampling=sampling)
    assert max(text) < chr(100)


def test_mistakes():
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        complete(["a", ""])
    with pytest.raises(ValueError, match="there is no prompt"):
        complete([])
    codec = data.Codec(data.tokenizer.load("byte"), vocab_size=64)
    with pytest.raises(ValueError, match="the model's vocabulary of 64 lacks: 100, 101, 102"):
        generation.complete(small.model("softmax"), codec, ["def "], max_tokens=1)
    for wrong in ("def", [b"ab"], [["a"]]):
        with pytest.raises(ValueError, match=r"prompts is .*; it must be a list of texts"):
            complete(wrong)
        with pytest.raises(ValueError, match=r"stops is .*; it must be a list of texts"):
            complete(["a"], stops=wrong)
    options = {"max_tokens": 4, "sampling": SAMPLING}
    for wrong in (["ab"], [1, 2], np.array([1, 2]), [[1.5]], np.zeros((1, 2, 2), int), None, [[1, [2]]]):
        for call in (generation.generate, functools.partial(generation.stream, model(), BYTES)):
            arguments = (model(), wrong) if call is generation.generate else (wrong,)
            with pytest.raises(ValueError, match=r"prompts is .*; it must have the tokens of each prompt"):
                call(*arguments, **options)
