"""Flat little-endian `.bin` files of token ids, memory-mapped, such as those in a folder that `prepare` writes."""

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from sympow_jax import config as config_lib
from sympow_jax import spelling
from sympow_jax.config import serialize
from sympow_jax.data import documents, files, sources

__all__ = ["DTYPES", "METADATA", "Source"]

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
METADATA = "prepared.json"
"""Name of the file next to token files in which `prepare` says what they are."""

_SCAN_TOKENS = 1 << 24  # files are scanned for separators in parts, because one may be larger than memory
_DIGEST_BYTES = 1 << 20  # bytes of each end of a file that enter the digest
# Files that are mapped at a time. Each takes a file descriptor, of which a process may often have 1,024.
_MAPPED = 256


class Source:
    """Documents of token files, which end with `data.document_separator`; without one, every file is a document."""

    def __init__(self, config: config_lib.DataConfig):
        self._config = config
        self._find = functools.cache(lambda heldout: sources.find_all(config, heldout=heldout))
        self._scan = functools.cache(self._scan_side)

    def metadata(self, *sides: bool) -> dict[str, dict[str, Any]]:
        """Returns what `prepare` recorded about files of these sides, or of all, by the path of the record."""
        matches = [file for side in sides or files.sides(self._config) for file in self._find(side)]
        records = dict.fromkeys(pathlib.Path(file.path).parent / METADATA for file in matches)
        return {str(record): serialize.read_object(record) for record in records if record.is_file()}

    def side(self, task: Any = None, *, heldout: bool, vocab_size: int = 0) -> documents.Spans:
        """Returns the training or the held-out documents; the other arguments are unused."""
        spans, positions = self._scan(heldout and bool(self._config.heldout_paths))
        masks = [files.on_side(self._config, [key], found, heldout=heldout) for key, found in positions]
        return spans.select(np.concatenate(masks))

    def describe(self) -> dict[str, Any]:
        """Returns counts of files, documents and tokens, and a SHA-256 as `digest_of` says."""

        def ends(file: files.File) -> Iterator[bytes]:
            with files.errors(file.path), files.open_file(file.path) as stream:
                yield stream.read(_DIGEST_BYTES)
                stream.seek(max(0, file.size - _DIGEST_BYTES))
                yield stream.read(_DIGEST_BYTES)

        matches = [file for side in files.sides(self._config) for file in self._find(side)]
        return sources.described(
            matches,
            *(self.side(heldout=side).lengths for side in (False, True)),
            digest=files.digest(matches, ends, samples=True),
            digest_of="names, sizes, first and last MiB of each file, and 64 samples of all",
        )

    def _scan_side(
        self, heldout: bool
    ) -> tuple[documents.Spans, list[tuple[str, Int64[np.ndarray, " documents"]]]]:
        """Returns the documents that are long enough, and for each file its key and their positions in it."""
        config, separator, matches = self._config, self._config.document_separator, self._find(heldout)
        dtype = DTYPES[config.token_dtype]
        setting, _ = files.side(config, heldout=heldout)
        for path, record in self.metadata(heldout).items():
            if "documents" not in record:
                raise ValueError(f"the token files next to {path} are not complete; repeat `sympow prepare`")
            if (stored := record.get("token_dtype")) != config.token_dtype:
                raise ValueError(
                    f"the token files next to {path} hold {spelling.shown(stored)} ids, but data.token_dtype is "
                    f"{config.token_dtype!r}; set it to theirs"
                )

        def open_array(index: int) -> Integer[np.ndarray, " tokens"]:
            with files.errors(matches[index].path):
                return np.memmap(matches[index].path, dtype, mode="r")

        # The position after each document, which ends with a separator or with the file.
        remedy = "correct it, or leave it unset where every file is one document"
        ends: list[Int64[np.ndarray, " documents"]] = []
        left, occurs = documents.MAX_DOCUMENTS, separator is None
        for index, file in enumerate(matches):
            if not file.size or file.size % dtype.itemsize:
                raise ValueError(
                    f"{file.path} has {file.size} bytes; it must hold {dtype} ids of {dtype.itemsize} bytes each: it "
                    f"is empty or truncated, or data.token_dtype is wrong"
                )
            array, inside = open_array(index), []
            for start in range(0, len(array), _SCAN_TOKENS) if separator is not None else ():
                scanned = array[start : start + _SCAN_TOKENS]
                inside.append(np.flatnonzero(scanned == separator) + (start + 1))
                left -= len(inside[-1])
                if left < 0:
                    break
            occurs = occurs or any(map(len, inside))
            if separator is None or array[-1] != separator:
                inside.append(np.array([len(array)]))
                left -= 1
            if left < 0:
                raise ValueError(
                    f"{setting}: there are more than {documents.MAX_DOCUMENTS} documents up to {file.path}, each ended "
                    f"by the data.document_separator {separator}; name fewer files, or {remedy}"
                )
            ends.append(np.concatenate(inside))
        if not occurs:
            raise ValueError(f"{setting}: no file holds the data.document_separator {separator}; {remedy}")
        lengths = [np.diff(end, prepend=0) for end in ends]
        long = [part >= config.shortest_document for part in lengths]
        spans = documents.Spans(
            functools.lru_cache(maxsize=_MAPPED)(open_array), [file.path for file in matches], lengths
        ).select(np.concatenate(long))
        return spans, [(file.key, np.flatnonzero(part)) for file, part in zip(matches, long)]
