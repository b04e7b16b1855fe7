"""Tests of encoding text to the tokens of a run's data, and decoding it."""

import pytest

from sympow_jax import config, generation
from sympow_jax import data as data_lib
from sympow_jax.data import tokenizer
from tests.data import builders

BYTES = data_lib.Codec(tokenizer.load("byte"), 256)


def run(**data):
    model = config.ModelConfig(vocab_size=data.pop("vocab_size", 300), layers=1, width=16, heads=2)
    return config.Config(model=model, data=config.DataConfig(**data))


@pytest.fixture
def words(tmp_path):
    """Returns a tokenizer whose words lose the spaces between them unless they are decoded together."""
    vocabulary = {"[UNK]": 0, "the": 1, "fox": 2, "</s>": 3}
    return builders.write_words(tmp_path / "words.json", vocabulary)


def test_a_tokenizer_of_words(words):
    ends = [data_lib.codec_of_run(run(source=x, paths=("x",)), words).end for x in ("tokens", "jsonl")]
    assert ends == [None, 3]
    codec = data_lib.codec_of_run(run(source="tokens", paths=("x",), document_separator=3), words)
    prompt = codec.encode(b"the fox")
    assert prompt == [1, 2]
    transcript = generation.Transcript(codec, prompt, max_tokens=9)
    assert transcript.add([2, 1, 3, 2]) == " fox the"
    assert codec.sampled_vocab_size == 4
    # A document of longcrawl64 begins with its id.
    codec = data_lib.codec_of_run(run(source="longcrawl64", paths=("x",), vocab_size=50_304), words)
    assert codec.encode(b"fox") == [50_256, 2]
    assert codec.sampled_vocab_size == 50_257


@pytest.mark.parametrize("source", ["longcrawl64", "jsonl"])
def test_the_tokenizer_that_a_run_records(words, source):
    settings = run(source=source, paths=("x",), tokenizer=words, document_separator=3, vocab_size=50_304)
    assert data_lib.codec_of_run(settings).tokenizer.name == "words.json"
    assert data_lib.codec_of_run(settings, "byte").tokenizer.name == "byte"
    gone = run(source=source, paths=("x",), tokenizer="gone.json")
    with builders.refused(r"run's data\.tokenizer=gone\.json: there is no .*"):
        data_lib.codec_of_run(gone)


@pytest.mark.parametrize("source", ["tokens", "jsonl"])
def test_a_prompt_begins_as_the_tokenizer_begins_texts(tmp_path, source):
    path = builders.write_byte_fallback(tmp_path / "tokenizer.json")
    codec = data_lib.codec_of_run(run(source=source, paths=("x.jsonl",)), path)
    assert codec.encode(b"ab") == [1, 259, 260, 261]
    with builders.refused("vocabulary of 1 lacks: 1, 259"):
        data_lib.Codec(codec.tokenizer, 1, lead=1).encode(b"ab")


def test_invalid_prompts(words):
    codec = data_lib.codec_of_run(run(source="tokens", paths=("x",), vocab_size=2), words)
    for used, prompt, message in (
        (BYTES, b"", "the prompt is empty; it must have at least one token"),
        (data_lib.Codec(tokenizer.load("byte"), 128), "a€".encode(), "vocabulary of 128 lacks: 130, 172,"),
        (codec, b"a\xff", r"not UTF-8 \(byte 2\), which tokenizer words\.json reads"),
        (codec, b" ", r"tokenizer words\.json finds no tokens in"),
        (codec, b"the fox", "has tokens that the model's vocabulary of 2 lacks: 2"),
    ):
        with builders.refused(message):
            used.encode(prompt)


def test_runs_without_text():
    for data, name, message in (
        ({"source": "tokens", "paths": ("x",)}, None, "--tokenizer=FILE"),
        ({"source": "tokens", "paths": ("x",)}, "no/file.json", "there is no such file"),
        ({"source": "text"}, "words.json", "read text as bytes"),
        ({"source": "jsonl", "paths": ("x",), "tokenizer": "hf://a/b"}, None, "would be downloaded; if you"),
        ({"source": "listops", "context_length": 2048, "batch_tokens": 2048}, None, "no text can be made"),
    ):
        with builders.refused(message):
            data_lib.codec_of_run(run(**data), name)
