"""Tests of the facts that `prepare` writes next to tokens: what a run takes from them, and when they contradict it."""

import dataclasses
import os

import pytest

from sympow_jax import config
from sympow_jax.commands import prepare
from sympow_jax.data import prepared
from tests.data import builders

VOCABULARY = {"[UNK]": 0, "the": 1, "first": 2, "</s>": 3, "end": 4}


@pytest.fixture(params=["tokens", "longcrawl64"])
def settings(request, tmp_path, monkeypatch):
    """Returns the settings of a run on prepared data, in the working folder, whose facts they agree with."""
    monkeypatch.chdir(tmp_path)
    builders.write_files(tmp_path / "texts", {f"{i}.txt": b"the first end" for i in range(3)})
    builders.write_words(tmp_path / "words.json", VOCABULARY)
    builders.write_words(tmp_path / "others.json", {**VOCABULARY, "the": 2, "first": 1})
    os.link("words.json", "copy.json")
    layout, out = ("bin", "out.bin") if request.param == "tokens" else ("longcrawl64", "out.zarr")
    prepare.main(
        [f"--format={layout}", f"--out={out}", "--row_tokens=4", "--tokenizer=./words.json", "texts"]
    )
    return config.Config(
        model=config.ModelConfig(vocab_size=5, layers=1, width=16, heads=2),
        data=builders.data_config(source=request.param, paths=(out,), document_separator=3),
    )


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({}, []),
        ({"vocab_size": 64}, []),
        ({"tokenizer": "copy.json"}, []),
        ({"vocab_size": 4}, ["ids below 5, but model.vocab_size is 4"]),
        ({"document_separator": 2}, ["separator 3, but data.document_separator is 2; set it to 3"]),
        ({"document_separator": None}, ["separator 3, but data.document_separator is "]),
        ({"tokenizer": "others.json"}, ["words.json, but data.tokenizer is others.json"]),
        ({"tokenizer": "gone.json"}, ["gone.json: there is no such file"]),
        ({"vocab_size": 4, "document_separator": 2, "tokenizer": "byte"}, ["4; raise", "is 2", "is byte"]),
    ],
    ids=str,
)
def test_contradictions(settings, changes, messages):
    changes = dict(changes)
    model = dataclasses.replace(settings.model, vocab_size=changes.pop("vocab_size", 5))
    data = dataclasses.replace(settings.data, **changes)
    _, lines = prepared.compare(dataclasses.replace(settings, model=model, data=data))
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages):
        assert line.startswith("out.")
        assert message in line


def test_the_tokenizer_of_prepared_data(settings):
    assert prepared.compare(settings)[0].data.tokenizer == os.path.abspath("words.json")
    chosen = dataclasses.replace(settings, data=dataclasses.replace(settings.data, tokenizer="byte"))
    assert prepared.compare(chosen)[0] == chosen
    for name in ("out.bin.json", "out.zarr/.zattrs"):
        if os.path.exists(name):
            os.remove(name)
    assert prepared.compare(settings)[0] == settings
    model = dataclasses.replace(settings.model, vocab_size=4)
    assert prepared.compare(dataclasses.replace(settings, model=model))[1] == []
