"""LongCrawl64's layout: a Zarr v2 array of token ids, one document per row, local or in an object store."""

import contextlib
import hashlib
import json
import math
import os
import pathlib
from typing import Any

import numpy as np
import tensorstore
from jaxtyping import Int64, Integer

from sympow_jax import spelling
from sympow_jax.config import serialize
from sympow_jax.data import documents, files, sources

DOCUMENT_START = 50_256  # GPT-2's <|endoftext|>, before every input
ROW_TOKENS = 65_536
CHUNKS = (2048, 2048)

# LongCrawl64 has Blosc's LZ4. Gzip has a checksum: of 200 bits that were flipped in the data of such chunks, it found
# all, and LZ4 found 24. It reads as fast, and the chunks are smaller.
_COMPRESSOR = {"id": "gzip", "level": 1}

# Chunks whose last bytes enter the digest, and the number of these bytes.
_SAMPLES, _SAMPLE_BYTES = 32, 16

# A row of full length spans 32 chunks of 8 MB. The cache has room for two such bands of documents.
_CACHE_BYTES = 2 * 32 * CHUNKS[0] * CHUNKS[1] * 2
# Tokens of the largest chunk that is read, which is held in memory whole. LongCrawl64's chunks have 2^22.
_CHUNK_TOKENS = 1 << 27
_MAX_TOKENS = 1 << 48


def metadata(rows: int, row_tokens: int, dtype: np.dtype) -> dict[str, Any]:
    """Returns Zarr v2 metadata of an array in LongCrawl64's layout."""
    return {
        "shape": [rows, row_tokens],
        "chunks": list(CHUNKS),
        "dtype": dtype.str,
        "order": "C",
        "fill_value": 0,
        "filters": None,
        "dimension_separator": ".",
        "compressor": _COMPRESSOR,
    }


def spec(path: str) -> dict[str, Any]:
    """Returns TensorStore's spec of the array at a folder or at a URL (gs://, s3://, http://, https://)."""
    if "://" in path:
        store: str | dict[str, str] = path.rstrip("/") + "/"
    else:
        store = {"driver": "file", "path": os.path.abspath(os.path.expanduser(path)) + "/"}
    return {"driver": "zarr", "kvstore": store}


def _reason(error: ValueError) -> str:
    """Returns TensorStore's message on one line, shortened, without the spec that it appends."""
    return spelling.cut(str(error).split(" [tensorstore_spec=")[0], 300)


def read_object(path: str, name: str) -> dict[str, Any]:
    """Returns the JSON object in a file of an array, such as `.zattrs`; an empty one if there is no such file."""
    store = spec(path)["kvstore"]
    if isinstance(store, str):
        content = tensorstore.KvStore.open(store).result().read(name).result().value
        return serialize.parse_object(content.decode()) if content else {}
    local = pathlib.Path(store["path"], name)
    return serialize.read_object(local) if local.is_file() else {}


class ZarrDocuments:
    """Rows of a Zarr array as documents, read chunk by chunk through a cache of 512 MiB."""

    def __init__(
        self, array: tensorstore.TensorStore, path: str, *, rows: Int64[np.ndarray, " documents"], lead: int
    ):
        self.lengths = np.full(len(rows), array.shape[1], np.int64)
        self.lead = lead
        self.together = array.spec().to_json()["metadata"]["chunks"][0]
        self._array, self._path, self._rows = array, path, rows

    def read(self, document: int, start: int, stop: int) -> Integer[np.ndarray, " tokens"]:
        """Returns tokens start .. stop - 1 of a document; raises ValueError if a chunk is missing or damaged."""
        try:
            return self._array[self._rows[document], start:stop].read().result()
        except ValueError as error:
            raise ValueError(
                f"{self.name(document)} cannot be read: {_reason(error)}; copy or prepare the array again"
            ) from error

    def name(self, document: int) -> str:
        """Returns the array's path and the document's row."""
        return f"{self._path} (row {self._rows[document]})"


class Source(sources.Source):
    """Documents of an array, one per row. `data.document_separator` replaces GPT-2's 50,256 before each row."""

    def open_paths(self, setting: str, paths: tuple[str, ...]) -> tensorstore.TensorStore:
        """Opens the array; raises ValueError if it has another layout or type, or is too large."""
        dtype, shortest = self.config.token_dtype, self.config.shortest_document
        if len(paths) != 1:
            raise ValueError(f"{setting} has {len(paths)} entries; longcrawl64 reads one Zarr array")
        context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        # Without fill_missing_data_reads=False, a missing chunk reads as zeros.
        reading = {**spec(paths[0]), "fill_missing_data_reads": False}
        try:
            # First, because of metadata of many levels, TensorStore would end the process.
            read_object(paths[0], ".zarray")
            array = tensorstore.open(reading, context=context, open=True, read=True).result()
        except ValueError as error:
            reason = _reason(error)
            raise ValueError(f"{setting}: cannot open {paths[0]} as a Zarr v2 array: {reason}") from error
        if array.rank != 2 or 0 in array.shape or array.dtype.name != dtype or array.shape[1] < shortest:
            raise ValueError(
                f"{setting}: {paths[0]} has shape {array.shape} and holds {array.dtype.name}; it must be (documents, "
                f"tokens), neither 0, of data.token_dtype {dtype}, and have the {shortest} tokens of "
                f"data.shortest_document"
            )
        # Before memory is reserved for sizes that no data has but metadata may claim.
        chunk = tuple(array.spec().to_json()["metadata"]["chunks"])
        sizes = array.shape[0], math.prod(array.shape), math.prod(chunk)
        most = documents.MAX_DOCUMENTS, _MAX_TOKENS, _CHUNK_TOKENS
        if any(size > limit for size, limit in zip(sizes, most)):
            raise ValueError(
                f"{setting}: {paths[0]} has shape {array.shape} and chunks of shape {chunk} by its metadata; at most "
                f"{most[0]} rows, {most[1]} tokens and {most[2]} tokens per chunk can be read"
            )
        return array

    def side(self, *, heldout: bool) -> ZarrDocuments:
        """Returns the training or the held-out documents."""
        config, array = self.config, self.opened(heldout=heldout)
        lead = DOCUMENT_START if config.document_separator is None else config.document_separator
        if lead >= self.vocab_size:
            raise ValueError(
                f"the first id of every row is {lead}, but model.vocab_size is {self.vocab_size}; set "
                f"data.document_separator to the id that the data was prepared with"
            )
        # Of one array, a row is known by its number alone.
        chosen = files.on_side(config, [""], np.arange(array.shape[0]), heldout=heldout)
        (path,) = files.side(config, heldout=heldout)[1]
        return ZarrDocuments(array, path, rows=np.flatnonzero(chosen), lead=lead)

    def metadata(self) -> dict[str, dict[str, Any]]:
        """Returns what `prepare` recorded about the arrays, by the path of the record."""
        arrays = (*self.config.paths, *self.config.heldout_paths)
        return {f"{array}/.zattrs": read_object(array, ".zattrs") for array in arrays}

    def describe(self) -> dict[str, Any]:
        """Returns sizes of the arrays, and a SHA-256 as `digest_of` says; reading terabytes would delay the start."""
        arrays = self.all_opened()
        digest, size = hashlib.sha256(), 0
        for array in arrays:
            size += math.prod(array.shape) * array.dtype.numpy_dtype.itemsize
            store = array.kvstore
            assert store is not None  # of the driver `zarr`
            stored = array.spec().to_json()["metadata"]
            digest.update(json.dumps(stored, sort_keys=True).encode())
            shape = [-(-size // chunk) for size, chunk in zip(stored["shape"], stored["chunks"])]
            places = np.linspace(0, math.prod(shape), _SAMPLES, endpoint=False).astype(np.int64)
            indices = np.stack(np.unravel_index(np.unique(places), shape), -1).tolist()
            keys = [stored.get("dimension_separator", ".").join(map(str, index)) for index in indices]
            # Of gzip, these are a checksum and the size of the content.
            for end in [store.read(key, byte_range=slice(-_SAMPLE_BYTES, None)) for key in keys]:
                with contextlib.suppress(ValueError):  # a chunk of fewer bytes
                    digest.update(end.result().value)
        return sources.described((), *(self.side(heldout=side).lengths for side in (False, True))) | {
            "files": len(arrays),
            "bytes": size,
            "digest": digest.hexdigest(),
            "digest_of": f"metadata, and the ends of {_SAMPLES} chunks of each array",
        }
