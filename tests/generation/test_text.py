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


def complete(prompts, **options):
    options = {"sampling": SAMPLING, "max_tokens": 40} | options
    return generation.complete(model(), BYTES, prompts, **options)


def test_texts_are_the_decoded_tokens():
    texts = complete(["def ", "é"], samples=2, seed=3)
    assert len(texts) == 4
    for number, prompt in enumerate(["def ", "é"]):
        for sample in range(2):
            blocks = generation.generate(
                model(), [list(prompt.encode())], max_tokens=40, sampling=SAMPLING, seed=3 + sample
            )
            data = b"".join(bytes(block[0].tolist()) for block in blocks)
            assert texts[2 * number + sample] == data.decode(errors="replace")
    assert len(set(texts)) == 4


def test_a_text_ends_before_a_stop():
    (text,) = complete(["def "])
    stop = text[20:23]
    assert complete(["def "], stops=[stop]) == [text[: text.index(stop)]]


def test_pieces_make_the_texts():
    prompts = [list(b"def "), list(b"class ")]
    pieces = list(generation.stream(model(), BYTES, prompts, max_tokens=40, sampling=SAMPLING))
    assert len(pieces) == 2  # blocks of 32 tokens
    texts = ["".join(piece.text for piece in row) for row in zip(*pieces)]
    assert texts == complete(["def ", "class "])
    assert [[piece.done for piece in row] for row in pieces] == [[False, False], [True, True]]


def test_ids_that_the_codec_does_not_have_are_not_sampled():
    codec = data.Codec(data.tokenizer.load("byte"), vocab_size=100)
    for sampling in (SAMPLING, generation.Sampling(vocab_size=200)):
        (text,) = generation.complete(model(), codec, ["a"], max_tokens=100, sampling=sampling)
        assert max(text) < chr(100)
    (text,) = complete(["a"], sampling=generation.Sampling(vocab_size=50))
    assert max(text) < chr(50)


def test_mistakes():
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        complete(["a", ""])
    with pytest.raises(ValueError, match="there is no prompt"):
        complete([])
    with pytest.raises(ValueError, match="a stop string is empty"):
        complete(["a"], stops=[""])
    codec = data.Codec(data.tokenizer.load("byte"), vocab_size=64)
    with pytest.raises(ValueError, match="the model's vocabulary of 64 lacks: 100, 101, 102"):
        generation.complete(small.model("softmax"), codec, ["def "], max_tokens=1)


def test_prompts_and_stops_may_be_arrays():
    prompts = ["def ", "cla "]
    assert complete(np.array(prompts), stops=np.array(["zzzz"])) == complete(prompts)
    tokens = np.array([list(prompt.encode()) for prompt in prompts])
    options = {"max_tokens": 40, "sampling": SAMPLING}
    pieces = generation.stream(model(), BYTES, tokens, stops=iter(["zzzz"]), **options)
    assert ["".join(piece.text for piece in row) for row in zip(*pieces)] == complete(prompts)


@pytest.mark.parametrize("prompts", ["def", b"ab", [b"ab"], [5], None, 5, [["a"]], np.array("ab")])
def test_prompts_and_stops_that_are_no_texts(prompts):
    with pytest.raises(ValueError, match=r"prompts is .*; it must be a list of texts"):
        complete(prompts)
    with pytest.raises(ValueError, match=r"stops is .*; it must be a list of texts"):
        complete(["a"], stops=prompts)


@pytest.mark.parametrize(
    "prompts",
    ["ab", ["ab"], [1, 2], np.array([1, 2]), [[1.5]], np.zeros((1, 2, 2), int), [None], None, [[1, [2]]]],
)
def test_prompts_that_are_no_tokens(prompts):
    options = {"max_tokens": 4, "sampling": SAMPLING}
    with pytest.raises(ValueError, match=r"prompts is .*; it must have the tokens of each prompt"):
        generation.generate(model(), prompts, **options)
    with pytest.raises(ValueError, match=r"prompts is .*; it must have the tokens of each prompt"):
        generation.stream(model(), BYTES, prompts, **options)
