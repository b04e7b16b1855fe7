"""Tests of each source: what it reads, holds out, records and rejects."""

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
from sympow_jax.data import documents, files
from sympow_jax.data.sources import text, tokens, zarr
from tests.data import builders


def contents(source) -> list[list[int]]:
    return [source.read(i, 0, int(length)).tolist() for i, length in enumerate(source.lengths)]


@pytest.fixture
def corpus(tmp_path):
    """Writes forty files, every tenth of them empty."""
    written = {f"{i:02}.txt": b"" if i % 10 == 9 else f"document {i}".encode() for i in range(40)}
    builders.write_files(tmp_path / "corpus", written)
    return str(tmp_path / "corpus")


def test_text_reads_the_bytes_of_every_nonempty_file(corpus):
    config = builders.data_config(paths=(corpus,))
    train, heldout = (contents(text.Source(config).side(heldout=side)) for side in (False, True))
    assert sorted(bytes(document) for document in train + heldout) == sorted(
        f"document {i}".encode() for i in range(40) if i % 10 != 9
    )
    assert heldout


def test_text_description(corpus):
    config = builders.data_config(paths=(corpus,))
    description = data.describe(config)
    heldout = data.HeldoutData(config, vocab_size=256).documents
    sizes = [os.path.getsize(f"{corpus}/{i:02}.txt") for i in range(40)]
    assert (description["source"], description["paths"], description["files"]) == ("text", [corpus], 36)
    assert description["bytes"] == sum(sizes) == description["tokens"] + description["heldout_tokens"]
    assert (description["heldout_documents"], description["heldout_tokens"]) == (
        len(heldout),
        heldout.lengths.sum(),
    )
    assert description["documents"] == 36 - len(heldout)
    assert data.describe(config) == description
    pathlib.Path(f"{corpus}/00.txt").write_bytes(b"document X")
    assert data.describe(config)["digest"] != description["digest"]


def test_text_by_default_is_the_standard_library():
    root = sysconfig.get_paths()["stdlib"]
    config = builders.data_config()
    sides = [text.Source(config)._spans(heldout=side) for side in (False, True)]
    train, heldout = ({file.key for file, _, _ in side} for side in sides)
    sizes = {file.key: file.size for side in sides for file, _, _ in side}
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= train | heldout
    assert all(key.endswith(".py") and "site-packages" not in key for key in sizes)
    assert all(os.path.getsize(os.path.join(root, key)) == size > 0 for key, size in sizes.items())
    assert 8e6 < sum(sizes.values()) < 64e6
    assert not train & heldout
    # A tenth of N files, within four standard deviations.
    assert abs(len(heldout) - 0.1 * len(sizes)) < 4 * np.sqrt(0.09 * len(sizes))


def test_text_unreadable_file(corpus, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "open_file", refuse)
    with pytest.raises(ValueError, match=r"cannot read .*\.txt: Permission denied"):
        data.train_dataset(builders.data_config(paths=(corpus,)), vocab_size=256)


def test_text_of_empty_files(tmp_path):
    builders.write_files(tmp_path, {"a": b"", "b": b""})
    with pytest.raises(ValueError, match=r"data\.paths: every file is empty \(2 found\)"):
        data.train_dataset(builders.data_config(paths=(str(tmp_path),)), vocab_size=256)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_without_separator(tmp_path, dtype):
    top = np.iinfo(dtype).max if dtype == "uint16" else 2**31 - 2
    documents = [[1, 2, top], [3, 4], [5, 0, 6, 0]]
    for i, document in enumerate(documents):
        builders.write_bin(tmp_path / f"{i}.bin", [document], tokens.DTYPES[dtype])
    config = builders.whole("tokens", str(tmp_path), token_dtype=dtype)
    assert contents(tokens.Source(config).side(heldout=False)) == documents
    assert contents(tokens.Source(config).side(heldout=True)) == []


def test_tokens_with_separator(tmp_path, monkeypatch):
    first = [[1, 2, 0], [0], [3, 0], [4, 5]]
    second = [[6, 0], [7, 8, 9, 0]]
    builders.write_bin(tmp_path / "a.bin", first)
    builders.write_bin(tmp_path / "b.bin", second)
    config = builders.whole("tokens", f"{tmp_path}/*.bin", document_separator=0)
    for scanned in (1, 2, 3, 1 << 24):
        monkeypatch.setattr(tokens, "_SCAN_TOKENS", scanned)
        assert contents(tokens.Source(config).side(heldout=False)) == first + second


def test_tokens_hold_out_a_fraction_of_documents(tmp_path):
    documents = [[i + 1, 0] for i in range(2000)]
    path = builders.write_bin(tmp_path / "a.bin", documents)
    config = builders.data_config(source="tokens", paths=(path,), document_separator=0)
    train, heldout = (contents(tokens.Source(config).side(heldout=side)) for side in (False, True))
    assert sorted(train + heldout) == documents
    assert abs(len(heldout) - 200) < 4 * np.sqrt(2000 * 0.09)
    description = data.describe(config)
    assert (description["documents"], description["heldout_documents"]) == (len(train), len(heldout))
    assert (description["tokens"], description["bytes"], description["files"]) == (2 * len(train), 8000, 1)
    # The seed shuffles; it does not move documents between training and held-out.
    other = builders.data_config(source="tokens", paths=(path,), document_separator=0, seed=1)
    assert contents(tokens.Source(other).side(heldout=True)) == heldout


def test_tokens_heldout_paths(tmp_path):
    train = builders.write_bin(tmp_path / "train.bin", [[1, 2, 3]])
    heldout = builders.write_bin(tmp_path / "held.bin", [[4, 5]])
    config = builders.data_config(source="tokens", paths=(train,), heldout_paths=(heldout,))
    assert contents(tokens.Source(config).side(heldout=False)) == [[1, 2, 3]]
    assert contents(tokens.Source(config).side(heldout=True)) == [[4, 5]]
    assert data.describe(config)["files"] == 2


def test_tokens_are_mapped_not_read(tmp_path):
    path = tmp_path / "sparse.bin"
    with path.open("wb") as stream:
        stream.truncate(1 << 36)  # 64 GiB of holes
    config = builders.whole("tokens", str(path))
    row = data.train_dataset(config, vocab_size=256)[123]
    assert row["inputs"].tolist() == [0] * 8


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (b"", {}, r"a\.bin has 0 bytes; it must hold uint16 ids of 2 bytes"),
        (b"\1\0\2", {}, r"a\.bin has 3 bytes; .* it is empty or truncated"),
        (b"\1\0\2\0\3\0", {"token_dtype": "uint32"}, r"has 6 bytes; it must hold uint32 ids of 4"),
        (b"\1\0\2\0", {"document_separator": 7}, "no file holds the data.document_separator 7; correct it"),
        (b"\1\0\2\0", {"document_separator": 70_000}, "no file holds the data.document_separator 70000"),
    ],
)
def test_bad_bin(tmp_path, content, changes, message):
    builders.write_files(tmp_path, {"a.bin": content})
    config = builders.data_config(source="tokens", paths=(str(tmp_path / "a.bin"),), **changes)
    with pytest.raises(ValueError, match=message) as raised:
        data.train_dataset(config, vocab_size=256)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"token_dtype": "uint32", "documents": 1}', "hold 'uint32' ids, but data.token_dtype is 'uint16';"),
        ('{"token_dtype": "uint16"}', "are not complete; repeat `sympow prepare`"),
        ("[" * 1000 + "]" * 1000, "it has no JSON object"),
        ('{"documents": 1}', "hold None ids, but"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_recorded_next_to_tokens(tmp_path, content, message):
    path = builders.write_bin(tmp_path / "a.bin", [[1, 2]])
    builders.write_files(tmp_path, {tokens.METADATA: content.encode()})
    with pytest.raises(ValueError, match=message) as raised:
        data.train_dataset(builders.data_config(source="tokens", paths=(path,)), vocab_size=256)
    assert str(tmp_path / tokens.METADATA) in str(raised.value)


def test_more_token_files_than_are_mapped_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "_MAPPED", 2)
    documents = [[i, i + 1, 0] for i in range(1, 8)]
    for i, document in enumerate(documents):
        builders.write_bin(tmp_path / f"{i}.bin", [document])
    config = builders.whole("tokens", str(tmp_path), document_separator=0)
    source = tokens.Source(config).side(heldout=False)
    assert contents(source) == contents(source) == documents


def test_more_documents_than_memory_holds(tmp_path, monkeypatch):
    paths = tuple(builders.write_bin(tmp_path / f"{i}.bin", [[1, 0]] * 5 + [[2]]) for i in range(2))
    config = builders.data_config(source="tokens", paths=paths, document_separator=0)
    for limit, scanned, fails in ((12, 4, False), (11, 4, True), (11, 1 << 24, True), (5, 4, True)):
        monkeypatch.setattr(documents, "MAX_DOCUMENTS", limit)
        monkeypatch.setattr(tokens, "_SCAN_TOKENS", scanned)
        if fails:
            with pytest.raises(ValueError, match=rf"there are more than {limit} documents up to .*\d\.bin,"):
                tokens.Source(config).side(heldout=False)
        else:
            tokens.Source(config).side(heldout=False)


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


def test_longcrawl64_of_zeros_after_some_rows(tmp_path):
    values = zarr_values(rows=8, row_tokens=64)
    values[5] = 0
    path = builders.write_zarr(tmp_path / "a.zarr", values, chunks=(8, 16))
    config = builders.whole("longcrawl64", path, context_length=64, document_separator=0)
    for task in (config_lib.TaskConfig(), config_lib.TaskConfig(name="masked_token")):
        (line,) = failures(data.train_dataset(config, task=task, vocab_size=50_304), 8)
        assert "a.zarr (row 5) has only id 0 in the 64 tokens of row 5" in line
    held_out = dataclasses.replace(config, heldout_paths=(path,))
    opened = data.HeldoutData(held_out, vocab_size=50_304).documents
    assert opened[4].tolist() == [0, *values[4]]
    with pytest.raises(ValueError, match=r"a\.zarr \(row 5\) has only id 0 in all of its 64 tokens; the"):
        opened[5]


def zarr_values(rows=20, row_tokens=32, dtype="<u2"):
    return np.random.default_rng(0).integers(1, 500, (rows, row_tokens)).astype(dtype)


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
    opened = data.HeldoutData(config, vocab_size=50_304).documents
    assert opened.lengths.tolist() == [33, 33, 33]
    np.testing.assert_array_equal(
        np.stack(list(opened)), np.insert(values[:3].astype(int) + 1, 0, 50_256, axis=1)
    )
    description = data.describe(config)
    assert (description["files"], description["documents"], description["heldout_documents"]) == (2, 20, 3)
    assert description["bytes"] == 23 * 32 * values.itemsize


def test_longcrawl64_reads_band_by_band(tmp_path):
    path = builders.write_zarr(tmp_path / "a.zarr", zarr_values(rows=64), chunks=(8, 16))
    config = builders.whole("longcrawl64", path)
    dataset = data.train_dataset(config, vocab_size=50_304)
    values = {tuple(row): i for i, row in enumerate(zarr_values(rows=64).reshape(-1, 8).tolist())}
    sequence = [values[tuple(dataset[i]["targets"].tolist())] for i in range(256)]
    assert sorted(sequence) == list(range(256))
    bands = [{row // 32 for row in sequence[start : start + 32]} for start in range(0, 256, 32)]
    assert all(len(band) == 1 for band in bands)


def test_longcrawl64_holds_out_a_fraction_of_rows(tmp_path):
    values = zarr_values(rows=500)
    path = builders.write_zarr(tmp_path / "a.zarr", values)
    config = builders.data_config(source="longcrawl64", paths=(f"file://{path}",))
    train, heldout = (contents(zarr.Source(config).side(heldout=side)) for side in (False, True))
    assert sorted(train + heldout) == sorted(values.tolist())
    mask = files.held_out([""], np.arange(500), 0.1)
    assert heldout == values[mask].tolist()


def test_longcrawl64_lead_id_may_be_set(tmp_path):
    path = builders.write_zarr(tmp_path / "a.zarr", zarr_values() % 256)
    config = builders.data_config(source="longcrawl64", paths=(path,), document_separator=0)
    assert data.train_dataset(config, vocab_size=256)[0]["inputs"][0] == 0
    with pytest.raises(ValueError, match=r"the first id of every row is 50256, but model.vocab_size is"):
        data.train_dataset(builders.data_config(source="longcrawl64", paths=(path,)), vocab_size=256)


def test_longcrawl64_urls():
    assert zarr.spec("gs://bucket/train.zarr")["kvstore"] == "gs://bucket/train.zarr/"
    assert zarr.spec("/data/train.zarr")["kvstore"] == {"driver": "file", "path": "/data/train.zarr/"}


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Returns a folder and its address on a web server, which TensorStore treats as an object store."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = functools.partial(_QuietHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_longcrawl64_in_an_object_store(served):
    folder, url = served
    values = zarr_values()
    path = builders.write_zarr(folder / "a.zarr", values, chunks=(8, 16))
    config = builders.whole("longcrawl64", f"{url}/a.zarr", context_length=32)
    opened = zarr.Source(config).side(heldout=False)
    assert contents(opened) == values.tolist()
    os.remove(f"{path}/1.1")
    with pytest.raises(ValueError, match=r"\(row 9\) cannot be read: .*1\.1.* is missing; copy or prepare"):
        zarr.Source(config).side(heldout=False).read(9, 0, 32)


def test_missing_chunk_is_an_error_and_not_zeros(tmp_path):
    path = builders.write_zarr(tmp_path / "a.zarr", zarr_values(), chunks=(8, 16))
    os.remove(f"{path}/1.1")
    config = builders.whole("longcrawl64", path, context_length=32)
    failed = failures(data.train_dataset(config, vocab_size=50_304), 20)
    assert len(failed) == 8
    assert all("(row " in line and "1.1" in line and "is missing; copy" in line for line in failed)
    held_out = dataclasses.replace(config, heldout_paths=(path,))
    heldout = data.HeldoutData(held_out, vocab_size=50_304).documents
    assert heldout[7].shape == (33,)
    with pytest.raises(ValueError, match=r"\(row 8\) cannot be read: .*1\.1.* is missing; copy or prepare"):
        heldout[8]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros(16, "<u2"), r"has shape \(16,\) and holds uint16; it must be \(documents, tokens\)"),
        (np.zeros((2, 3, 4), "<u2"), r"has shape \(2, 3, 4\) and"),
        (np.zeros((4, 8), "<i4"), r"holds int32; it must be .* of data\.token_dtype uint16"),
        (np.zeros((4, 8), "<f4"), r"holds float32; it"),
        (np.zeros((4, 8), "<u4"), r"holds uint32; it"),
    ],
)
def test_zarr_of_the_wrong_shape_or_type(tmp_path, values, message):
    path = str(tmp_path / "a.zarr")
    metadata = zarr.metadata(4, 8, values.dtype) | {"shape": values.shape, "chunks": values.shape}
    tensorstore.open({**zarr.spec(path), "metadata": metadata}, create=True).result()
    with pytest.raises(ValueError, match=message):
        data.train_dataset(builders.data_config(source="longcrawl64", paths=(path,)), vocab_size=50_304)


def test_missing_zarr_array(tmp_path):
    for paths, message in (
        ((str(tmp_path / "none.zarr"),), r"data\.paths: cannot open .*none\.zarr as a Zarr v2 array:"),
        (("a.zarr", "b.zarr"), r"data\.paths has 2 entries; longcrawl64 reads one Zarr array"),
        (("nosuch://a/b",), r"data\.paths: cannot open nosuch://a/b as a Zarr v2 array"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            data.train_dataset(builders.data_config(source="longcrawl64", paths=paths), vocab_size=50_304)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 400


def test_layout_is_longcrawl64s():
    assert zarr.metadata(6_609_334, zarr.ROW_TOKENS, np.dtype("<u2")) == {
        "shape": [6_609_334, 65_536],
        "chunks": [2048, 2048],
        "dtype": "<u2",
        "order": "C",
        "fill_value": 0,
        "filters": None,
        "dimension_separator": ".",
        "compressor": {"id": "gzip", "level": 1},
    }


# The compressor of the published arrays.
BLOSC = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}


def _damage(folder, values, content: bytes) -> str:
    """Replaces the only chunk of an array; returns "right" or "wrong" as it is read, or the error."""
    pathlib.Path(folder, "0.0").write_bytes(content)
    config = builders.whole("longcrawl64", str(folder))
    opened = zarr.Source(config).side(heldout=False)
    try:
        return "right" if contents(opened) == values.tolist() else "wrong"
    except ValueError as error:
        return str(error)


def test_flipped_bits_of_prepared_chunks_are_found(tmp_path):
    values = zarr_values(rows=64, row_tokens=256)
    path = builders.write_zarr(tmp_path / "a.zarr", values, chunks=(64, 256))
    good, random = pathlib.Path(path, "0.0").read_bytes(), np.random.default_rng(0)
    starts = [*range(20), *random.integers(20, len(good), 180)]  # of gzip's header, and of what follows
    for start in starts:
        bad = bytearray(good)
        bad[start] ^= 1 << random.integers(8)
        result = _damage(path, values, bytes(bad))
        # Of the header, a few bits mean nothing.
        assert result == "right" if start in range(4, 10) else "cannot be read" in result, (start, result)
        assert "\n" not in result
        assert len(result) < 400


def test_text_digest_is_of_names_sizes_and_contents(tmp_path):
    builders.write_files(tmp_path, {"a": b"one", "b": b"three"})
    config = builders.data_config(paths=(str(tmp_path),), heldout_fraction=0.0)
    assert data.describe(config)["digest"] == hashlib.sha256(b"a\x003\0oneb\x005\0three").hexdigest()


def test_a_digest_notices_contents_of_the_same_size(tmp_path):
    array = np.arange(1, 1 + 4096 * 8, dtype=np.uint16).reshape(-1, 8)
    content = np.zeros(3 << 20, np.uint16)  # 6 MiB, whose ends are equal

    def described(value):
        array[2000:3000], content[1 << 20 : 2 << 20] = value, value
        builders.write_bin(tmp_path / "a.bin", [content])
        zarr = builders.write_zarr(tmp_path / f"{value}.zarr", array, chunks=(64, 8))
        paths = {"tokens": str(tmp_path / "a.bin"), "longcrawl64": zarr}
        configs = (builders.data_config(source=source, paths=(path,)) for source, path in paths.items())
        return {config.source: data.describe(config)["digest"] for config in configs}

    one, other = described(7), described(8)
    assert all(one[source] != other[source] for source in one)


def test_short_documents_are_left_out_of_every_source(tmp_path, corpus):
    config = builders.data_config(paths=(corpus,), shortest_document=len("document 10"))
    both = [contents(text.Source(config).side(heldout=side)) for side in (False, True)]
    assert {bytes(one) for one in both[0] + both[1]} == {
        f"document {i}".encode() for i in range(10, 39) if i % 10 != 9
    }
    assert data.describe(config)["documents"] == len(both[0])
    path = builders.write_bin(tmp_path / "a.bin", [[*range(1, length), 0] for length in range(1, 20)])
    config = builders.whole("tokens", path, document_separator=0, shortest_document=10)
    assert tokens.Source(config).side(heldout=False).lengths.tolist() == list(range(10, 20))
    array = builders.write_zarr(tmp_path / "a.zarr", np.ones((3, 8), np.uint16))
    config = builders.data_config(source="longcrawl64", paths=(array,), shortest_document=9)
    with pytest.raises(ValueError, match=r"the 9 tokens of data\.shortest_document"):
        zarr.Source(config).side(heldout=False)
