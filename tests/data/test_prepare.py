"""Tests of converting text to token files and back, in both layouts, and of the record of that."""

import dataclasses
import functools
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sympow_jax import config as config_lib
from sympow_jax import data
from sympow_jax.commands import command_line, prepare
from sympow_jax.data import prepare as prepare_lib
from sympow_jax.data import tokenizer
from sympow_jax.data.corpus import encoding
from sympow_jax.data.sources import tokens
from sympow_jax.process import progress, signals
from tests import mistakes
from tests.data import builders

TEXTS = {"a.txt": b"the first document", "b.txt": "naïve second\n".encode(), "c.txt": b"", "d.txt": b"x"}
STORED = b"the first document\0" + "naïve second\n".encode() + b"\0x\0"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    builders.write_files(tmp_path / "texts", TEXTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stored(path: str, dtype: str = "<u2") -> np.ndarray:
    """Returns the tokens of a folder."""
    return np.concatenate([np.fromfile(file, dtype) for file in sorted(pathlib.Path(path).glob("*.bin"))])


def text(path: str) -> bytes:
    return stored(path).astype(np.uint8).tobytes()


def record(path: str) -> dict:
    return json.loads(pathlib.Path(path, tokens.METADATA).read_text())


@pytest.fixture
def word_tokenizer(folder):
    vocabulary = {"[UNK]": 0, "the": 1, "first": 2, "document": 3, "second": 4, "na": 5, "x": 9}
    return builders.write_words(pathlib.Path("words.json"), vocabulary, ["<|endoftext|>"])


def run(*arguments) -> None:
    prepare.main([*arguments, "texts"])


def test_bin_of_bytes_round_trip(folder):
    run("--format=bin", "--out=deep/train.bin")
    assert text("deep/train.bin") == STORED
    assert record("deep/train.bin") == {
        "tokenizer": "byte",
        "tokenizer_fingerprint": "byte",
        "vocab_size": 256,
        "separator": 0,
        "token_dtype": "uint16",
        "documents": 3,
        "tokens": len(STORED),
    }
    config = builders.whole("tokens", "deep/train.bin", document_separator=0)
    read = [bytes(document) for document in builders.contents(config)]
    assert read == [content + b"\0" for content in TEXTS.values() if content]
    assert sorted(os.listdir("deep/train.bin")) == ["000000-3-0.bin", tokens.METADATA]


def test_tokens_of_other_tokenizers(folder, word_tokenizer):
    fallback = builders.write_byte_fallback(folder / "fallback.json")
    builders.write_files(folder / "gaps", {"a.txt": b"x", "b.txt": b" \n", "c.txt": b"x x"})
    encode = tokenizer.load(fallback).encode
    # Documents begin as the tokenizer begins texts, and those without tokens are left out.
    begun = [token for text in TEXTS.values() if text for token in (1, *encode(text).tolist(), 2)]
    large = [1, 2, 3, 70_000, 0, 4, 70_000, 9, 70_000]
    for number, (name, separator, read, dtype, expected) in enumerate(
        (
            (fallback, 2, "texts", "<u2", begun),
            (word_tokenizer, 8, "gaps", "<u2", [9, 8, 9, 9, 8]),
            (word_tokenizer, 70_000, "texts", "<u4", large),
        )
    ):
        common = (f"--tokenizer={name}", f"--separator={separator}", read)
        prepare.main(["--format=bin", f"--out={number}.bin", *common])
        assert stored(f"{number}.bin", dtype).tolist() == expected
        assert record(f"{number}.bin")["documents"] == expected.count(separator)
    prepare.main(["--format=longcrawl64", "--out=a.zarr", "--row_tokens=3", *common])
    config = builders.whole("longcrawl64", "a.zarr", token_dtype="uint32")
    assert builders.contents(config) == np.reshape(large, (3, 3)).tolist()


def test_longcrawl64_in_several_bands_of_chunks(folder):
    builders.write_files(folder / "texts", {"e.txt": bytes(range(1, 256)) * 200})
    run("--format=longcrawl64", "--out=train.zarr", "--row_tokens=11")
    assert sorted(os.listdir(".")) == ["texts", "train.zarr"]
    assert {"0.0", "1.0", "2.0"} <= set(os.listdir("train.zarr"))
    run("--format=bin", "--out=train.bin")
    flat = stored("train.bin")
    rows = len(flat) // 11
    assert rows > 2 * 2048
    config = builders.whole("longcrawl64", "train.zarr", document_separator=0)
    assert builders.contents(config) == flat[: rows * 11].reshape(rows, 11).tolist()
    description = json.loads((folder / "train.zarr/.zattrs").read_text())
    assert description == record("train.bin") | {
        "rows": rows,
        "row_tokens": 11,
        "dropped_tokens": len(flat) - 11 * rows,
    }


@pytest.mark.parametrize(
    ("layout", "source", "out"),
    [("bin", "tokens", "a, 'b'/it.bin"), ("longcrawl64 --row_tokens=4", "longcrawl64", "~/$x.zarr")],
)
def test_the_printed_command_trains_on_the_output(
    folder, word_tokenizer, capsys, monkeypatch, layout, source, out
):
    monkeypatch.setenv("HOME", str(folder))
    run(*f"--format={layout}".split(), f"--out={out}", f"--tokenizer={word_tokenizer}")
    command = shlex.split(capsys.readouterr().out.partition("next: ")[2])
    assert command[:2] == ["sympow", "train"]
    config, _, _ = command_line.parse_training(command[2:])
    assert config.data.source == source
    assert config.data.paths == (os.path.expanduser(out),)
    assert (config.data.token_dtype, config.data.document_separator) == ("uint16", 7)
    assert (config.data.tokenizer, config.model.vocab_size) == (os.path.abspath(word_tokenizer), 10)
    assert data.compare_metadata(config)[1] == []


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
    assert stored("a.bin")[0] == 257


def test_a_chunk_of_zeros_is_written(folder, word_tokenizer):
    builders.write_files(folder, {"unknown.txt": b"y " * 4095})
    arguments = ["--out=a.zarr", "--row_tokens=4096", "--tokenizer=words.json", "unknown.txt"]
    prepare.main(["--format=longcrawl64", *arguments])
    assert builders.contents(builders.whole("longcrawl64", "a.zarr")) == [[0] * 4095 + [7]]


LINES = [f"document {i} " + "word " * (i % 7) for i in range(60)]
PIECES = 12
OPTIONS = prepare_lib.Options(text_column="text")
COLUMN = "--text_column=text"


@pytest.fixture
def lines(folder, monkeypatch):
    """Writes documents as JSON lines that are read in 12 pieces, and returns the text of the token files."""
    pytest.importorskip("pyarrow")
    size = os.path.getsize(builders.write_jsonl(folder / "lines.jsonl", LINES))
    monkeypatch.setattr(prepare_lib, "PIECE_BYTES", -(-size // PIECES))
    return b"".join(f"{line}\0".encode() for line in LINES)


class Stopped(Exception):
    pass


def stop_at(done: int):
    def report(progress: prepare_lib.Progress) -> None:
        assert progress.pieces == PIECES
        if progress.done == done:
            raise Stopped

    return report


def test_all_formats_give_the_same_tokens(folder, lines):
    builders.write_parquet(folder / "rows.parquet", LINES)
    builders.write_jsonl(folder / "lines.jsonl.gz", LINES)
    # What a process leaves that was killed while it wrote the record.
    (folder / "0.bin" / f".{tokens.METADATA}-abc").mkdir(parents=True)
    builders.write_files(folder / "files", {f"{i:02}": line.encode() for i, line in enumerate(LINES)})
    for i, path in enumerate(("lines.jsonl", "lines.jsonl.gz", "*.parquet", "files")):
        options = OPTIONS if path != "files" else prepare_lib.Options()
        summary = prepare_lib.write_bin(f"{i}.bin", [path], options)
        assert (summary["documents"], summary["tokens"]) == (len(LINES), len(lines))
        assert text(f"{i}.bin") == lines
    # Of several files, the order is that of their keys, whatever their formats.
    prepare_lib.write_bin("all.bin", ["rows.parquet", "lines.jsonl"], OPTIONS)
    assert text("all.bin") == 2 * lines


@pytest.mark.parametrize(("out", "done"), [("a.bin", 1), ("a.zarr", 1), ("a.zarr", PIECES)])
def test_a_stopped_command_continues(folder, lines, out, done):
    write = (
        prepare_lib.write_bin
        if out == "a.bin"
        else functools.partial(prepare_lib.write_longcrawl64, row_tokens=16)
    )
    with pytest.raises(Stopped):
        write(out, ["lines.jsonl"], OPTIONS, report=stop_at(done))
    hidden = folder / (out if out == "a.bin" else ".a.zarr.prepare")
    assert not os.path.exists("a.zarr")
    made = {path.name: path.stat().st_mtime_ns for path in hidden.glob("*.bin")}
    assert len(made) >= done
    # What a killed process may leave: a draft.
    builders.write_files(hidden, {".000009-5-0.bin-x/000009-5-0.bin": b"draft"})
    begun = []
    about = write(out, ["lines.jsonl"], OPTIONS, report=begun.append)
    assert (begun[0].done, begun[-1].done) == (len(made), PIECES)
    assert write(f"whole{out[1:]}", ["lines.jsonl"], OPTIONS) == about
    for path in pathlib.Path(f"whole{out[1:]}").iterdir():
        assert pathlib.Path(out, path.name).read_bytes() == path.read_bytes()
    if out == "a.bin":
        assert made.items() <= {path.name: path.stat().st_mtime_ns for path in hidden.glob("*.bin")}.items()
        assert record(out) == about
        assert text(out) == lines
    else:
        assert not hidden.exists()


def test_another_command_for_the_same_output(folder, lines, capsys):
    with pytest.raises(Stopped):
        prepare_lib.write_bin("a.bin", ["lines.jsonl"], OPTIONS, report=stop_at(2))
    with builders.refused(r"next to a\.bin/prepared\.json are not complete; repeat"):
        data.train_dataset(builders.data_config(source="tokens", paths=("a.bin",)), vocab_size=256)
    command = ["--format=bin", "--out=a.bin", "--text_column=text", "lines.jsonl"]
    line = mistakes.line(prepare.main, [*command, "--shortest_document=5", "--separator=1"], capsys)
    assert "part of another output: separator was 0 and is 1, shortest_document was 1 and is 5; rep" in line
    builders.write_jsonl(folder / "more.jsonl", LINES)
    assert "files was 1 and is 2" in mistakes.line(prepare.main, [*command, "more.jsonl"], capsys)
    os.utime("lines.jsonl", ns=(1, 1))
    assert "names_sizes_times_sha256 was" in mistakes.line(prepare.main, command, capsys)


SLOW = """
import sys, time
from sympow_jax.data import prepare
from sympow_jax.data.corpus import encoding

encode = encoding.Encoder.__call__
encoding.Encoder.__call__ = lambda self, group: time.sleep(0.3) or encode(self, group)
if __name__ == "__main__":
    prepare.PIECE_BYTES = int(sys.argv[1])
    prepare.write_bin("a.bin", ["lines.jsonl"], prepare.Options(text_column="text", workers=2))
"""


@pytest.mark.robust
def test_nothing_remains_of_a_killed_command(folder, lines):
    """A command with slow workers is killed after its first piece; its workers end too."""
    pathlib.Path("slow.py").write_text(SLOW)
    path = os.pathsep.join([str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = subprocess.Popen(
        [sys.executable, "slow.py", str(prepare_lib.PIECE_BYTES)], env={**os.environ, "PYTHONPATH": path}
    )
    _wait(lambda: list(pathlib.Path("a.bin").glob("*.bin")))
    # Each thread has the children that it started.
    tasks = pathlib.Path(f"/proc/{command.pid}/task").glob("*/children")
    children = [child for path in tasks for child in path.read_text().split()]
    command.kill()
    command.wait()
    assert len(children) >= 2
    _wait(lambda: not any(os.path.exists(f"/proc/{child}") for child in children))
    reports = []
    prepare_lib.write_bin("a.bin", ["lines.jsonl"], OPTIONS, report=reports.append)
    assert reports[0].done >= 1
    assert text("a.bin") == lines


def _wait(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_command_with_one_line(folder, lines, monkeypatch, capsys, number):
    encode = encoding.Encoder.__call__
    encoded = []

    def interrupted(self, group):
        encoded.append(group)
        if len(encoded) == 3:
            signal.raise_signal(number)
        return encode(self, group)

    def forwarded(*arguments, **options):
        signal.raise_signal(number)
        print(*arguments, **options)

    before = [signal.getsignal(x) for x in (signal.SIGINT, *signals.NOTICES)]
    command = ["--format=bin", "--out=a.bin", "--text_column=text", "lines.jsonl"]
    with monkeypatch.context() as patch:
        patch.setattr(encoding.Encoder, "__call__", interrupted)
        patch.setattr(signals, "print", forwarded, raising=False)
        with pytest.raises(SystemExit) as stopped:
            prepare.main(command)
    assert stopped.value.code == 128 + number
    assert [signal.getsignal(x) for x in (signal.SIGINT, *signals.NOTICES)] == before
    assert capsys.readouterr() == ("", "interrupted; the same command continues\n")
    prepare.main(command)
    assert text("a.bin") == lines


def test_a_full_disk(folder, lines, monkeypatch, capsys):
    sync, count = os.fsync, []

    def full(number: int) -> None:
        count.append(number)
        if len(count) > 5:
            raise OSError(28, "No space left on device")
        sync(number)

    command = ["--format=bin", "--out=a.bin", "--text_column=text", "lines.jsonl"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        line = mistakes.line(prepare.main, command, capsys)
    assert "No space left on device; correct this and repeat the command, which continues" in line
    prepare.main(command)
    assert text("a.bin") == lines


def test_short_documents_are_left_out(folder, lines, capsys):
    common = ["--format=bin", "--text_column=text", "lines.jsonl"]
    prepare.main([*common, "--out=a.bin", "--shortest_document=40"])
    kept = [line for line in LINES if len(line) + 1 >= 40]
    assert 0 < len(kept) < PIECES  # so that some pieces have none
    config = builders.whole("tokens", "a.bin", document_separator=0)
    assert [bytes(read) for read in builders.contents(config)] == [f"{line}\0".encode() for line in kept]
    counts = [record("a.bin")[name] for name in ("documents", "left_out_documents")]
    assert counts == [len(kept), len(LINES) - len(kept)]
    capsys.readouterr()
    line = mistakes.line(prepare.main, [*common, "--out=b.bin", "--shortest_document=1000"], capsys)
    assert "every document has fewer tokens than --shortest_document, 1000; lower it" in line
    assert not os.path.exists("b.bin")


MISTAKES = f"""
--out=a.zarr texts                    | --out is a.zarr; with --format=bin it must end in .bin
--out=a.bin --row_tokens=4 texts      | --row_tokens is for --format=longcrawl64
zero.txt                              | zero.txt holds id 0, which separates documents
empty.txt                             | every file is empty (1 found)
none.txt none.jsonl {COLUMN}          | none.txt is neither .parquet nor .jsonl
none.jsonl {COLUMN}                   | there are no documents (1 files read); name files that hold text
--out=done.bin texts                  | done.bin exists; remove it
--out=link.bin texts                  | link.bin exists; remove it
--out=texts/a.bin ./texts/            | the output texts/a.bin is in ./texts/, and a later command
--out=texts/a.bin texts/**/*.json     | the output texts/a.bin is in texts/**/*.json, and a later command
--out=deep/a.bin ~nobody-by-this-name | there is no file or folder '~nobody-by-this-name'
--out=loop/a.bin texts                | cannot write loop/a.bin:
--out={"a" * 260}.bin texts           | File name too long
--tokenizer=words.json latin.txt      | latin.txt is not UTF-8 at byte 3
--tokenizer=strict.json texts         | b.txt: tokenizer strict.json cannot encode a text of 13
--tokenizer=nonesuch texts            | give byte, a file, a folder as ./NAME, or one of
--tokenizer=plain.json texts          | names no end of text; set --separator to an id
--separator=-1 texts                  | --separator is -1; it must be an id from 0
--separator={(1 << 31) - 1} texts     | it must be an id from 0 to 2147483646
--workers=0 texts                     | --workers is 0; it must be at least 1
texts {COLUMN}                        | --text_column reads; name the files of a folder with a glob, such as
lines.jsonl --text_column=body        | has no field 'body': there are 'id', 'text'; every
ids.jsonl {COLUMN}                    | ids.jsonl holds token ids in 'text', and not text; train on it with
zero.jsonl {COLUMN}                   | zero.jsonl (line at byte 23) holds id 0, which separates documents;
rows.parquet                          | rows.parquet has many documents, one per row or line; name the column
--format=longcrawl64 --out=a.zarr texts | fewer than one row of 65536; name more files or set a smaller --row_tokens
--format=longcrawl64 --out=a.zarr --row_tokens=0 texts | --row_tokens is 0; it must be at least 1
--format=longcrawl64 --out=caf\udce9.zarr texts | Zarr arrays need a path that is
"""


def test_mistakes_are_one_line_and_leave_no_files(folder, lines, word_tokenizer, capsys):
    pytest.importorskip("tiktoken")
    written = {"zero.txt": b"a\0b", "latin.txt": b"caf\xe9"}
    written |= {"empty.txt": b"", "done.bin/prepared.json": b'{"documents": 1}'}
    builders.write_files(folder, written)
    for name, documents in (("ids", [[1, 2], [3]]), ("none", [None, ""]), ("zero", ["a", "b\0"])):
        builders.write_jsonl(folder / f"{name}.jsonl", documents)
    builders.write_parquet(folder / "rows.parquet", LINES)
    builders.write_words(folder / "plain.json", {"[UNK]": 0, "x": 1})
    (folder / "strict.json").write_text(pathlib.Path("words.json").read_text().replace("[UNK]", "[NONE]", 1))
    os.symlink("loop", "loop")
    (folder / "other").mkdir()
    os.symlink("other", "link.bin")
    before = sorted(os.listdir("."))
    for row in MISTAKES.strip().splitlines():
        arguments, message = map(str.strip, row.split("|"))
        arguments = ["--format=bin", "--out=a.bin", *arguments.split()]
        assert message in mistakes.line(prepare.main, arguments, capsys)
        assert sorted(os.listdir(".")) == before
    assert "required: --format" in mistakes.line(prepare.main, ["--out=a.bin", "texts"], capsys)


def test_progress_in_lines_and_as_a_bar(folder, lines, monkeypatch, capsys):
    command = ["--format=bin", "--text_column=text", "lines.jsonl"]
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    prepare.main([*command, "--out=a.bin"])
    written = capsys.readouterr().err.splitlines()
    assert len(written) == PIECES + 1
    assert written[-1].startswith(f"file {PIECES}/{PIECES}  60 documents, {len(lines):,} tokens, ")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    prepare.main([*command, "--out=b.bin"])
    shown = capsys.readouterr().err
    assert f"{PIECES}/{PIECES}" in shown
    assert "60 documents" in shown


VOCABULARY = {"[UNK]": 0, "the": 1, "first": 2, "</s>": 3, "end": 4}


@pytest.fixture(params=["tokens", "longcrawl64"])
def settings(request, tmp_path, monkeypatch):
    """Returns the settings of a run on prepared data, in the working folder, whose facts they agree with."""
    monkeypatch.chdir(tmp_path)
    builders.write_files(tmp_path / "texts", {f"{i}.txt": b"the first end" for i in range(3)})
    builders.write_words(tmp_path / "words.json", VOCABULARY)
    builders.write_words(tmp_path / "others.json", {**VOCABULARY, "the": 2, "first": 1})
    os.link("words.json", "copy.json")
    layout, out, *rows = {
        "tokens": ("bin", "out.bin"),
        "longcrawl64": ("longcrawl64", "out.zarr", "--row_tokens=4"),
    }[request.param]
    prepare.main([f"--format={layout}", f"--out={out}", *rows, "--tokenizer=./words.json", "texts"])
    return config_lib.Config(
        model=config_lib.ModelConfig(vocab_size=5, layers=1, width=16, heads=2),
        data=builders.data_config(source=request.param, paths=(out,), document_separator=3),
    )


def test_contradictions_are_lines(settings):
    for changes, messages in (
        ({}, []),
        ({"vocab_size": 64}, []),
        ({"tokenizer": "copy.json"}, []),
        ({"vocab_size": 4}, ["ids below 5, but model.vocab_size is 4"]),
        ({"document_separator": 2}, ["separator 3, but data.document_separator is 2; set it to 3"]),
        ({"document_separator": None}, ["separator 3, but data.document_separator is "]),
        ({"tokenizer": "others.json"}, ["words.json, but data.tokenizer is others.json"]),
        ({"tokenizer": "gone.json"}, ["gone.json: there is no such file"]),
        ({"vocab_size": 4, "document_separator": 2, "tokenizer": "byte"}, ["4; raise", "is 2", "is byte"]),
    ):
        model = dataclasses.replace(settings.model, vocab_size=changes.pop("vocab_size", 5))
        changed = dataclasses.replace(settings.data, **changes)
        _, lines = data.compare_metadata(dataclasses.replace(settings, model=model, data=changed))
        assert len(lines) == len(messages)
        for line, message in zip(lines, messages):
            assert line.startswith("out.")
            assert message in line


def test_the_tokenizer_of_prepared_data(settings):
    assert data.compare_metadata(settings)[0].data.tokenizer == os.path.abspath("words.json")
    chosen = dataclasses.replace(settings, data=dataclasses.replace(settings.data, tokenizer="byte"))
    assert data.compare_metadata(chosen)[0] == chosen
    for name in ("out.bin/prepared.json", "out.zarr/.zattrs"):
        if os.path.exists(name):
            os.remove(name)
    assert data.compare_metadata(settings)[0] == settings
    model = dataclasses.replace(settings.model, vocab_size=4)
    assert data.compare_metadata(dataclasses.replace(settings, model=model))[1] == []
