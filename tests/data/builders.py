"""Small data of every kind on disk, configs that read it, and what is read."""

import bz2
import contextlib
import gzip
import json
import lzma
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorstore

from sympow_jax import config
from sympow_jax.data import sources
from sympow_jax.data.sources import zarr


def data_config(**changes) -> config.DataConfig:
    """Returns a config of rows of 8 tokens, two per batch."""
    settings = {"context_length": 8, "batch_tokens": 2 * changes.get("context_length", 8), **changes}
    return config.DataConfig(**settings)


def whole(source: str, path: str, **changes) -> config.DataConfig:
    """Returns a config that trains on all of the data at a path."""
    return data_config(source=source, paths=(path,), heldout_fraction=0.0, **changes)


def contents(config: config.DataConfig, *, heldout: bool = False) -> list[list[int]]:
    """Returns the documents of one side of the data."""
    documents = sources.open_source(config).side(heldout=heldout)
    return [documents.read(i, 0, int(length)).tolist() for i, length in enumerate(documents.lengths)]


@contextlib.contextmanager
def refused(message: str) -> Iterator[pytest.ExceptionInfo]:
    """Asserts that a block raises a ValueError of one line that matches a pattern."""
    with pytest.raises(ValueError, match=message) as raised:
        yield raised
    assert "\n" not in str(raised.value)


def write_files(folder: pathlib.Path, contents: dict[str, bytes]) -> None:
    """Writes files by their names relative to the folder."""
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_bin(path: pathlib.Path, documents: Sequence[Sequence[int]], dtype: str = "<u2") -> str:
    """Writes the documents one after the other."""
    np.concatenate([np.asarray(document, dtype) for document in documents]).tofile(path)
    return str(path)


def write_zarr(
    path: pathlib.Path,
    values: np.ndarray,
    *,
    chunks: Sequence[int] | None = None,
    compressor: dict[str, Any] | None = None,
) -> str:
    """Writes an array in LongCrawl64's layout, in smaller chunks and with another compressor if given."""
    rows, row_tokens = values.shape
    metadata = zarr.metadata(rows, row_tokens, values.dtype)
    if compressor is not None:
        metadata["compressor"] = compressor
    if chunks is not None:
        metadata["chunks"] = list(chunks)
    spec = {**zarr.spec(str(path)), "metadata": metadata, "store_data_equal_to_fill_value": True}
    tensorstore.open(spec, create=True).result().write(values).result()
    return str(path)


def write_words(path: pathlib.Path, vocabulary: dict[str, int], special: Sequence[str] = ()) -> str:
    """Writes a `tokenizers` file of whole words; skips the test if that package is not installed."""
    tokenizers = pytest.importorskip("tokenizers")
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.add_special_tokens(list(special))
    built.save(str(path))
    return str(path)


def write_byte_fallback(path: pathlib.Path, *, begin: str | None = "<s>") -> str:
    """Writes a `tokenizers` file like those of Llama 2 and Mistral, without merges; `begin` precedes every text."""
    tokenizers = pytest.importorskip("tokenizers")
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefgh"]
    model = tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True)
    built = tokenizers.Tokenizer(model)
    built.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    decoders = tokenizers.decoders
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    built.add_special_tokens(names[:3])
    if begin is not None:
        built.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, names.index(begin))]
        )
    built.save(str(path))
    return str(path)


def write_parquet(
    path: pathlib.Path, documents: Sequence[Any], *, group: int = 5, column: str = "text"
) -> str:
    """Writes the documents as a column after another one, in row groups of `group` rows."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table = arrow.table({"id": range(len(documents)), column: documents})
    parquet.write_table(table, path, row_group_size=group)
    return str(path)


def write_jsonl(path: pathlib.Path, documents: Sequence[Any], *, column: str = "text") -> str:
    """Writes one JSON object per line, compressed as the name says."""
    zstandard = pytest.importorskip("zstandard")
    lines = "".join(json.dumps({"id": i, column: document}) + "\n" for i, document in enumerate(documents))
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}
    path.write_bytes(compress.get(path.suffix, bytes)(lines.encode()))
    return str(path)


def numbered(lengths: Sequence[int]) -> list[list[int]]:
    """Returns documents whose tokens 1, 2, 3, ... are all distinct, so that each can be identified."""
    ends = np.cumsum(lengths)
    return [list(range(end - length + 1, end + 1)) for end, length in zip(ends, lengths)]


def stacked(rows: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Returns rows as a batch."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    """Asserts that two batches are equal."""
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])
