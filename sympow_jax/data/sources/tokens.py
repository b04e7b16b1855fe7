"""Flat little-endian `.bin` files of token ids, memory-mapped, such as those in a folder that `prepare` writes."""

import functools
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, Integer

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


def _metadata(found: Iterable[files.File]) -> dict[str, dict[str, Any]]:
    """Returns what `prepare` recorded about files, by the path of the record; of other files there is none."""
    folders = dict.fromkeys(pathlib.Path(file.path).parent for file in found)
    records = [folder / METADATA for folder in folders]
    return {str(record): serialize.read_object(record) for record in records if record.is_file()}


class Source:
    """Documents of token files, which end with `data.document_separator`; without one, every file is a document."""

    def __init__(self, config: config_lib.DataConfig):
        self._config = config
        self._scan = functools.cache(self._scan_side)

    def side(self, task: Any = None, *, heldout: bool, vocab_size: int = 0) -> documents.Spans:
        """Returns the training or the held-out documents; the other arguments are unused."""
        spans, out, _ = self._scan(heldout=heldout and bool(self._config.heldout_paths))
        return spans if self._config.heldout_paths else spans.select(np.flatnonzero(out == heldout))

    def metadata(self) -> dict[str, dict[str, Any]]:
        """Returns what `prepare` recorded about the files, by the path of the record; of other files there is none."""
        sides = files.sides(self._config)
        return _metadata(file for side in sides for file in sources.find_all(self._config, heldout=side))

    def describe(self) -> dict[str, Any]:
        """Returns counts of files, documents and tokens, and a SHA-256 as `digest_of` says."""
        matches = [file for side in files.sides(self._config) for file in self._scan(heldout=side)[2]]

        def ends(file: files.File) -> Iterator[bytes]:
            with files.errors(file.path), files.open_file(file.path) as stream:
                yield stream.read(_DIGEST_BYTES)
                stream.seek(max(0, file.size - _DIGEST_BYTES))
                yield stream.read(_DIGEST_BYTES)

        return sources.described(
            matches,
            *(self.side(heldout=side).lengths for side in (False, True)),
            digest=files.digest(matches, ends, samples=True),
            digest_of="names, sizes, first and last MiB of each file, and 64 samples of all",
        )

    def _scan_side(
        self, *, heldout: bool
    ) -> tuple[documents.Spans, Bool[np.ndarray, " documents"], list[files.File]]:
        """Returns the documents that are long enough, a mask of those that their hashes hold out, and the files."""
        config, separator = self._config, self._config.document_separator
        dtype = DTYPES[config.token_dtype]
        setting, _ = files.side(config, heldout=heldout)
        matches = sources.find_all(config, heldout=heldout)
        self._check(matches)

        def open_array(index: int) -> Integer[np.ndarray, " tokens"]:
            with files.errors(matches[index].path):
                return np.memmap(matches[index].path, dtype, mode="r")

        # The position after each document, which ends with a separator or with the file.
        remedy = "correct it, or leave it unset where every file is one document"
        ends: list[Int64[np.ndarray, " documents"]] = []
        left, occurs = documents.MAX_DOCUMENTS, separator is None
        for index, file in enumerate(matches):
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
        spans = documents.Spans.consecutive(
            functools.lru_cache(maxsize=_MAPPED)(open_array),
            [file.path for file in matches],
            [np.diff(end, prepend=0) for end in ends],
        )
        masks = [
            files.held_out([file.key], np.arange(len(end)), config.heldout_fraction)
            for file, end in zip(matches, ends)
        ]
        chosen = np.flatnonzero(spans.lengths >= config.shortest_document)
        return spans.select(chosen), np.concatenate(masks)[chosen], matches

    def _check(self, matches: list[files.File]) -> None:
        """Raises ValueError for files of a wrong size, or whose metadata contradicts the settings."""
        dtype = self._config.token_dtype
        for path, record in _metadata(matches).items():
            if "documents" not in record:
                raise ValueError(f"the token files next to {path} are not complete; repeat `sympow prepare`")
            if (stored := record.get("token_dtype")) != dtype:
                raise ValueError(
                    f"the token files next to {path} hold {spelling.shown(stored)} ids, but data.token_dtype is "
                    f"{dtype!r}; set it to theirs"
                )
        for file in matches:
            if not file.size or file.size % DTYPES[dtype].itemsize:
                raise ValueError(
                    f"{file.path} has {file.size} bytes; it must hold {dtype} ids of {DTYPES[dtype].itemsize} bytes "
                    f"each: it is empty or truncated, or data.token_dtype is wrong"
                )
