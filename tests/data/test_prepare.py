"""Tests of converting text files to token files and back, in both layouts and with each kind of tokenizer."""

import json
import os
import pathlib
import sys

import numpy as np
import pytest

from sympow_jax import data
from sympow_jax.commands import prepare
from sympow_jax.data import tokenizer, tokens
from tests import mistakes
from tests.data import builders

TEXTS = {"a.txt": b"the first document", "b.txt": "naïve second\n".encode(), "c.txt": b"", "d.txt": b"x"}
STORED = b"the first document\0" + "naïve second\n".encode() + b"\0x\0"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    builders.write_files(tmp_path / "texts", TEXTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def word_tokenizer(folder):
    vocabulary = {"[UNK]": 0, "the": 1, "first": 2, "document": 3, "second": 4, "na": 5, "x": 9}
    return builders.write_words(pathlib.Path("words.json"), vocabulary, ["<|endoftext|>"])


def run(*arguments) -> None:
    prepare.main([*arguments, "texts"])


def test_bin_of_bytes_round_trip(folder, capsys):
    run("--format=bin", "--out=deep/train.bin")
    assert np.fromfile("deep/train.bin", "<u2").astype(np.uint8).tobytes() == STORED
    description = json.loads((folder / "deep/train.bin.json").read_text())
    assert description == {
        "tokenizer": "byte",
        "vocab_size": 256,
        "separator": 0,
        "token_dtype": "uint16",
        "documents": 3,
        "tokens": len(STORED),
    }
    assert (
        "data.source=tokens data.paths=deep/train.bin data.token_dtype=uint16 data.document_separator=0"
        in (capsys.readouterr().out)
    )
    config = builders.data_config(
        source="tokens", paths=("deep/train.bin",), document_separator=0, heldout_fraction=0.0
    )
    source = tokens.open_documents(config, heldout=False)
    read = [bytes(source.read(i, 0, int(length)).astype(np.uint8)) for i, length in enumerate(source.lengths)]
    assert read == [content + b"\0" for content in TEXTS.values() if content]
    assert sorted(os.listdir("deep")) == ["train.bin", "train.bin.json"]


def test_longcrawl64_of_bytes_round_trip(folder, capsys):
    run("--format=longcrawl64", "--out=train.zarr", "--row_tokens=8")
    description = json.loads((folder / "train.zarr/.zattrs").read_text())
    assert (description["rows"], description["row_tokens"], description["dropped_tokens"]) == (
        4,
        8,
        len(STORED) - 32,
    )
    assert "data.source=longcrawl64 data.paths=train.zarr" in capsys.readouterr().out
    config = builders.data_config(
        source="longcrawl64", paths=("train.zarr",), document_separator=0, heldout_fraction=0.0
    )
    dataset = data.train_dataset(config, vocab_size=256)
    read = sorted(bytes(dataset[i]["targets"].astype(np.uint8)) for i in range(4))
    assert read == sorted(STORED[start : start + 8] for start in range(0, 32, 8))
    assert sorted(os.listdir(".")) == ["texts", "train.zarr"]


def test_longcrawl64_in_several_bands_of_chunks(folder, monkeypatch):
    builders.write_files(folder / "texts", {"e.txt": bytes(range(1, 256)) * 200})
    run("--format=longcrawl64", "--out=train.zarr", "--row_tokens=11")
    assert {"0.0", "1.0", "2.0"} <= set(os.listdir("train.zarr"))
    run("--format=bin", "--out=train.bin")
    flat = np.fromfile("train.bin", "<u2")
    rows = len(flat) // 11
    assert rows > 2 * 2048
    config = builders.data_config(source="longcrawl64", paths=("train.zarr",), document_separator=0)
    source = data.HeldoutData(config, vocab_size=256).documents
    stored = {bytes(row.astype(np.uint8)) for row in flat[: rows * 11].reshape(rows, 11)}
    assert {bytes(document[1:].astype(np.uint8)) for document in source} <= stored


def test_tokenizers_file(word_tokenizer):
    run("--format=bin", "--out=a.bin", f"--tokenizer={word_tokenizer}")
    assert np.fromfile("a.bin", "<u2").tolist() == [1, 2, 3, 7, 0, 4, 7, 9, 7]
    description = json.loads(pathlib.Path("a.bin.json").read_text())
    assert (description["vocab_size"], description["separator"], description["tokenizer"]) == (
        10,
        7,
        "words.json",
    )


def test_text_that_spells_a_special_token_is_text(folder, word_tokenizer):
    loaded = tokenizer.load(word_tokenizer)
    assert loaded.separator == 7
    assert 7 not in loaded.encode(b"the <|endoftext|> first").tolist()


def test_large_vocabularies_use_four_bytes(word_tokenizer):
    for layout, out in (("bin", "a.bin"), ("longcrawl64", "a.zarr")):
        run(
            f"--format={layout}",
            f"--out={out}",
            "--tokenizer=words.json",
            "--separator=70000",
            "--row_tokens=3",
        )
    assert np.fromfile("a.bin", "<u4").tolist() == [1, 2, 3, 70_000, 0, 4, 70_000, 9, 70_000]
    config = builders.data_config(
        source="longcrawl64",
        paths=("a.zarr",),
        token_dtype="uint32",
        document_separator=70_000,
        heldout_fraction=0.0,
        context_length=3,
    )
    dataset = data.train_dataset(config, vocab_size=70_001)
    assert sorted(dataset[i]["targets"].tolist() for i in range(3)) == [
        [1, 2, 3],
        [70_000, 0, 4],
        [70_000, 9, 70_000],
    ]


def test_tiktoken_encoding(folder, monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    # Encodings that tiktoken has loaded need no download.
    ranks = {token: rank for rank, token in enumerate([*(bytes([i]) for i in range(256)), b"th", b"the"])}
    special = {"<|endoftext|>": 50_256}
    encoding = tiktoken.Encoding("gpt2", pat_str=r" ?\p{L}+|.", mergeable_ranks=ranks, special_tokens=special)
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "gpt2", encoding)
    loaded = tokenizer.load("gpt2")
    assert loaded.encode(b"the x<|endoftext|>").tolist()[:3] == [257, ord(" "), ord("x")]
    assert (loaded.vocab_size, loaded.separator) == (50_257, 50_256)
    assert 50_256 not in loaded.encode(b"<|endoftext|>").tolist()
    run("--format=bin", "--out=a.bin", "--tokenizer=gpt2")
    assert np.fromfile("a.bin", "<u2")[0] == 257


def test_errors_are_one_line_and_leave_no_files(folder, word_tokenizer, capsys):
    pytest.importorskip("tiktoken")
    builders.write_files(
        folder,
        {
            "zero.txt": b"a\0b",
            "latin.txt": b"caf\xe9",
            "empty.txt": b"",
            "bad.json": b"{}",
            "there.bin": b"",
            "described.bin.json": b"the user's",
        },
    )
    before = sorted(os.listdir("."))
    cases = [
        (("--out=a.bin", "none.txt"), "there is no file or folder 'none.txt'"),
        (("--out=a.bin", "zero.txt"), "zero.txt holds id 0, which separates documents"),
        (("--out=a.bin", "empty.txt"), "every file is empty (1 found)"),
        (("--out=there.bin", "texts"), "there.bin exists; remove it"),
        (("--out=described.bin", "texts"), "described.bin.json exists; remove it"),
        (("--out=a.bin", "--tokenizer=words.json", "latin.txt"), "latin.txt is not UTF-8 at byte 3"),
        (
            ("--out=a.bin", "--tokenizer=gone.json", "texts"),
            "--tokenizer=gone.json: there is no such file or folder",
        ),
        (("--out=a.bin", "--tokenizer=bad.json", "texts"), "bad.json is not a `tokenizers` file"),
        (
            ("--out=a.bin", "--tokenizer=nonesuch", "texts"),
            "give byte, a file, a folder as ./NAME, or one of",
        ),
        (("--out=a.bin", "--separator=-1", "texts"), "--separator is -1; it must be an id from 0"),
    ]
    for arguments, message in cases:
        assert message in mistakes.line(prepare.main, ["--format=bin", *arguments], capsys)
    zarr = ["--format=longcrawl64", "--out=a.zarr", "texts"]
    line = mistakes.line(prepare.main, zarr, capsys)
    assert "fewer than one row of 65536; name more files or set a smaller --row_tokens" in line
    line = mistakes.line(prepare.main, [*zarr, "--row_tokens=0"], capsys)
    assert "--row_tokens is 0; it must be at least 1" in line
    assert "required: --format" in mistakes.line(prepare.main, ["--out=a.bin", "texts"], capsys)
    assert sorted(os.listdir(".")) == before


@pytest.mark.parametrize(("name", "library"), [("words.json", "tokenizers"), ("gpt2", "tiktoken")])
def test_missing_library(folder, word_tokenizer, monkeypatch, name, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ValueError, match=f"needs the package '{library}', which is not installed; install the opt"
    ):
        tokenizer.load(name)


def test_tokenizer_without_an_end_of_text(folder, capsys):
    builders.write_words(pathlib.Path("plain.json"), {"[UNK]": 0, "x": 1})
    common = ["--format=bin", "--out=a.bin", "--tokenizer=plain.json", "texts/d.txt"]
    line = mistakes.line(prepare.main, common, capsys)
    assert "names no end of text; set --separator to an id" in line
    prepare.main([*common, "--separator=2"])
    assert np.fromfile("a.bin", "<u2").tolist() == [1, 2]


def test_a_chunk_of_zeros_is_written(folder, word_tokenizer):
    builders.write_files(folder, {"unknown.txt": b"y " * 4095})
    prepare.main(
        ["--format=longcrawl64", "--out=a.zarr", "--row_tokens=4096", "--tokenizer=words.json", "unknown.txt"]
    )
    config = builders.data_config(
        source="longcrawl64", paths=("a.zarr",), document_separator=7, heldout_fraction=0.0
    )
    dataset = data.train_dataset(config, vocab_size=10)
    read = np.stack([dataset[i]["targets"] for i in range(512)])
    assert (read == 0).sum() == 4095
    assert (read == 7).sum() == 1
