"""Tests of labeled texts in columns: reading, truncation, holding out and rejected files."""

import dataclasses
import pathlib

import numpy as np
import pytest

from sympow_jax import config as config_lib
from sympow_jax import data
from sympow_jax.data import files, sources
from tests.data import builders

BINARY = config_lib.TaskConfig(name="classification", classes=2)
NUMBER = config_lib.TaskConfig(name="regression")


def settings(path, **changes) -> config_lib.DataConfig:
    defaults = {"text_columns": ("sentence",), "context_length": 16, "heldout_fraction": 0.0}
    return builders.data_config(**{"source": "tsv", "paths": (str(path),), **defaults, **changes})


def write(folder: pathlib.Path, content: str, name: str = "a.tsv") -> pathlib.Path:
    builders.write_files(folder, {name: content.encode()})
    return folder / name


def epoch(config, task, count, vocab_size=256):
    """Returns the rows of the first epoch as texts and labels, in the order of the texts."""
    dataset = data.train_dataset(config, task=task, vocab_size=vocab_size)
    examples = []
    for i in range(count):
        row = dataset[i]
        real = row["segment_ids"] == 0
        # Tokens first, then padding.
        assert not np.any(np.diff(real.astype(int)) > 0)
        assert (row["inputs"][~real] == 0).all()
        assert (row["segment_ids"][~real] == -1).all()
        examples.append((bytes(row["inputs"][real].astype(np.uint8)), row["labels"].item()))
    return sorted(examples)


def test_columns_and_labels(tmp_path):
    classes = ("entailment", "neutral", "contradiction")
    for content, changes, task, expected in (
        # A UTF-8 byte order mark, Windows line ends, a literal quote and no newline after the last line.
        (
            '\ufeffid\tsentence\tlabel\r\n0\tgood "one\t1\r\n1\tbád\t0',
            {},
            BINARY,
            [("bád".encode(), 0), (b'good "one', 1)],
        ),
        # Without a header.
        (
            "src\t1\t\tfine\nsrc\t0\t*\twrong is\n",
            {"text_columns": ("4",), "label_column": "2"},
            BINARY,
            [(b"fine", 1), (b"wrong is", 0)],
        ),
        # A number is a name in the header, unless all are numbers.
        ("2\tlabel\na\t1\n", {"text_columns": ("2",)}, BINARY, [(b"a", 1)]),
        # A repeated name that is not asked for.
        ("id\tid\tsentence\tlabel\n0\t1\ta\t1\n", {}, BINARY, [(b"a", 1)]),
        (
            "sentence\tgold\na\tneutral\nb\tcontradiction\nc\tentailment\n",
            {"label_column": "gold", "labels": classes},
            dataclasses.replace(BINARY, classes=3),
            [(b"a", 1), (b"b", 2), (b"c", 0)],
        ),
        ("sentence\tlabel\na\t2.25\nb\t-1e-3\n", {}, NUMBER, [(b"a", 2.25), (b"b", np.float32(-1e-3))]),
        # A long text is truncated.
        (f"sentence\tlabel\n{'ab' * 40}\t1\n", {}, BINARY, [(b"ab" * 8, 1)]),
    ):
        config = settings(write(tmp_path, content), **changes)
        assert epoch(config, task, len(expected)) == expected
        labels = data.train_dataset(config, task=task, vocab_size=256)[0]["labels"]
        assert labels.dtype == (np.float32 if task is NUMBER else np.int32)


def test_two_texts(tmp_path):
    """The longer text is truncated first, or each to half a row for a dual encoder."""
    dual = dataclasses.replace(BINARY, dual_encoder=True)
    for one, two, joined, halves in (
        ("abc", "xyz", "abc\0xyz", ("abc", "xyz")),
        ("abcdef", "xyz", "abcd\0xyz", ("abcd", "xyz")),
        ("abc", "uvwxyz", "abc\0uvwx", ("abc", "uvwx")),
        ("abcdef", "uvwxyz", "abcd\0uvw", ("abcd", "uvwx")),
        ("abcdefghij", "x", "abcdef\0x", ("abcd", "x")),
        ("", "uvwxyzuvw", "\0uvwxyzu", ("", "uvwx")),
    ):
        path = write(tmp_path, f"one\ttwo\tlabel\n{one}\t{two}\t1\n")
        config = settings(path, text_columns=("one", "two"), context_length=8)
        assert epoch(config, BINARY, 1) == [(joined.encode(), 1)]
        swapped = settings(path, text_columns=("two", "one"), context_length=64)
        assert epoch(swapped, BINARY, 1) == [(f"{two}\0{one}".encode(), 1)]
        row = data.train_dataset(config, task=dual, vocab_size=256)[0]
        assert bytes(row["inputs"].astype(np.uint8)) == "".join(halves).encode().ljust(8, b"\0")
        ids = [0] * len(halves[0]) + [1] * len(halves[1])
        assert row["segment_ids"].tolist() == ids + [-1] * (8 - len(ids))
    plain = builders.write_words(tmp_path / "plain.json", {"[UNK]": 0})
    config = settings(path, text_columns=("one", "two"), tokenizer=plain)
    assert data.train_dataset(config, task=dual, vocab_size=1)[0]["segment_ids"].tolist()[:2] == [1, -1]
    with builders.refused(r"a\.tsv \(line 2\) holds id 122, but model\.vocab_size is 122"):
        data.train_dataset(dataclasses.replace(config, tokenizer="byte"), task=dual, vocab_size=122)[0]


@pytest.fixture
def words(tmp_path):
    """Returns a tokenizer of whole words whose end of text is id 3."""
    vocabulary = {"[UNK]": 0, "good": 1, "film": 2, "</s>": 3}
    return builders.write_words(tmp_path / "words.json", vocabulary)


def test_several_files_and_a_fraction_held_out(tmp_path):
    for name in "ab":
        lines = "".join(f"{name}{i}\t{i % 2}\n" for i in range(500))
        write(tmp_path / "train", f"sentence\tlabel\n{lines}", f"{name}.tsv")
    builders.write_files(tmp_path / "train", {"README.md": b"not read"})
    config = settings(tmp_path / "train", heldout_fraction=0.1)
    mask = np.concatenate([files.held_out([f"{name}.tsv"], np.arange(500), 0.1) for name in "ab"])
    description = data.describe(config)
    counts = [description[name] for name in ("files", "examples", "heldout_examples")]
    assert counts == [2, 1000 - mask.sum(), mask.sum()]
    train = epoch(config, BINARY, description["examples"])
    expected = {f"{'ab'[i // 500]}{i % 500}".encode(): out for i, out in enumerate(mask)}
    assert [text for text, _ in train] == sorted(text for text, out in expected.items() if not out)
    assert all(int(text[1:]) % 2 == label for text, label in train)
    (heldout,) = data.HeldoutData(config, BINARY, vocab_size=256).batches(mask.sum())
    texts = [
        bytes(row[ids == 0].astype(np.uint8)) for row, ids in zip(heldout["inputs"], heldout["segment_ids"])
    ]
    assert texts == [text for text, out in expected.items() if out]
    assert (heldout["labels"] >= 0).all()


def test_held_out_files_may_have_other_columns(tmp_path):
    train = write(tmp_path, "sentence\tlabel\na\t1\n")
    heldout = write(tmp_path, "id\tlabel\tsentence\n0\t2.5\tb\n1\t0.5\tc\n", "held.tsv")
    config = settings(train, heldout_paths=(str(heldout),))
    (batch,) = data.HeldoutData(config, NUMBER, vocab_size=256).batches(4)
    np.testing.assert_array_equal(batch["labels"], np.float32([2.5, 0.5, np.nan, np.nan]))
    assert batch["labels"].dtype == np.float32
    assert batch["inputs"][:, 0].tolist() == [ord("b"), ord("c"), ord("c"), ord("c")]
    assert (batch["segment_ids"][:, 0] == 0).all()


def test_named_held_out_files_are_parts(tmp_path):
    train = write(tmp_path, "sentence\tlabel\na\t1\n")
    near = write(tmp_path, "sentence\tlabel\nb\t1\nc\t0\n", "z.tsv")
    far = write(tmp_path, "sentence\tlabel\nd\t0\n", "b.tsv")
    config = settings(train, heldout_paths=(str(near), str(far)), heldout_names=("near", "far"))
    heldout = data.HeldoutData(config, BINARY, vocab_size=256)
    texts = {}
    for name, part in heldout.parts.items():
        (batch,) = part.batches(3)
        texts[name] = [*zip(map(chr, batch["inputs"][:, 0]), batch["labels"].tolist())]
    assert texts == {"near": [("b", 1), ("c", 0), ("c", -1)], "far": [("d", 0), ("d", -1), ("d", -1)]}
    assert data.describe(config)["heldout_examples"] == len(heldout.rows) == 3
    unnamed = data.HeldoutData(settings(train, heldout_paths=(str(near),)), BINARY, vocab_size=256)
    assert unnamed.parts == {"": unnamed}
    gone = settings(train, heldout_paths=(str(near), f"{tmp_path}/gone.tsv"), heldout_names=("near", "far"))
    with builders.refused(r"^data\.heldout_paths: there is no file or folder"):
        data.HeldoutData(gone, BINARY, vocab_size=256)


def test_description_is_of_the_contents_and_the_tokenizer(tmp_path):
    path, found = write(tmp_path, "sentence\tlabel\na b\t1\n"), []
    for vocabulary in ({"[UNK]": 0, "a": 1, "b": 2}, {"[UNK]": 0, "a": 2, "b": 1}):
        words = builders.write_words(tmp_path / "words.json", vocabulary)
        found.append(data.describe(settings(path, tokenizer=words)))
    assert found[0]["tokenizer"] != found[1]["tokenizer"]
    assert found[0]["digest"] == found[1]["digest"]
    assert (found[0]["bytes"], found[0]["examples"]) == (21, 1)
    write(tmp_path, "sentence\tlabel\na b\t0\n")
    assert data.describe(settings(path))["digest"] != found[0]["digest"]


HEAD, TWO = "sentence\tlabel\n", {"text_columns": ("sentence", "two")}


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        ("", {}, r"a\.tsv is empty; it must hold lines of columns"),
        (HEAD, {}, r"a\.tsv has no examples, only a header"),
        ("text\tlabel\na\t1\n", {}, r"a\.tsv has no column 'sentence': there are 'text', 'label'; correct"),
        ("sentence\tid\tsentence\tlabel\na\t0\tb\t1\n", {}, r"a\.tsv has 2 columns named 'sentence': there"),
        ("a\t1\n", {"text_columns": ("1",), "label_column": "3"}, r"no column '3': there are columns 1 to"),
        (HEAD + "a\t1\nb\t0\tc\n", {}, r"a\.tsv \(line 3\) has another number of columns, 3,"),
        (HEAD + "a\t1\nb\t2\n", {}, r"a\.tsv \(line 3\): label '2' is not one of '0', '1'; correct"),
        (HEAD + "a\tYes\n", {"labels": ("no", "yes")}, r"\(line 2\): label 'Yes' is not one of"),
        (HEAD + "a\tyes\n", {"labels": ("no", "yes", "maybe")}, r"data\.labels names 3 classes,"),
        (HEAD + "a\t1\n\t0\n", {}, r"a\.tsv \(line 3\) has no text; leave the line out"),
        ("sentence\ttwo\tlabel\na\t\t1\n\t\t0\n", TWO, r"a\.tsv \(line 3\) has no text; leave the line"),
        (HEAD + "a\t1\n", {"tokenizer": "gone.json"}, r"data\.tokenizer=gone\.json: there is no"),
        (HEAD + "a\t1\n", {"text_columns": ()}, r"data\.text_columns is \(\); source 'tsv' needs the names"),
        (HEAD + "a\t1\n", {"labels": ("a", "a")}, r"data\.labels is \('a', 'a'\); every class must be named"),
        ("sentence\ttwo\tlabel\na\tb\t1\n", TWO | {"document_separator": 256}, "between two texts is 256"),
        ("sentence\ttwo\tlabel\na\tb\t1\n", TWO | {"context_length": 2}, "two texts and a separator need"),
    ],
)
def test_bad_files(tmp_path, content, changes, message):
    path = write(tmp_path, content)
    with builders.refused(message):
        data.train_dataset(settings(path, **changes), task=BINARY, vocab_size=256)


def test_labels_that_are_not_numbers(tmp_path):
    for label in ("", "high", "nan", "inf", "1e39"):
        path = write(tmp_path, f"sentence\tlabel\na\t1.5\nb\t{label}\n")
        with builders.refused(rf"a\.tsv \(line 3\): label '{label}' is not a finite number"):
            data.train_dataset(settings(path), task=NUMBER, vocab_size=256)


def test_bad_tokens(tmp_path, words):
    path = write(tmp_path, "sentence\tlabel\n\u00ff\t1\n")
    with builders.refused(r"a\.tsv \(line 2\) holds id 195, but model\.vocab_size is 128"):
        data.train_dataset(settings(path), task=BINARY, vocab_size=128)[0]
    builders.write_files(tmp_path, {"latin.tsv": b"sentence\tlabel\n\xff\t1\n"})
    latin = settings(tmp_path / "latin.tsv", tokenizer=words)
    with builders.refused(r"latin\.tsv \(line 2\) is not UTF-8 at byte 0; leave it out, conv"):
        data.train_dataset(latin, task=BINARY, vocab_size=128)[0]
    path = write(tmp_path, "one\ttwo\tlabel\n \t \t1\n \tfilm\t1\n")
    pairs = settings(path, text_columns=("one", "two"), tokenizer=words)
    for dual_encoder, expected in ((False, [3, 2]), (True, [2])):
        task = dataclasses.replace(BINARY, dual_encoder=dual_encoder)
        examples = sources.open_source(pairs, task, vocab_size=128).side(heldout=False)
        with builders.refused(r"\(line 2\): the tokenizer finds no token in the text; leave"):
            examples.row(0, ())
        row = examples.row(1, ())
        assert row["inputs"][row["segment_ids"] >= 0].tolist() == expected
    plain = builders.write_words(tmp_path / "plain.json", {"[UNK]": 0, "x": 1})
    with builders.refused(r"names no end of text; set data\.document_separator to an id"):
        data.train_dataset(dataclasses.replace(pairs, tokenizer=plain), task=BINARY, vocab_size=256)
