"""Flat little-endian `.bin` files of token ids, memory-mapped, such as those in a folder that `prepare` writes."""

import functools
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from sympow_jax import spelling
from sympow_jax.config import serialize
from sympow_jax.data import documents, files, sources

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
METADATA = "prepared.json"
"""Name of the file next to token files in which `prepare` says what they are."""

_SCAN_TOKENS = 1 << 24  # files are scanned for separators in parts, because one may be larger than memory
_DIGEST_BYTES = 1 << 20  # bytes of each end of a file that enter the digest
# Files that are mapped at a time. Each takes a file descriptor, of which a process may often have 1,024.
_MAPPED = 256


# Token files, their documents that are long enough, and for each file the positions of these in it.
_Scanned = tuple[list[files.File], documents.Spans, list[Int64[np.ndarray, " documents"]]]


def _records(matches: Iterable[files.File]) -> dict[str, dict[str, Any]]:
    """Returns what `prepare` recorded about files, by the path of the record; of other files there is none."""
    paths = dict.fromkeys(pathlib.Path(file.path).parent / METADATA for file in matches)
    return {str(path): serialize.read_object(path) for path in paths if path.is_file()}


class Source(sources.Source):
    """Documents of token files, which end with `data.document_separator`; without one, every file is a document."""

    def metadata(self) -> dict[str, dict[str, Any]]:
        """Returns what `prepare` recorded about the files, by the path of the record."""
        sides = [files.side(self.config, heldout=side) for side in files.sides(self.config)]
        return _records(file for side in sides for file in sources.Source.open_paths(self, *side))

    def side(self, *, heldout: bool) -> documents.Spans:
        """Returns the training or the held-out documents."""
        matches, spans, positions = self.opened(heldout=heldout)
        chosen = [
            files.on_side(self.config, [file.key], own, heldout=heldout)
            for file, own in zip(matches, positions)
        ]
        return spans.select(np.concatenate(chosen))

    def describe(self) -> dict[str, Any]:
        """Returns counts of files, documents and tokens, and a SHA-256 as `digest_of` says."""

        def ends(file: files.File) -> Iterator[bytes]:
            with files.errors(file.path), files.open_file(file.path) as stream:
                yield stream.read(_DIGEST_BYTES)
                stream.seek(max(0, file.size - _DIGEST_BYTES))
                yield stream.read(_DIGEST_BYTES)

        matches = [file for found, _, _ in self.all_opened() for file in found]
        return sources.described(
            matches,
            *(self.side(heldout=side).lengths for side in (False, True)),
            digest=files.digest(matches, ends, samples=True),
            digest_of="names, sizes, first and last MiB of each file, and 64 samples of all",
        )

    def open_paths(self, setting: str, paths: tuple[str, ...]) -> _Scanned:
        """Finds the documents of files; raises ValueError if the files do not fit the settings."""
        config, separator, matches = (
            self.config,
            self.config.document_separator,
            super().open_paths(setting, paths),
        )
        dtype = DTYPES[config.token_dtype]
        if found := [file.path for file in matches if pathlib.PurePath(file.path).name == METADATA]:
            raise ValueError(
                f"{setting}: {found[0]} is the record of `sympow prepare`, not a token file; name the folder instead"
            )
        for path, record in _records(matches).items():
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
        return matches, spans, [*map(np.flatnonzero, long)]
