"""Tests of text, token files and Zarr arrays: what each reads, holds out, records and rejects."""

import dataclasses
import functools
import hashlib
import http.server
import os
import pathlib
import sysconfig
import threading

import numpy as np
import pytest
import tensorstore

from sympow_jax import config as config_lib
from sympow_jax import data
from sympow_jax.data import documents, files, sources
from sympow_jax.data.sources import tokens, zarr
from tests.data import builders

BOTH = (False, True)  # sides, by whether they are held out


def sides(config) -> list[list[list[int]]]:
    return [builders.contents(config, heldout=heldout) for heldout in BOTH]


def zarr_values(rows=20, row_tokens=32, dtype="<u2"):
    return np.random.default_rng(0).integers(1, 500, (rows, row_tokens)).astype(dtype)


@pytest.fixture
def array(tmp_path):
    """Writes an array in small chunks, and returns its path."""
    return builders.write_zarr(tmp_path / "a.zarr", zarr_values(), chunks=(8, 16))


def test_text_is_the_bytes_of_every_nonempty_file(tmp_path):
    written = {f"{i:02}.txt": b"" if i % 10 == 9 else f"document {i}".encode() for i in range(40)}
    builders.write_files(tmp_path, written)
    config = builders.data_config(paths=(str(tmp_path),))
    train, heldout = sides(config)
    assert heldout
    assert sorted(map(bytes, train + heldout)) == sorted(filter(None, written.values()))
    description = data.describe(config)
    assert description["source"] == "text"
    assert description["bytes"] == sum(map(len, written.values()))
    counts = ("files", "documents", "tokens", "heldout_documents", "heldout_tokens")
    assert [description[name] for name in counts] == [
        36,
        *(count for side in (train, heldout) for count in (len(side), sum(map(len, side)))),
    ]
    long = sides(dataclasses.replace(config, shortest_document=len("document 10")))
    assert sorted(map(bytes, long[0] + long[1])) == sorted(x for x in written.values() if len(x) == 11)
    builders.write_files(tmp_path / "b", {"a": b"one", "b": b"three"})
    config = builders.whole("text", str(tmp_path / "b"))
    assert data.describe(config)["digest"] == hashlib.sha256(b"a\x003\0oneb\x005\0three").hexdigest()


def test_text_by_default_is_the_standard_library():
    root = sysconfig.get_paths()["stdlib"]
    found = [sources.open_source(builders.data_config()).parts(heldout=side) for side in BOTH]
    train, heldout = ({file.key for file, _, _ in side} for side in found)
    sizes = {file.key: file.size for side in found for file, _, _ in side}
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= train | heldout
    assert all(key.endswith(".py") and "site-packages" not in key for key in sizes)
    assert all(os.path.getsize(os.path.join(root, key)) == size > 0 for key, size in sizes.items())
    assert not train & heldout
    # A tenth of N files, within four standard deviations.
    assert abs(len(heldout) - 0.1 * len(sizes)) < 4 * np.sqrt(0.09 * len(sizes))
    # The quickstart evaluates up to 4,096 and wants 20 documents.
    config = builders.data_config(context_length=256)
    opened = data.HeldoutData(config, vocab_size=256).documents
    assert (opened.lengths > 4096).sum() >= 20
    batches = data.train_dataset(config, vocab_size=256).batches(16)
    batches.set_state({"next_index": 1000})
    batch = next(batches)
    assert batch["inputs"].shape == (16, 256)
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_without_separator(tmp_path, dtype):
    top = np.iinfo(dtype).max if dtype == "uint16" else 2**31 - 2
    written = [[1, 2, top], [3, 4], [5, 0, 6, 0]]
    for i, document in enumerate(written):
        builders.write_bin(tmp_path / f"{i}.bin", [document], tokens.DTYPES[dtype])
    config = builders.whole("tokens", str(tmp_path), token_dtype=dtype)
    assert sides(config) == [written, []]
    held = dataclasses.replace(config, paths=(f"{tmp_path}/0.bin",), heldout_paths=(f"{tmp_path}/[12].bin",))
    assert sides(held) == [written[:1], written[1:]]
    assert data.describe(held)["files"] == 3


def test_tokens_with_separator(tmp_path, monkeypatch):
    written = [[[1, 2, 0], [0], [3, 0], [4, 5]], [[6, 0], [7, 8, 9, 0]], [[10, 11, 0]]]
    for name, part in zip("abc", written):
        builders.write_bin(tmp_path / f"{name}.bin", part)
    config = builders.whole("tokens", f"{tmp_path}/*.bin", document_separator=0)
    expected = [document for part in written for document in part]
    for scanned, mapped in ((1, 2), (2, 1), (3, 9), (1 << 24, 9)):
        monkeypatch.setattr(tokens, "_SCAN_TOKENS", scanned)
        monkeypatch.setattr(tokens, "_MAPPED", mapped)
        assert builders.contents(config) == expected
    long = dataclasses.replace(config, shortest_document=3)
    assert builders.contents(long) == [document for document in expected if len(document) >= 3]


def test_tokens_hold_out_a_fraction_of_documents(tmp_path):
    written = [[i + 1, 0] for i in range(2000)]
    path = builders.write_bin(tmp_path / "a.bin", written)
    config = builders.data_config(source="tokens", paths=(path,), document_separator=0)
    train, heldout = sides(config)
    assert sorted(train + heldout) == written
    assert heldout == [x for x, out in zip(written, files.held_out(["a.bin"], np.arange(2000), 0.1)) if out]
    description = data.describe(config)
    assert (description["documents"], description["heldout_documents"]) == (len(train), len(heldout))
    assert (description["tokens"], description["bytes"], description["files"]) == (2 * len(train), 8000, 1)
    # The seed shuffles; it does not move documents between training and held-out.
    assert builders.contents(dataclasses.replace(config, seed=1), heldout=True) == heldout


def test_tokens_are_mapped_not_read(tmp_path):
    path = tmp_path / "sparse.bin"
    with path.open("wb") as stream:
        stream.truncate(1 << 36)  # 64 GiB of holes
    row = data.train_dataset(builders.whole("tokens", str(path)), vocab_size=256)[123]
    assert row["inputs"].tolist() == [0] * 8


def test_more_documents_than_memory_holds(tmp_path, monkeypatch):
    paths = tuple(builders.write_bin(tmp_path / f"{i}.bin", [[1, 0]] * 5 + [[2]]) for i in range(2))
    config = builders.data_config(source="tokens", paths=paths, document_separator=0)
    for limit, scanned in ((12, 4), (11, 4), (11, 1 << 24), (5, 4)):
        monkeypatch.setattr(documents, "MAX_DOCUMENTS", limit)
        monkeypatch.setattr(tokens, "_SCAN_TOKENS", scanned)
        if limit < 12:
            with builders.refused(rf"there are more than {limit} documents up to .*\d\.bin,"):
                builders.contents(config)
        else:
            builders.contents(config)


def failures(dataset, count: int) -> list[str]:
    """Returns the errors of the first rows that cannot be read."""
    failed = []
    for i in range(count):
        try:
            dataset[i]
        except ValueError as error:
            failed.append(str(error))
    assert not any("\n" in line for line in failed)
    return sorted(failed)


def test_a_row_of_one_id_is_no_data(tmp_path):
    stored = np.arange(1, 641) % 7
    stored[120:320] = 5  # all of rows 2, 3 and 4, and parts of rows 1 and 5
    path = builders.write_bin(tmp_path / "a.bin", [stored])
    config = builders.whole("tokens", path, context_length=64, packing="documents")
    assert failures(data.train_dataset(config, vocab_size=256), 10) == [
        f"{path} (document at token 0) has only id 5 in the 64 tokens of row {row}, which begins at its token "
        f"{64 * row}; the data was not copied in full, or the file is damaged: copy or prepare it again"
        for row in (2, 3, 4)
    ]
    short = builders.whole("tokens", path, context_length=32)
    assert not failures(data.train_dataset(short, vocab_size=256), 20)
    values = zarr_values(rows=8, row_tokens=64)
    values[5] = 0
    path = builders.write_zarr(tmp_path / "a.zarr", values, chunks=(8, 16))
    config = builders.whole("longcrawl64", path, context_length=64, document_separator=0)
    for task in (config_lib.TaskConfig(), config_lib.TaskConfig(name="masked_token")):
        (line,) = failures(data.train_dataset(config, task=task, vocab_size=50_304), 8)
        assert "a.zarr (row 5) has only id 0 in the 64 tokens of row 5" in line
    opened = data.HeldoutData(dataclasses.replace(config, heldout_paths=(path,)), vocab_size=50_304).documents
    assert opened[4].tolist() == [0, *values[4]]
    with builders.refused(r"a\.zarr \(row 5\) has only id 0 in all of its 64 tokens; the"):
        opened[5]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_longcrawl64_reads_rows_after_the_lead_id(tmp_path, dtype):
    values = zarr_values(dtype=tokens.DTYPES[dtype])
    path = builders.write_zarr(tmp_path / "a.zarr", values, chunks=(8, 16))
    heldout = builders.write_zarr(tmp_path / "b.zarr", values[:3] + 1, chunks=(8, 16))
    config = builders.data_config(
        source="longcrawl64", paths=(path,), heldout_paths=(heldout,), context_length=16, token_dtype=dtype
    )
    dataset = data.train_dataset(config, vocab_size=50_304)
    read = [dataset[i] for i in range(40)]
    assert sorted(row["targets"].tolist() for row in read) == sorted(values.reshape(40, 16).tolist())
    for row in read:
        assert row["inputs"].tolist() == [50_256, *row["targets"][:-1]]
    # Band after band of chunks: rows 0 to 7, 8 to 15, or 16 to 19 of the array.
    numbers = {tuple(row): i for i, row in enumerate(values.reshape(40, 16).tolist())}
    bands = [numbers[tuple(row["targets"].tolist())] // 16 for row in read]
    assert len([band for band, before in zip(bands, [None, *bands]) if band != before]) == 3
    opened = data.HeldoutData(config, vocab_size=50_304).documents
    assert opened.lengths.tolist() == [33, 33, 33]
    expected = np.insert(values[:3].astype(int) + 1, 0, 50_256, axis=1)
    np.testing.assert_array_equal(np.stack(list(opened)), expected)
    description = data.describe(config)
    assert (description["files"], description["documents"], description["heldout_documents"]) == (2, 20, 3)
    assert description["bytes"] == 23 * 32 * values.itemsize
    led = dataclasses.replace(config, document_separator=7)
    assert data.train_dataset(led, vocab_size=512)[0]["inputs"][0] == 7
    with builders.refused(r"the first id of every row is 50256, but model.vocab_size is 512"):
        data.train_dataset(config, vocab_size=512)


def test_longcrawl64_holds_out_a_fraction_of_rows(tmp_path):
    values = zarr_values(rows=500)
    path = builders.write_zarr(tmp_path / "a.zarr", values)
    train, heldout = sides(builders.data_config(source="longcrawl64", paths=(f"file://{path}",)))
    assert sorted(train + heldout) == sorted(values.tolist())
    assert heldout == values[files.held_out([""], np.arange(500), 0.1)].tolist()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_longcrawl64_in_an_object_store(array, tmp_path, monkeypatch):
    """TensorStore treats a web server as one."""
    assert zarr.spec("gs://bucket/train.zarr")["kvstore"] == "gs://bucket/train.zarr/"
    assert zarr.spec("/data/train.zarr")["kvstore"] == {"driver": "file", "path": "/data/train.zarr/"}
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = functools.partial(_QuietHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/a.zarr"
        assert builders.contents(builders.whole("longcrawl64", url)) == zarr_values().tolist()
        server.shutdown()
        thread.join()


def test_missing_chunk_is_an_error_and_not_zeros(array):
    os.remove(f"{array}/1.1")
    config = builders.whole("longcrawl64", array, context_length=32)
    failed = failures(data.train_dataset(config, vocab_size=50_304), 20)
    assert len(failed) == 8
    assert all("(row " in line and "1.1" in line and "is missing; copy" in line for line in failed)
    held_out = dataclasses.replace(config, heldout_paths=(array,))
    heldout = data.HeldoutData(held_out, vocab_size=50_304).documents
    assert heldout[7].shape == (33,)
    with builders.refused(r"\(row 8\) cannot be read: .*1\.1.* is missing; copy or prepare"):
        heldout[8]


def test_layout_is_longcrawl64s():
    layout = {"dtype": "<u2", "order": "C", "fill_value": 0, "filters": None, "dimension_separator": "."}
    layout |= {"shape": [6_609_334, 65_536], "chunks": [2048, 2048], "compressor": {"id": "gzip", "level": 1}}
    assert zarr.metadata(6_609_334, zarr.ROW_TOKENS, np.dtype("<u2")) == layout


def test_flipped_bits_of_prepared_chunks_are_found(tmp_path):
    values = zarr_values(rows=64, row_tokens=256)
    path = builders.write_zarr(tmp_path / "a.zarr", values, chunks=(64, 256))
    good, random = pathlib.Path(path, "0.0").read_bytes(), np.random.default_rng(0)
    config = builders.whole("longcrawl64", path)
    for start in (*range(20), *random.integers(20, len(good), 60)):  # gzip's header, and what follows
        bad = bytearray(good)
        bad[start] ^= 1 << random.integers(8)
        pathlib.Path(path, "0.0").write_bytes(bad)
        if start in range(4, 10):  # a few bits that mean nothing
            assert builders.contents(config) == values.tolist()
        else:
            with builders.refused("cannot be read") as raised:
                builders.contents(config)
            assert len(str(raised.value)) < 400


def test_a_digest_notices_contents_of_the_same_size(tmp_path):
    array = np.arange(1, 1 + 4096 * 8, dtype=np.uint16).reshape(-1, 8)
    content = np.zeros(3 << 20, np.uint16)  # 6 MiB, whose ends are equal

    def described(value):
        array[2000:3000], content[1 << 20 : 2 << 20] = value, value
        paths = {
            "tokens": builders.write_bin(tmp_path / "a.bin", [content]),
            "longcrawl64": builders.write_zarr(tmp_path / f"{value}.zarr", array, chunks=(64, 8)),
        }
        configs = (builders.data_config(source=source, paths=(path,)) for source, path in paths.items())
        return {config.source: data.describe(config)["digest"] for config in configs}

    one, other = described(7), described(8)
    assert all(one[source] != other[source] for source in one)


RECORD = tokens.METADATA
TWO = {"a.bin": b"\1\0\2\0"}


@pytest.mark.parametrize(
    ("written", "changes", "message"),
    [
        ({"a": b"", "b": b""}, {"source": "text"}, r"data\.paths: every file is empty \(2 found\)"),
        ({"a.bin": b""}, {}, r"a\.bin has 0 bytes; it must hold uint16 ids of 2 bytes"),
        ({"a.bin": b"\1\0\2"}, {}, r"a\.bin has 3 bytes; .* it is empty or truncated"),
        ({"a.bin": b"\1\0\2\0\3\0"}, {"token_dtype": "uint32"}, r"has 6 bytes; it must hold uint32 ids of 4"),
        (TWO, {"document_separator": 70_000}, r"no file holds the data\.document_separator 70000; correct"),
        (TWO | {RECORD: b'{"token_dtype": "uint32", "documents": 1}'}, {}, r"hold 'uint32' ids, but data\."),
        (TWO | {RECORD: b'{"token_dtype": "uint16"}'}, {}, r"are not complete; repeat `sympow prepare`"),
        (TWO | {RECORD: b"[" * 1000 + b"]" * 1000}, {}, rf"{RECORD}: it has no JSON object"),
        (TWO | {RECORD: b'{"documents": 1}'}, {}, "hold None ids, but"),
        (TWO | {RECORD: b"{}"}, {"paths": ("*",)}, f"{RECORD} is the record of `sympow prepare`"),
    ],
)
def test_bad_files(tmp_path, monkeypatch, written, changes, message):
    builders.write_files(tmp_path, written)
    monkeypatch.chdir(tmp_path)
    with builders.refused(message):
        data.train_dataset(
            builders.data_config(**{"source": "tokens", "paths": (str(tmp_path),)} | changes), vocab_size=256
        )


def test_bad_arrays(tmp_path):
    for number, (values, message) in enumerate(
        (
            (np.zeros(16, "<u2"), r"has shape \(16,\) and holds uint16; it must be \(documents, tokens\)"),
            (np.zeros((2, 3, 4), "<u2"), r"has shape \(2, 3, 4\) and"),
            (np.zeros((4, 8), "<i4"), r"holds int32; it must be .* of data\.token_dtype uint16"),
            (np.zeros((4, 8), "<u4"), r"holds uint32; it"),
            (np.zeros((3, 7), "<u2"), r"the 8 tokens of data\.shortest_document"),
        )
    ):
        path = str(tmp_path / f"{number}.zarr")
        metadata = zarr.metadata(4, 8, values.dtype) | {"shape": values.shape, "chunks": values.shape}
        tensorstore.open({**zarr.spec(path), "metadata": metadata}, create=True).result()
        with builders.refused(message):
            builders.contents(builders.whole("longcrawl64", path, shortest_document=8))
    for paths, message in (
        ((str(tmp_path / "none.zarr"),), r"data\.paths: cannot open .*none\.zarr as a Zarr v2 array:"),
        (("a.zarr", "b.zarr"), r"data\.paths has 2 entries; longcrawl64 reads one Zarr array"),
        (("nosuch://a/b",), r"data\.paths: cannot open nosuch://a/b as a Zarr v2 array"),
    ):
        with builders.refused(message) as raised:
            builders.contents(builders.data_config(source="longcrawl64", paths=paths))
        assert len(str(raised.value)) < 400
