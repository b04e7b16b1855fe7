"""Text from tokens: whole characters, stop strings, ends."""

import itertools

import pytest
import tokenizers

from sympow_jax import config, generation
from sympow_jax.data import tokenizer

BYTES = generation.Codec(tokenizer.load("byte"), 256)


def told(data, size, *, codec=BYTES, prompt=b"x", max_tokens=1000, stops=()):
    """The pieces that blocks of `size` tokens give, and the transcript."""
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


def test_bytes_that_are_no_text():
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


def test_what_comes_after_is_not_text():
    transcript = generation.Transcript(BYTES, [1], max_tokens=3)
    assert transcript.add(list(b"ab")) == "ab"
    assert not transcript.done
    assert transcript.add(list(b"cde")) == "c"
    assert transcript.done
    assert transcript.add(list(b"fgh")) == ""
    with pytest.raises(ValueError, match="a stop string is empty"):
        generation.Transcript(BYTES, [1], max_tokens=3, stops=["a", ""])


def test_the_end_of_a_document_ends_the_text():
    codec = generation.Codec(tokenizer.load("byte"), 256, end=0)
    _, transcript = told(b"ab\0cd", 2, codec=codec)
    assert transcript.text == "ab"
    assert transcript.done


def run(**data):
    model = config.ModelConfig(vocab_size=data.pop("vocab_size", 300), layers=1, width=16, heads=2)
    return config.Config(model=model, data=config.DataConfig(**data))


@pytest.fixture
def words(tmp_path):
    """A tokenizer whose words lose the spaces between them unless they are decoded together."""
    built = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "the": 1, "fox": 2, "</s>": 3}, unk_token="[UNK]")
    )
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.save(str(tmp_path / "words.json"))
    return str(tmp_path / "words.json")


def test_a_tokenizer_of_words(words):
    codec = generation.codec_of_run(run(source="tokens", paths=("x",), document_separator=3), words)
    prompt = codec.encode(b"the fox")
    assert prompt == [1, 2]
    _, transcript = told([1, 2, 1, 3, 2], 1, codec=codec, prompt=prompt)
    assert transcript.text == " the fox the"
    assert codec.drawn == 4


def test_a_document_of_longcrawl64_begins_with_its_id(words):
    codec = generation.codec_of_run(run(source="longcrawl64", paths=("x",), vocab_size=50_304), words)
    assert codec.encode(b"fox") == [50_256, 2]
    assert codec.drawn == 50_257


@pytest.mark.parametrize(
    ("codec", "prompt", "message"),
    [
        (BYTES, b"", "the prompt is empty"),
        (
            generation.Codec(tokenizer.load("byte"), 128),
            "a€".encode(),
            "vocabulary of 128 lacks: 130, 172, 226",
        ),
    ],
)
def test_prompts_that_cannot_be(codec, prompt, message):
    with pytest.raises(ValueError, match=message):
        codec.encode(prompt)


def test_prompts_that_a_tokenizer_cannot_read(words):
    codec = generation.codec_of_run(run(source="tokens", paths=("x",), vocab_size=2), words)
    with pytest.raises(ValueError, match=r"not UTF-8 \(byte 2\), which tokenizer words\.json reads"):
        codec.encode(b"a\xff")
    with pytest.raises(ValueError, match=r"has no tokens, says tokenizer words\.json"):
        codec.encode(b" ")
    with pytest.raises(ValueError, match="has tokens that the model's vocabulary of 2 lacks: 2"):
        codec.encode(b"the fox")


@pytest.mark.parametrize(
    ("data", "name", "message"),
    [
        ({"source": "tokens", "paths": ("x",)}, None, "--tokenizer=FILE"),
        ({"source": "longcrawl64", "paths": ("x",)}, None, "--tokenizer=FILE"),
        ({"source": "tokens", "paths": ("x",)}, "no/file.json", "there is no such file"),
        ({"source": "text"}, "words.json", "read text as bytes"),
        ({"source": "listops", "context_length": 2048, "batch_tokens": 2048}, None, "no text can be made"),
    ],
)
def test_runs_without_text(data, name, message):
    with pytest.raises(ValueError, match=message):
        generation.codec_of_run(run(**data), name)
