"""Tests of reading documents from parquet and JSON lines."""

import gzip
import json
import os
import pathlib
import random
import types

import numpy as np
import pytest

from sympow_jax import config, data
from tests.data import builders

pa = pytest.importorskip("pyarrow")
fsspec = pytest.importorskip("fsspec")
pq = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")
from sympow_jax.data import files  # noqa: E402
from sympow_jax.data.corpus import encoding, jsonl, parquet, pieces  # noqa: E402

FORMATS = ("a.parquet", "a.jsonl", "a.jsonl.gz", "a.jsonl.bz2", "a.ndjson.xz", "a.json.zst")


def texts(count: int = 100) -> list[str | None]:
    rng = random.Random(0)
    documents = ["".join(rng.choices('ab é"\n\\', k=rng.randrange(0, 500))) for _ in range(count)]
    return [None, "", *documents]


ENCODED = [text.encode() for text in texts() if text]


def module(path) -> types.ModuleType:
    return {"parquet": parquet, "jsonl": jsonl}[config.source_of(str(path))]


def write(path: pathlib.Path, documents) -> files.File:
    write = builders.write_parquet if path.suffix == ".parquet" else builders.write_jsonl
    write(path, documents)
    return find(path)


def find(path: pathlib.Path) -> files.File:
    (file,) = files.find("data.paths", [str(path)])
    return file


def cut(file: files.File, text_bytes: int) -> list[pieces.Piece]:
    groups = pieces.grouped([(file, config.source_of(file.path))], text_bytes)
    return [piece for group in groups for piece in group]


def read(file: files.File, text_bytes: int = 2000):
    """Returns the positions and the documents of each piece."""
    reader = module(file.path).Reader("text")
    return [reader.read(piece) for piece in cut(file, text_bytes)]


def documents_of(blocks):
    return [document for _, documents in blocks for document in documents]


def encode(file: files.File, *, is_text: bool) -> encoding.Tokens:
    """Returns the tokens of a file whose first document is or is not text."""
    tokenizer = "byte" if is_text else None
    settings = encoding.Encoding(column="text", tokenizer=tokenizer, separator=None, vocab_size=1 << 20)
    return encoding.Encoder(settings)(cut(file, 2000))


@pytest.fixture
def small_blocks(monkeypatch):
    """Reads few bytes at a time, so that small compressed files have several pieces."""
    monkeypatch.setattr(jsonl, "_BYTES", 100)
    monkeypatch.setattr(jsonl, "_COMPRESSED_BYTES", 100)


@pytest.mark.parametrize("name", FORMATS)
def test_every_document_is_in_one_piece(tmp_path, small_blocks, name):
    file, positions = write(tmp_path / name, texts()), []
    for text_bytes in (100, 2000, 1 << 20):
        blocks = read(file, text_bytes)
        assert documents_of(blocks) == ENCODED
        positions.append([place for places, _ in blocks for place in places])
    # Positions do not depend on how the file is cut.
    assert positions[0] == sorted(set(positions[0])) == positions[1] == positions[2]
    # A piece is equal in any order.
    blocks, parts = read(file), cut(file, 2000)
    # The blocks of bzip2 and zstandard are longer than this file.
    assert sum(bool(documents) for _, documents in blocks) > 5 or name.endswith((".bz2", ".zst"))
    reader = module(name).Reader("text")
    for index in [*reversed(range(len(parts))), 1, 4, 4, 6, 7]:
        assert reader.read(parts[index]) == blocks[index]
    # Token ids.
    ids = [[1, 2, 3], [], None, [70_000], [5, 6]] * 9
    file = write(tmp_path / name, ids)
    assert not module(name).holds_text(file, "text")
    documents = documents_of(read(file, 100))
    assert [document.tolist() for document in documents] == [one for one in ids if one]


def test_row_groups_of_any_size_and_columns_of_any_type(tmp_path):
    path = tmp_path / "a.parquet"
    for group in (1, 10, 1000):
        builders.write_parquet(path, texts(), group=group)
        blocks = read(find(path))
        assert documents_of(blocks) == ENCODED
        assert max(len(documents) for _, documents in blocks) < 60
    array = pa.array(["é", None, "b", "é"], pa.string())
    kinds = (pa.string, pa.large_string, pa.string_view, pa.binary, pa.large_binary, pa.binary_view)
    for column in (array.dictionary_encode(), *(array.cast(kind()) for kind in kinds)):
        pq.write_table(pa.table({"text": column}), path)
        assert parquet.holds_text(find(path), "text")
        assert documents_of(read(find(path))) == ["é".encode(), b"b", "é".encode()]
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    blocks = read(find(path), 100)
    assert len(blocks) > 1
    assert not documents_of(blocks)


def test_frames_of_compressed_files_are_read_as_one(tmp_path):
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts()).encode()
    for name, compress in (("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)):
        (tmp_path / name).write_bytes(compress(content[:5001]) + compress(content[5001:]))
        assert documents_of(read(find(tmp_path / name))) == ENCODED
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # of unknown size
    content = compressor.compress(b'{"text": "a"}\n') + compressor.flush()
    (tmp_path / "a.jsonl.zst").write_bytes(content)
    assert documents_of(read(find(tmp_path / "a.jsonl.zst"))) == [b"a"]


def test_compressed_files_are_read_on_in_turns(tmp_path, small_blocks, monkeypatch):
    opened, open_file = [], files.open_file
    monkeypatch.setattr(files, "open_file", lambda path: opened.append(path) or open_file(path))
    found = [write(tmp_path / f"{name}.jsonl.gz", texts()) for name in "abc"]
    reader = jsonl.Reader("text")
    blocks = [[reader.read(piece) for piece in turn] for turn in zip(*(cut(file, 2000) for file in found))]
    assert len(blocks) > 5
    for one in zip(*blocks):
        assert documents_of(one) == ENCODED
    assert sorted(opened) == [file.path for file in found]


def test_lines_end_in_any_way(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert documents_of(read(find(path), 7)) == [b"a", b"b"]
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n" * 5000 + b'{"text": "a"}\n  \n{"text": "b"}'))
    ((positions, _),) = read(find(tmp_path / "a.jsonl.gz"), 1 << 30)
    assert positions == [5000, 5017]
    path.write_bytes(b'{"text": null}\n\n')
    with builders.refused(r"a\.jsonl has no documents"):
        jsonl.holds_text(find(path), "text")


def test_files_of_other_file_systems(tmp_path):
    memory = fsspec.filesystem("memory")
    builders.write_jsonl(tmp_path / "b.jsonl.gz", ["one", "two"])
    memory.pipe("/corpus/x/b.jsonl.gz", (tmp_path / "b.jsonl.gz").read_bytes())
    builders.write_jsonl(tmp_path / "a.jsonl", ["three"])
    memory.pipe("/corpus/a.jsonl", (tmp_path / "a.jsonl").read_bytes())
    memory.pipe("/corpus/.hidden.jsonl", b"no")
    memory.pipe("/corpus/readme.txt", b"no")
    suffixes = builders.data_config(source="jsonl", paths=("a",)).kind.suffixes
    for path in ("memory:///corpus/**/*.jsonl*", "memory://corpus"):
        found = files.find("data.paths", [path], suffix=suffixes)
        assert [file.key for file in found if "hidden" not in file.key] == ["a.jsonl", "x/b.jsonl.gz"]
    assert [documents_of(read(file)) for file in found] == [[b"three"], [b"one", b"two"]]
    (local,) = files.find("data.paths", [f"file://{tmp_path}/a.jsonl"])
    assert local == find(tmp_path / "a.jsonl")
    # A local file behind a cache is the same file.
    (cached,) = files.find("data.paths", [f"simplecache::file://{tmp_path}/a.jsonl"])
    assert files.location(cached.path) == os.path.realpath(tmp_path / "a.jsonl")
    # A query hides no compression, and a signature makes no other file.
    for path in ("https://a/b.jsonl.gz?download=true", "a?b.jsonl.gz", "https://a/get?file=b.jsonl.gz"):
        assert pieces.compression(path) == ".gz"
    signed, other = (files.location(f"https://a/b.jsonl?sig={x}#{x}") for x in "cd")
    assert signed == other == "https://a/b.jsonl"
    first, second = (files.location(f"https://a/get?file={x}.jsonl") for x in "cd")
    assert first != second


def test_paths_that_name_no_file(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "empty.jsonl").write_bytes(b"")
    for path, message in (
        (f"{tmp_path}/none", r"no \.jsonl, \.ndjson, \.json, \.jsonl\.gz.* file is in"),
        (f"{tmp_path}/empty.jsonl", r"empty\.jsonl is empty; remove it"),
        ("foo://x", r"cannot read data\.paths foo://x: .*foo"),
        ("zip://*.jsonl::a.zip", r"zip://.*: it is in an archive, .* unpack it"),
        ("memory://none.jsonl", r"data\.paths memory://none\.jsonl: there is no such file or folder"),
    ):
        with builders.refused(message):
            data.train_dataset(builders.data_config(source="jsonl", paths=(path,)), vocab_size=256)


LINES = {
    b"{": r"is not JSON",
    b"[" * 100_000: r"is not JSON: maximum recursion",
    b'{"words": "a"}': r"has no field 'text': there are 'words';",
    b'{"text": 3}': r"'text' is of type int; it must be text, or a list of token ids",
    b'{"text": "\\ud800"}': r"not Unicode",
    b'{"text": "\xff"}': r"is not JSON: .* can't decode",
    b'{"text": [1, 2]}': r"holds token ids, but text in the first document",
    b'{"text": [1, "a"]}': r"not all integers",
    b'{"text": [true, 1]}': r"not all integers",
    b'{"text": [18446744073709551617]}': r"has token id 18446744073709551617; ids are from 0 to 2147483647",
    b'{"text": [9223372036854775808, -5]}': r"has token id -5; ids are from 0 to 2147483647",
}


def test_bad_lines(tmp_path):
    for line, message in LINES.items():
        is_text = b'"text": [' not in line or b"[1, 2]" in line
        first = b'{"text": "good"}\n' if is_text else b'{"text": [7]}\n'
        (tmp_path / "a.jsonl").write_bytes(first + line + b"\n")
        with builders.refused(rf"a\.jsonl \(line at byte {len(first)}\).*{message}"):
            encode(find(tmp_path / "a.jsonl"), is_text=is_text)


def test_bad_columns(tmp_path):
    two = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    nested = pa.table({"text": [{"text": "b"}], "text.text": ["c"]})
    holes = pa.array([[1], None, [2, 3], [4, None]], pa.list_(pa.int32()))
    for table, message in (
        (pa.table({"text": [1.5]}), r"column 'text' of .*a\.parquet is of type double; it must hold text"),
        (pa.table({"text": [[1.5]]}), r"of type list<.*double>"),
        (pa.table({"text": [[-1]]}), r"a\.parquet \(row 0\) has token id -1"),
        (pa.table({"text": holes}), r"a\.parquet \(row 3\) has a null"),
        (pa.table({"body": ["a"]}), r"has no column 'text': there are 'body'; name one"),
        (two, r"has several columns 'text': there"),
    ):
        pq.write_table(table, tmp_path / "a.parquet")
        file = find(tmp_path / "a.parquet")
        with builders.refused(message):
            encode(file, is_text=parquet.holds_text(file, "text"))
    pq.write_table(nested, tmp_path / "a.parquet")
    with builders.refused(r"has several columns 'text\.text': there"):
        parquet.holds_text(find(tmp_path / "a.parquet"), "text.text")
    for name in ("b.parquet", "b.jsonl"):
        with builders.refused(r"holds text, but token ids in the first document; all"):
            encode(write(tmp_path / name, ["a"]), is_text=False)


def test_errors_show_a_bounded_part_of_what_is_in_a_file(tmp_path):
    names = [f"column_{number}" for number in range(2000)]
    pq.write_table(pa.table({"text": [dict.fromkeys(names, 1)]}), tmp_path / "struct.parquet")
    pq.write_table(pa.table({name: [1] for name in names}), tmp_path / "wide.parquet")
    (tmp_path / "wide.jsonl").write_text(json.dumps({"k" * 100_000: 1}))
    for name in ("struct.parquet", "wide.parquet", "wide.jsonl"):
        with builders.refused(r"struct<column_0|no column 'text': there|no field") as raised:
            module(name).holds_text(find(tmp_path / name), "text")
        assert len(str(raised.value)) < 600 + len(str(tmp_path))


def test_a_corrupt_row_group_is_named(tmp_path):
    path, rng = tmp_path / "a.parquet", np.random.default_rng(0)
    file = write(path, [rng.bytes(2000).hex() for _ in range(40)])
    content = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(3).column(1).data_page_offset
    content[start : start + 3000] = bytes(3000)
    path.write_bytes(content)
    with builders.refused(r"cannot read .*a\.parquet \(row group 3\): .*; check"):
        read(file, 10_000)
    path.write_bytes(content[:-4000])
    with builders.refused(r"cannot read .*a\.parquet: .*; check the file, or make it again"):
        read(find(path))
    # Checksums of pages are compared.
    table = pa.table({"text": [f"{number:064}" for number in range(100)]})
    pq.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    assert path.read_bytes().count(b"0017") == 1
    path.write_bytes(path.read_bytes().replace(b"0017", b"0018"))
    with builders.refused(r"cannot read .*a\.parquet \(row group 0\): .*; check the file"):
        read(find(path))


@pytest.mark.parametrize("name", FORMATS[2:])
def test_damaged_compressed_files(tmp_path, name):
    file = write(tmp_path / name, texts(1000))
    content = (tmp_path / name).read_bytes()
    half = content[: len(content) // 2]
    (tmp_path / name).write_bytes(half)
    with builders.refused(rf"{name} is truncated: "):
        read(find(tmp_path / name))
    with builders.refused(r"of \d+; it has changed; start again"):
        read(file)
    (tmp_path / name).write_bytes(half + bytes(len(content) - len(half)))
    # gzip has no checksum before the end of the file.
    with builders.refused(name + r"( .line at byte \d+.)? is (corrupt|not JSON|truncated)"):
        read(find(tmp_path / name))


def test_plain_files_that_shrink_or_have_no_lines(tmp_path, small_blocks, monkeypatch):
    file = write(tmp_path / "a.jsonl", texts())
    (tmp_path / "a.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes()[:3000])
    with builders.refused(r"a\.jsonl ends at byte 3000 of \d+; it has changed"):
        read(file)
    monkeypatch.setattr(jsonl, "_MAX_LINE_BYTES", 50_000)
    for name in ("a.jsonl", "a.jsonl.gz"):
        file = write(tmp_path / name, ["a", "b" * 200_000])
        with builders.refused(r"has more than 50000 bytes without the end of a line after"):
            read(file, 100)


def test_no_memory_is_not_a_corrupt_file(tmp_path, monkeypatch):
    def read_no_more(*_, **__):
        raise pa.ArrowMemoryError("malloc of size 1 failed")

    file = write(tmp_path / "a.parquet", ["a"])
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", read_no_more)
    with pytest.raises(MemoryError):
        read(file)
