"""Tests of text from tokens as they arrive: whole characters, stop strings, ends."""

import itertools

import pytest

from sympow_jax import data as data_lib
from sympow_jax import generation
from sympow_jax.data import tokenizer

BYTES = data_lib.Codec(tokenizer.load("byte"), 256)


def told(data, size, *, codec=BYTES, prompt=b"x", max_tokens=1000, stops=()):
    """Returns the pieces of text from blocks of `size` tokens, and the transcript."""
    tokens = list(data)
    transcript = generation.Transcript(codec, list(prompt), max_tokens=max_tokens, stops=stops)
    pieces = [transcript.add(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    assert "".join(pieces) == transcript.text
    return pieces, transcript


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_characters_are_whole(size):
    text = "naïve € 𝄞 end"
    data = text.encode()
    pieces, transcript = told(data, size, max_tokens=len(data))
    assert transcript.text == text
    assert transcript.done
    assert all("\ufffd" not in piece for piece in pieces)


def test_invalid_utf8():
    assert told(b"a\xffb", 1, max_tokens=3)[1].text == "a\ufffdb"
    # The beginning of a character, cut off by max_tokens.
    pieces, transcript = told("a€".encode()[:3], 1, max_tokens=3)
    assert pieces == ["a", "", "\ufffd"]
    assert transcript.done


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("aaab", ["aab"], "a"),
        ("one tw", ["two"], "one tw"),
        ("one two", ["one"], ""),
        ("ab ac", ["ad"], "ab ac"),
        ("x\n\ny", ["\n\n"], "x"),
        ("a€b", ["€"], "a"),
    ],
)
def test_the_text_ends_before_the_first_stop(size, text, stops, expected):
    data = text.encode()
    pieces, transcript = told(data, size, stops=stops, max_tokens=len(data))
    assert transcript.text == expected
    assert transcript.done
    for before in itertools.accumulate(pieces):
        assert expected.startswith(before)


def test_tokens_after_the_end_are_ignored():
    transcript = generation.Transcript(BYTES, [1], max_tokens=3)
    assert transcript.add(list(b"ab")) == "ab"
    assert not transcript.done
    assert transcript.add(list(b"cde")) == "c"
    assert transcript.done
    assert transcript.add(list(b"fgh")) == ""
    with pytest.raises(ValueError, match="a stop string is empty"):
        generation.Transcript(BYTES, [1], max_tokens=3, stops=["a", ""])


def test_the_end_of_a_document_ends_the_text():
    codec = data_lib.Codec(tokenizer.load("byte"), 256, end=0)
    _, transcript = told(b"ab\0cd", 2, codec=codec)
    assert transcript.text == "ab"
    assert transcript.done
