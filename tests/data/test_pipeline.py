"""Tests of infinite rows: resuming from an index, sharing between processes, held-out documents."""

import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import pathlib
import re

import numpy as np
import pytest

from sympow_jax import config as config_lib
from sympow_jax import data
from tests.data import builders


@pytest.fixture(params=["windows", "documents"])
def config(request, tmp_path):
    """Returns a config of 13 training rows in batches of 4, so that no epoch ends on a batch."""
    documents = [[*range(1 + 10 * i, 10 + 10 * i), 0] for i in range(11)]
    path = builders.write_bin(tmp_path / "a.bin", documents)
    return builders.whole("tokens", path, document_separator=0, batch_tokens=32, packing=request.param)


REGRESSION = config_lib.TaskConfig(name="regression")


def skip_without_package(source):
    if source in ("parquet", "jsonl"):
        pytest.importorskip("pyarrow")


def settings_of(source, paths, **changes) -> tuple[config_lib.DataConfig, config_lib.TaskConfig]:
    """Returns settings of data with documents ended by 0, or with a column `text`, and a task that reads it."""
    columns = ("text",) if source == "tsv" else ()
    config = builders.data_config(
        source=source, paths=paths, document_separator=0, text_columns=columns, **changes
    )
    return config, REGRESSION if source == "tsv" else config_lib.TaskConfig()


def test_every_epoch_has_every_row_in_another_order(config):
    one, other = (data.train_dataset(config, vocab_size=256) for _ in range(2))
    rows = [one[i] for i in range(42)]
    for i in reversed(range(42)):
        builders.assert_same(other[i], rows[i])
    epochs = [[tuple(row["inputs"].tolist()) for row in rows[start : start + 14]] for start in (0, 14, 28)]
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
    assert len(set(epochs[0])) == 14
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    with builders.refused("a batch has 4 rows, which cannot be divided into 3 equal shards"):
        one.batches(4, shares=3)


def test_heldout_documents(tmp_path):
    documents = [[*range(1, 2 + i % 7), 0] for i in range(300)]
    path = builders.write_bin(tmp_path / "a.bin", documents)
    config = builders.data_config(source="tokens", paths=(path,), document_separator=0)
    source = data.HeldoutData(config, vocab_size=256).documents
    assert len(source) == len(source.lengths)
    assert source.lengths.tolist() == [len(document) for document in source]
    assert all(document.dtype == np.int32 and document.tolist() in documents for document in source)
    assert source[-1].tolist() == source[len(source) - 1].tolist()
    with pytest.raises(IndexError):
        source[len(source)]
    with builders.refused(r"holds id \d, but model.vocab_size is 2"):
        list(data.HeldoutData(config, vocab_size=2).documents)


def test_nothing_held_out(tmp_path):
    path = builders.write_bin(tmp_path / "a.bin", [[1, 2, 3]])
    for fraction in (0.0, 1e-3):
        config = builders.data_config(source="tokens", paths=(path,), heldout_fraction=fraction)
        assert data.train_dataset(config, vocab_size=256)[0]["targets"].tolist() == [2, 3, *[-1] * 6]
        assert data.HeldoutData(config, vocab_size=256).documents is None
    builders.write_files(tmp_path, {"a.tsv": b"text\tlabel\na\t1\n"})
    config = builders.data_config(source="tsv", paths=(str(tmp_path / "a.tsv"),), text_columns=("text",))
    opened = data.HeldoutData(config, REGRESSION, vocab_size=256)
    assert (opened.rows, opened.documents, opened.sample(), [*opened.batches(2)]) == (None, None, None, [])


@pytest.fixture(params=["next_token", "next_token-documents", "masked_token", "classification", "regression"])
def task_and_data(request, tmp_path):
    """Writes 13 rows of every kind that a task reads, three of them held out in a separate file."""
    lines = [f"line {i}\t{i % 2}\n" for i in range(13)]
    builders.write_files(
        tmp_path,
        {
            "train.tsv": "".join(["text\tlabel\n", *lines[:10]]).encode(),
            "held.tsv": "".join(["text\tlabel\n", *lines[10:]]).encode(),
        },
    )
    builders.write_bin(tmp_path / "train.bin", [range(80)])
    builders.write_bin(tmp_path / "held.bin", [range(100, 124)])
    name, _, packing = request.param.partition("-")
    task = config_lib.TaskConfig(name=name, classes=2 if name == "classification" else None)
    suffix = "bin" if name.endswith("token") else "tsv"
    return task, builders.data_config(
        source="tokens" if suffix == "bin" else "tsv",
        paths=(str(tmp_path / f"train.{suffix}"),),
        heldout_paths=(str(tmp_path / f"held.{suffix}"),),
        text_columns=("text",),
        packing=packing or "windows",
    )


def test_every_task_resumes_and_shards_its_batches(task_and_data):
    task, config = task_and_data

    def dataset():
        return data.train_dataset(config, task=task, vocab_size=256)

    rows = dataset()
    read = list(itertools.islice(rows.batches(4), 8))
    for i, batch in enumerate(read):
        builders.assert_same(batch, builders.stacked([rows[4 * i + k] for k in range(4)]))
    running = dataset().batches(4)
    for start in range(6):
        assert running.get_state() == {"next_index": start}
        resumed = dataset().batches(4)
        resumed.set_state(running.get_state())
        for batch in read[start:]:
            builders.assert_same(next(resumed), batch)
        next(running)
    parts = [rows.batches(4, share=share, shares=2) for share in range(2)]
    for batch, *shares in zip(read, *parts):
        builders.assert_same(
            {name: np.concatenate([share[name] for share in shares]) for name in batch}, batch
        )


def test_every_task_has_its_held_out_rows_in_order(task_and_data):
    task, config = task_and_data
    once, again = (list(data.HeldoutData(config, task, vocab_size=256).batches(2)) for _ in range(2))
    assert len(once) == len(again) == 2
    for one, other in zip(once, again):
        builders.assert_same(one, other)
    train = next(data.train_dataset(config, task=task, vocab_size=256).batches(2))
    assert {name: (value.shape, value.dtype) for name, value in once[1].items()} == {
        name: (value.shape, value.dtype) for name, value in train.items()
    }
    answers = np.concatenate([batch["labels" if "labels" in batch else "targets"] for batch in once])
    answers = answers.reshape(4, -1)
    counted = ~np.isnan(answers) if task.name == "regression" else answers != -1
    assert counted.any(axis=1).tolist() == [True, True, True, False]
    # One batch may hold them all.
    (large,) = data.HeldoutData(config, task, vocab_size=256).batches(7)
    rows = {name: np.concatenate([batch[name] for batch in once])[:3] for name in large}
    builders.assert_same({name: value[:3] for name, value in large.items()}, rows)


def test_the_held_out_batch_is_shared_and_padded(task_and_data):
    task, config = task_and_data
    config = dataclasses.replace(config, batch_tokens=4 * config.context_length)
    whole = data.HeldoutData(config, task, vocab_size=256).sample()
    builders.assert_same(whole, data.HeldoutData(config, task, vocab_size=256).sample())
    parts = [
        data.HeldoutData(config, task, vocab_size=256).sample(share=share, shares=2) for share in range(2)
    ]
    builders.assert_same({name: np.concatenate([part[name] for part in parts]) for name in whole}, whole)
    answers = whole["labels" if "labels" in whole else "targets"].reshape(4, -1)
    counted = ~np.isnan(answers) if task.name == "regression" else answers != -1
    assert counted.any(axis=1).tolist() == [True, True, True, False]
    # The three held-out rows, in another order.
    (rows,) = data.HeldoutData(config, task, vocab_size=256).batches(3)
    assert sorted(map(bytes, whole["inputs"][:3])) == sorted(map(bytes, rows["inputs"]))


def write_sixty(folder, source, name):
    """Writes 60 documents such as `a07`: files of `text`, or documents of one file."""
    texts = [f"{name}{i:02}" for i in range(60)]
    path = folder / f"{name}.{ {'tokens': 'bin'}.get(source, source) }"
    if source == "text":
        builders.write_files(folder, {f"{text}.txt": text.encode() for text in texts})
    elif source == "tokens":
        builders.write_bin(path, [[*text.encode(), 0] for text in texts])
    elif source == "tsv":
        path.write_text("".join(["text\tlabel\n", *(f"{text}\t1\n" for text in texts)]))
    else:
        (builders.write_jsonl if source == "jsonl" else builders.write_parquet)(path, texts)


@pytest.mark.parametrize("source", ["text", "tokens", "tsv", "jsonl", "parquet"])
def test_a_document_stays_on_its_side_when_files_are_added(tmp_path, source):
    skip_without_package(source)
    config, task = settings_of(source, (str(tmp_path),), heldout_fraction=0.3)

    def held_out():
        opened = data.HeldoutData(config, task, vocab_size=256)
        rows = (row for batch in opened.batches(1) for row in batch["inputs"])
        found = rows if opened.documents is None else opened.documents
        return {bytes(one.astype(np.uint8)).rstrip(b"\0") for one in found}

    write_sixty(tmp_path, source, "b")
    before = held_out()
    assert 5 < len(before) < 35
    write_sixty(tmp_path, source, "a")
    after = held_out()
    assert {one for one in after if one.startswith(b"b")} == before < after
    # The shortest document that is read does not change the side of the others.
    if source != "tsv":
        config = dataclasses.replace(config, shortest_document=4 if source != "text" else 3)
        write_sixty(tmp_path, source, "c")
        assert {one for one in held_out() if one[:1] in b"ab"} == after


def test_named_files_and_found_ones(tmp_path):
    """The end of a file that a path names is held out, whatever other files there are."""
    files = {f"{name}.txt": name.encode() * 1000 for name in "abcd"}
    builders.write_files(tmp_path, files)

    def held_out(*paths):
        config = builders.data_config(paths=tuple(f"{tmp_path}/{path}" for path in paths), context_length=100)
        opened = data.HeldoutData(config, vocab_size=256).documents
        return b"".join(bytes(one.astype(np.uint8)) for one in opened or ())

    assert held_out("a.txt") == b"a" * 100
    assert held_out("b.txt", "a.txt") == b"a" * 100 + b"b" * 100
    assert held_out("?.txt", "a.txt") == b"a" * 100 + held_out("?.txt").replace(b"a", b"")
    assert held_out("", "a.txt") == b"a" * 100 + held_out("").replace(b"a", b"")


def test_all_of_the_data_may_be_held_out(tmp_path):
    for source in ("text", "tokens", "tsv"):
        (tmp_path / source).mkdir()
        write_sixty(tmp_path / source, source, "a")
        config, task = settings_of(source, (str(tmp_path / source),), heldout_fraction=1 - 1e-9)
        with builders.refused(r"nothing is left to train on: .*; lower it, name more data, or"):
            data.train_dataset(config, task=task, vocab_size=256)


@pytest.mark.parametrize(("size", "pieces"), [(4000, 20), (400, 5), (100, 1)])
def test_the_end_of_a_named_file_is_held_out(tmp_path, size, pieces):
    text = bytes(np.random.default_rng(0).integers(0, 256, size).astype(np.uint8))
    (tmp_path / "a.txt").write_bytes(text)
    config = builders.data_config(paths=(str(tmp_path / "a.txt"),), heldout_fraction=0.1, packing="documents")
    held = data.HeldoutData(config, vocab_size=256).documents
    assert len(held) == pieces
    assert b"".join(bytes(one.astype(np.uint8)) for one in held) == text[size * 9 // 10 :]
    described = data.describe(config)
    assert (described["tokens"], described["heldout_tokens"]) == (size * 9 // 10, size // 10)
    assert described["heldout_note"] == "the end of each file that data.paths names"
    # Nothing is held out of a file too short to be cut, or if nothing is to be held out.
    for fraction in (0.0, 1 / size):
        without = dataclasses.replace(config, heldout_fraction=fraction)
        assert data.HeldoutData(without, config_lib.TaskConfig(), vocab_size=256).sample() is None


def test_sources_that_are_not_for_the_task():
    for source, task, names in (
        ("text", "classification", "next_token and match_attention and masked_token"),
        ("tsv", "masked_token", "classification and regression"),
        ("images", "regression", "classification"),
        ("listops", "next_token", "classification"),
    ):
        paths = () if source in ("text", "listops") else ("a",)
        config = builders.data_config(source=source, paths=paths, text_columns=("text",), context_length=2048)
        settings = config_lib.TaskConfig(name=task, classes=2)
        for open_data in (functools.partial(data.train_dataset, task=settings), data.HeldoutData):
            arguments = (config,) if isinstance(open_data, functools.partial) else (config, settings)
            with builders.refused(f"is '{task}', but data.source '{source}' is for {names}; change"):
                open_data(*arguments, vocab_size=256)


@pytest.mark.parametrize(
    ("source", "name"),
    [("text", "b/1.txt"), ("jsonl", "b/1.jsonl.gz"), ("images", "b/1.png"), ("longcrawl64", "")],
)
def test_no_file_is_both_trained_on_and_held_out(tmp_path, source, name):
    """The file is trained on in its folder, and held out by a link to it or to the folder."""
    skip_without_package(source)
    trained, other = tmp_path / "trained", tmp_path / "other"
    for root in (trained, other):
        builders.write_files(root, {f"{folder}/1{pathlib.Path(name).suffix}": b"ab" for folder in "ab"})
        builders.write_files(root, {name: b"ab"} if name else {})
    more = {"images": {"image_size": 8}, "tsv": {"text_columns": ("a",)}}.get(source, {})
    settings = builders.data_config(source=source, paths=(str(trained),), heldout_fraction=0.0, **more)
    data.require_held_apart(settings, settings)
    apart = dataclasses.replace(settings, heldout_paths=(str(other),))
    data.require_held_apart(apart, apart)
    link = tmp_path / f"link{pathlib.Path(name).suffix}"
    link.symlink_to(trained if source in ("images", "longcrawl64") else trained / name)
    shared = trained / ("a/1.png" if source == "images" else name)
    count = 2 if source == "images" else 1
    message = (
        f"^data.paths and data.heldout_paths share {count} of what they name, such as {shared}; change one"
    )
    both = dataclasses.replace(settings, heldout_paths=(str(other), str(link)))
    with builders.refused(message):
        data.require_held_apart(both, both)


def test_no_remote_file_is_both_trained_on_and_held_out():
    skip_without_package("jsonl")
    system = pytest.importorskip("fsspec").filesystem("memory")
    for name in ("train-0", "train-1", "val-0"):
        system.pipe(f"/apart/{name}.jsonl", b'{"text": "a"}\n')
    settings = builders.data_config(
        source="jsonl", paths=("memory://apart/*.jsonl",), heldout_paths=("memory://apart/val-*.jsonl",)
    )
    with builders.refused(r"share 1 of what they name, such as"):
        data.require_held_apart(settings, settings)
    apart = dataclasses.replace(settings, paths=("memory://apart/train-*.jsonl",))
    data.require_held_apart(apart, apart)


SAME = {"document_separator": 0, "heldout_fraction": 0.1}


def test_an_evaluation_holds_out_what_was_not_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
        builders.write_bin(tmp_path / name / f"{name}.bin", [[1, 2, 0]])
    for trained, evaluated, apart in (
        (SAME, SAME, True),
        (SAME, {**SAME, "heldout_fraction": 0.05}, True),
        (SAME, {**SAME, "heldout_fraction": 0.2}, None),
        (SAME, {**SAME, "document_separator": 1}, None),
        (SAME, {**SAME, "paths": ("a/a.bin",)}, None),
        (SAME, {**SAME, "paths": ("b",)}, True),
        (SAME, {**SAME, "paths": ("a/../a/",)}, True),
        (SAME, {"heldout_paths": ("b",)}, True),
        (SAME, {"heldout_paths": ("a/a.bin",)}, None),
        (SAME, {"source": "text", "heldout_paths": ("a/a.bin",)}, None),
        ({"heldout_paths": ("b",)}, {"heldout_paths": ("b",)}, True),
        ({"heldout_paths": ("b",)}, SAME, None),
        ({"paths": ("gone",)}, SAME, False),
    ):
        before, now = (
            builders.data_config(**{"source": "tokens", "paths": ("a",)} | changes)
            for changes in (trained, evaluated)
        )
        if apart is not None:
            assert data.require_held_apart(now, before) is apart
            continue
        with builders.refused(r"^data\.paths of runs/a and data\.\w+ share 1 .*such as .*a\.bin"):
            data.require_held_apart(now, before, name="runs/a")


@pytest.mark.parametrize("setting", ["paths", "heldout_paths"])
def test_no_run_reads_its_own_workdir(tmp_path, monkeypatch, setting):
    names = ("1.txt", "text/1.txt", "text/README.md", "text/config.json", "runs/1.txt")
    builders.write_files(tmp_path, dict.fromkeys(names, b"text"))
    (tmp_path / "link").symlink_to(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    for path, workdir, is_read in (
        (".", "runs/a", True),
        ("text", "text", True),
        ("link", "text/a", True),
        ("text", "link/a", True),
        ("**/*.txt", "runs/a", True),
        ("**/*.json*", "runs/a", True),
        ("runs/*/*", "runs/a", True),
        ("**/*.md", "runs/a", False),
        ("*.txt", "runs/a", False),
        ("runs/*.txt", "runs/a", False),
        ("text", "runs/a", False),
        ("text", "text2", False),
        ("text/1.txt", "text", False),
        ("memory://old", "runs/a", False),
    ):
        source = "jsonl" if "//" in path else "text"
        settings = builders.data_config(source=source, **{"paths": ("text/1.txt",), setting: (path,)})
        message = rf"^data\.{setting}: '{re.escape(path)}' stands for .* workdir"
        with builders.refused(message) if is_read else contextlib.nullcontext():
            data.require_outside_workdir(settings, pathlib.Path(workdir))


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch, source):
    skip_without_package(source)
    builders.write_files(tmp_path, {f"{name}/1.jsonl": b'{"text": "a"}\n' for name in ("open", "closed")})
    scandir = os.scandir

    def refuse(path):
        if os.fspath(path).endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with builders.refused(r"cannot read .*closed.*"):
        data.describe(builders.data_config(source=source, paths=(str(tmp_path),)))
