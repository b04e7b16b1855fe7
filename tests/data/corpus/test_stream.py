"""Tests of training batches and held-out documents from parquet and JSON lines."""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest

from sympow_jax import config as config_lib
from sympow_jax import data
from sympow_jax.data import files
from sympow_jax.data.corpus import encoding, pieces, stream
from sympow_jax.data.sources import corpus
from tests.data import builders

pytest.importorskip("pyarrow")
pytest.importorskip("zstandard")

SEPARATOR = 0


def numbered(count: int, *, first: int = 1, seed: int = 0) -> list[list[int]]:
    """Returns documents of 1 to 40 ids, all distinct."""
    lengths = np.random.default_rng(seed).integers(1, 40, count)
    return [[first - 1 + id for id in document] for document in builders.numbered(lengths)]


def all_documents() -> list[list[int]]:
    """Returns the documents of the three files of `config`."""
    return [one for i in range(3) for one in numbered(100, first=1 + 10_000 * i, seed=i)]


@pytest.fixture
def small_groups(monkeypatch):
    """Makes groups of about 2,000 bytes of text."""
    monkeypatch.setattr(pieces, "GROUP_BYTES", 2000)
    monkeypatch.setattr(corpus, "_ROWS", 0)


@pytest.fixture(params=["parquet", "jsonl", "zst"])
def config(request, tmp_path, small_groups):
    """Returns a config of 300 documents in three files, of several groups each."""
    for number, name in enumerate("abc"):
        ids = numbered(100, first=1 + 10_000 * number, seed=number)
        if request.param == "parquet":
            builders.write_parquet(tmp_path / f"{name}.parquet", ids)
        else:
            suffix = ".zst" if request.param == "zst" else ""
            builders.write_jsonl(tmp_path / f"{name}.jsonl{suffix}", ids)
    return builders.whole(
        "parquet" if request.param == "parquet" else "jsonl",
        str(tmp_path),
        tokenizer_workers=0,
        document_separator=SEPARATOR,
    )


def open_batches(config, batch_size=4, *, vocab_size=50_000, task=None, **shares):
    return data.train_dataset(config, task=task, vocab_size=vocab_size).batches(batch_size, **shares)


def epoch_of_tokens(config, *, vocab_size=50_000) -> list[encoding.Tokens]:
    """Returns the tokens of every group of the first epoch."""
    dataset = data.train_dataset(config, vocab_size=vocab_size)
    with dataset.open_workers() as submit:
        return [tokens for _, tokens in dataset.tokens(submit, range(dataset.groups_per_epoch))]


def read(config, count, *, shares=1, state=None, batch_size=4):
    """Returns batches that several processes read, and the state that they save, from the state of other processes."""
    parts = [open_batches(config, batch_size, share=share, shares=shares) for share in range(shares)]
    for part in parts:
        if state is not None:
            part.set_state(state)
    batches = []
    for _ in range(count):
        found = [next(part) for part in parts]
        batches.append({name: np.concatenate([one[name] for one in found]) for name in found[0]})
    states = [part.get_state() for part in parts]
    for part in parts:
        part.close()
    return batches, {name: value for one in states for name, value in one.items()}


@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize("task", ["next_token", "masked_token"])
def test_rows_are_those_of_the_source_tokens(tmp_path, packing, task):
    ids = numbered(50)
    bin_file = builders.write_bin(tmp_path / "a.bin", [[*document, SEPARATOR] for document in ids])
    settings = {"packing": packing, "document_separator": SEPARATOR, "tokenizer_workers": 0}
    tokens = builders.whole("tokens", bin_file, **settings)
    parquet_file = builders.write_parquet(tmp_path / "a.parquet", ids)
    parquet = builders.whole("parquet", parquet_file, **settings)
    task = config_lib.TaskConfig(name=task)
    reference = data.train_dataset(tokens, task=task, vocab_size=50_000)
    count = sum(map(len, ids)) + len(ids)
    expected = {bytes(reference[i]["inputs"]) for i in range(-(-count // 8))}
    batch = next(open_batches(parquet, count // 8 - 1, task=task))
    assert batch.keys() == reference[0].keys()
    if task.name == "next_token":
        assert {bytes(row) for row in batch["inputs"]} <= expected
    else:
        # The same tokens, masked at random.
        plain = {bytes(row) for row in next(open_batches(parquet, count // 8 - 1))["inputs"]}
        shown = np.where(batch["targets"] == -1, batch["inputs"], batch["targets"])
        assert {bytes(row) for row in shown} & plain
        assert ((batch["targets"] != -1).sum(axis=1) >= 1).all()
    example = data.train_dataset(parquet, task=task, vocab_size=50_000).example()
    assert {name: (array.shape, array.dtype) for name, array in example.items()} == {
        name: (array.shape[1:], array.dtype) for name, array in batch.items()
    }


def test_every_token_is_in_one_row_of_an_epoch_except_for_the_dropped(config):
    dataset, found, streams = data.train_dataset(config, vocab_size=50_000), [], 3
    count = dataset.groups_per_epoch
    with dataset.open_workers() as submit:
        for stream in range(streams):
            numbers = itertools.takewhile(lambda number: number < count, dataset.numbers(stream, streams))
            tokens = dataset.tokens(submit, numbers, streams=streams)
            found += [row()["inputs"] for row, _ in dataset.rows_of_stream(tokens, 0)]
    tokens = np.concatenate(found)
    ids = tokens[tokens != SEPARATOR]
    assert len(np.unique(ids)) == len(ids)
    everything = [id for one in all_documents() for id in one]
    assert set(ids) < set(everything)
    assert 0 < len(everything) + 300 - len(tokens) < 9 * count


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_streams_divide_every_epoch(config, streams):
    dataset = data.train_dataset(config, vocab_size=50_000)
    count, epochs = dataset.groups_per_epoch, 5

    def numbers(index, start=0):
        found = dataset.numbers(index, streams, start=start)
        return list(itertools.takewhile(lambda number: number < epochs * count, found))

    found = [numbers(index) for index in range(streams)]
    assert sorted(itertools.chain(*found)) == list(range(epochs * count))
    for index, own in enumerate(found):
        assert numbers(index, own[3]) == own[3:]
        assert numbers(index, own[3] + 1) == own[4:]
    # They advance together: the text of a compressed file or of a group is the largest difference.
    groups = [[dataset._group(number) for number in own] for own in found]
    sizes = [sum(piece.text_bytes for group in own for piece in group) for own in groups]
    compressed = pieces.compression(groups[0][0][0].file.path) is not None
    assert max(sizes) - min(sizes) <= (20_000 if compressed else 2000)
    if compressed:  # from the first piece to the last
        for before, after in itertools.chain(*map(itertools.pairwise, groups)):
            assert after[0].index == (before[0].index + 1) % before[0].count


@pytest.mark.parametrize(
    ("batch_size", "units", "expected"),
    [(1, 100, 1), (8, 100, 8), (512, 9, 8), (24, 7, 6), (17, 100, 1), (8, 1, 1)],
)
def test_the_number_of_streams(batch_size, units, expected):
    group = (pieces.Piece(files.File("a.parquet", "a.parquet", 10), "parquet"),)
    assert stream.count_streams([group] * units, batch_size) == expected


def test_epochs_have_other_orders(config):
    dataset = data.train_dataset(config, vocab_size=50_000)
    count = dataset.groups_per_epoch
    epochs = [[dataset._group(epoch * count + i) for i in range(count)] for epoch in range(3)]
    assert count > 5
    assert len({tuple(sorted(epoch, key=str)) for epoch in epochs}) == 1
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    other = data.train_dataset(dataclasses.replace(config, seed=1), vocab_size=50_000)
    assert [other._group(i) for i in range(count)] not in epochs


@pytest.mark.parametrize("config", ["jsonl"], indirect=True)
def test_the_order_stays_what_it_is(config):
    read = [batch["inputs"][:, 0].tolist() for batch in itertools.islice(open_batches(config), 40)]
    assert (read[0], read[-1]) == ([10972, 1722, 21565, 20283], [20746, 21679, 21364, 21115])


@pytest.mark.parametrize("start", [1, 40])
def test_batches_do_not_depend_on_the_number_of_processes(config, start):
    expected, end = read(config, start + 12)
    assert {type(value) for value in end.values()} == {int}
    state, found = None, []
    for count, shares in ((start, 2), (6, 1), (6, 4)):
        batches, state = read(config, count, shares=shares, state=state)
        found += batches
    assert state == end
    for one, other in zip(found, expected, strict=True):
        builders.assert_same(one, other)


@pytest.mark.parametrize("shares", [2, 4, 8])
def test_each_process_reads_its_own_streams(config, monkeypatch, shares):
    submitted: list[pieces.Group] = []
    in_order = encoding.in_order

    def record(submit, groups, *, ahead):
        return in_order(lambda group: submitted.append(group) or submit(group), groups, ahead=ahead)

    def groups_of(share, shares):
        submitted.clear()
        with contextlib.closing(open_batches(config, 8, share=share, shares=shares)) as batches:
            next(batches)
        return set(submitted)

    monkeypatch.setattr(encoding, "in_order", record)
    config = dataclasses.replace(config, batch_tokens=64)
    streams = data.describe(config)["streams"]
    assert streams in (2, 8)  # of three compressed files, or of many groups
    alone = groups_of(0, 1)
    parts = [groups_of(share, shares) for share in range(shares)]
    assert set.union(*parts) == alone
    # Two groups of a stream: of the rows of a batch, and ahead of them.
    assert {len(part) for part in parts} == {2 * max(1, streams // shares)}
    if shares <= streams:
        assert sum(map(len, parts)) == len(alone)


@pytest.mark.parametrize("config", ["parquet"], indirect=True)
def test_batches_do_not_depend_on_workers(config):
    alone, with_workers = open_batches(config), open_batches(dataclasses.replace(config, tokenizer_workers=2))
    for _ in range(60):
        builders.assert_same(next(alone), next(with_workers))
    state = alone.get_state()
    assert state == with_workers.get_state()
    with_workers.set_state(state)
    builders.assert_same(next(alone), next(with_workers))
    with_workers.close()


def test_small_files_share_a_group(tmp_path):
    for number in range(30):
        builders.write_jsonl(tmp_path / f"{number:02}.jsonl", numbered(5, first=1 + 200 * number))
    config = builders.whole("jsonl", str(tmp_path), context_length=512, tokenizer_workers=0)
    assert data.train_dataset(config, vocab_size=50_000).groups_per_epoch == 1
    assert next(open_batches(config, 2))["inputs"].shape == (2, 512)
    found = files.find("data.paths", config.paths)
    groups = pieces.grouped([(file, "jsonl") for file in found], 5000)
    assert [piece.file for group in groups for piece in group] == found
    assert 3 < len(groups) < 10


def test_text_is_tokenized_and_separated(tmp_path):
    texts = ["one é", "", "two", "three"]
    builders.write_parquet(tmp_path / "a.parquet", texts, column="body")
    config = builders.whole(
        "parquet", str(tmp_path), text_columns=("body",), tokenizer_workers=0, packing="documents"
    )
    (tokens,) = epoch_of_tokens(config, vocab_size=256)
    assert tokens.tokens.tobytes().decode("utf-16-le") == "one \xc3\xa9\0two\0three\0"
    assert tokens.lengths.tolist() == [7, 4, 6]
    words = builders.write_words(
        tmp_path / "words.json", {"[UNK]": 0, "two": 5, "three": 70_000, "</s>": 70_001}, ["</s>"]
    )
    for separator, expected in (
        (None, [0, 0, 70_001, 5, 70_001, 70_000, 70_001]),
        (3, [0, 0, 3, 5, 3, 70_000, 3]),
    ):
        changed = dataclasses.replace(config, tokenizer=words, document_separator=separator)
        (tokens,) = epoch_of_tokens(changed, vocab_size=70_002)
        assert tokens.tokens.tolist() == expected


def test_held_out_documents(config, tmp_path):
    config = dataclasses.replace(config, heldout_fraction=0.2)
    heldout = data.HeldoutData(config, vocab_size=50_000)
    chosen = {document[0] for document in map(tuple, heldout.documents)}
    everything = {one[0] for one in all_documents()}
    assert 30 < len(chosen) < 90
    assert all(document[-1] == SEPARATOR for document in heldout.documents)
    trained = set()
    for group in epoch_of_tokens(config):
        trained |= set(group.tokens[np.cumsum(group.lengths) - group.lengths].tolist())
    assert trained == everything - chosen
    assert len(heldout.rows)
    none = dataclasses.replace(config, heldout_fraction=0.0)
    assert data.HeldoutData(none, vocab_size=50_000).documents is None


def test_held_out_documents_are_bounded_and_read_once(config, monkeypatch):
    paths = dataclasses.replace(config, heldout_paths=config.paths, heldout_fraction=0.0)
    everything = list(data.HeldoutData(paths, vocab_size=50_000).documents)
    assert len(everything) == 300
    corpus._read_heldout.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "HELDOUT_TOKENS", 1000)
        some = list(data.HeldoutData(paths, vocab_size=50_000).documents)
    assert 1000 <= sum(map(len, some)) < 1050
    for one, other in zip(some, everything):
        np.testing.assert_array_equal(one, other)
    config = dataclasses.replace(config, shortest_document=30, heldout_fraction=0.3)
    corpus._read_heldout.cache_clear()
    described = data.describe(config)
    for vocab_size in (50_000, 60_000):
        lengths = data.HeldoutData(config, vocab_size=vocab_size).documents.lengths
        assert (len(lengths), sum(lengths)) == (described["heldout_documents"], described["heldout_tokens"])
    assert corpus._read_heldout.cache_info().misses == 1
    # Documents that are too short are left out.
    assert min(lengths) >= 30
    trained = np.concatenate([group.lengths for group in epoch_of_tokens(config)])
    assert len(trained)
    assert trained.min() >= 30


def test_the_description_tells_a_change(config, tmp_path):
    described = data.describe(config)
    assert described == data.describe(dataclasses.replace(config, tokenizer_workers=1))
    assert described["files"] == 3
    assert described["heldout_tokens"] == 0
    count = sum(len(one) + 1 for one in all_documents())
    assert 0.3 * count < described["tokens"] < 3 * count
    # A part of 2,000 bytes of lines or of compressed ids has a few hundred tokens, half a row of which is dropped.
    assert "% are dropped at the ends" in described["tokens_note"]
    other = data.describe(dataclasses.replace(config, document_separator=1))
    assert other["digest"] != described["digest"]
    path = next(tmp_path.glob("c.*"))
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert data.describe(config)["digest"] != described["digest"]


def test_the_number_of_tokens_is_estimated_from_row_groups_of_any_size(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_SAMPLE_BYTES", 1 << 13)
    rng = np.random.default_rng(0)
    texts = [bytes(rng.integers(97, 123, 80, np.uint8)).decode() for _ in range(1000)]
    config = builders.whole("parquet", str(tmp_path), context_length=1000, tokenizer_workers=0)
    for group in (3, 60, 90, 120, 200, 1000):
        builders.write_parquet(tmp_path / "a.parquet", texts, group=group)
        described = data.describe(config)
        assert 40_000 < described["tokens"] < 125_000  # of 81,000
        assert described["tokens_note"].startswith("estimated; about 0.")
        none = data.describe(dataclasses.replace(config, shortest_document=90))
        assert none["tokens"] == 0
        assert "their number is unknown, because the first " in none["tokens_note"]
        assert "of at least data.shortest_document tokens, 90" in none["tokens_note"]
    # Another separator makes other tokens.
    assert data.describe(dataclasses.replace(config, document_separator=1))["digest"] != described["digest"]


def test_mistakes(config, tmp_path):
    for changes, message in (
        ({"document_separator": 50_000}, r"the id after each document is 50000, but"),
        ({"text_columns": ("body",)}, r"has no (column|field) 'body': there are 'id', 'text'"),
        ({"paths": ("none/*.parquet",)}, r"data\.paths: no file matches 'none/\*\.parquet'"),
        ({"heldout_paths": ("none",)}, r"data\.heldout_paths: there is no file or folder 'none'"),
    ):
        open_data = data.HeldoutData if "heldout_paths" in changes else data.train_dataset
        with builders.refused(message):
            open_data(dataclasses.replace(config, **changes), vocab_size=50_000)
    batches = open_batches(dataclasses.replace(config, context_length=8192, batch_tokens=8192))
    with builders.refused(r"no part of the data has the 8193 tokens of a whole row; name"):
        next(batches)
    batches = open_batches(config)
    batches.set_state(dict.fromkeys(batches.get_state(), 100_000))
    with builders.refused(r"saved at row 100000 of a part of the data that now has \d+"):
        next(batches)
    with builders.refused(r"saved at stream 0 of 5 of the data, without stream 0 of"):
        batches.set_state({"stream 0 of 5": 0})
    (tmp_path / "text").mkdir()
    path = builders.write_parquet(tmp_path / "text" / "a.parquet", ["a"])
    with builders.refused(r"data\.tokenizer byte has 256 ids, but model\.vocab_size is 255; raise it to at"):
        data.train_dataset(builders.whole("parquet", path), vocab_size=255)


def test_bad_documents_met_in_training(tmp_path):
    builders.write_jsonl(tmp_path / "a.jsonl", [[1, 2, 3], [4, 500]])
    config = builders.whole("jsonl", str(tmp_path), tokenizer_workers=0)
    batches = open_batches(config, vocab_size=256)
    with builders.refused(r"a\.jsonl \(line at byte 29\) holds id 500, but"):
        next(batches)
    # The next call reads the same batch again. Data that end silently would be taken for the end of a run.
    assert batches.get_state() == {"stream 0 of 1": 0}
    with builders.refused("holds id 500"):
        next(batches)
    batches.close()
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": pa.array([b"good", b"\xff"])}), tmp_path / "a.parquet")
    words = builders.write_words(tmp_path / "words.json", {"[UNK]": 0, "</s>": 1})
    config = dataclasses.replace(config, source="parquet", tokenizer=words)
    with builders.refused(r"a\.parquet \(row 1\) is not UTF-8 at byte 0; leave it out"):
        next(open_batches(config))


def test_an_error_within_a_batch_leaves_the_position_at_its_start(config, monkeypatch):
    expected, _ = read(config, 40)
    _, position = read(config, 30)
    batches, calls, load = open_batches(config), itertools.count(), encoding.Encoder._read

    def fail_once(encoder, piece):
        if next(calls) == 1:  # after the rows of the first stream
            raise ValueError("the network fails")
        return load(encoder, piece)

    monkeypatch.setattr(encoding.Encoder, "_read", fail_once)
    batches.set_state(position)
    with builders.refused("the network fails"):
        next(batches)
    assert batches.get_state() == position
    for batch in expected[30:]:
        builders.assert_same(next(batches), batch)
    batches.close()


def test_memory_that_runs_out(config, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(encoding.Encoder, "_read", fail)
    with builders.refused(r"out of memory while reading .*; set fewer workers"):
        next(open_batches(config))
