"""Flat little-endian `.bin` files of token ids, memory-mapped."""

import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool, Int64, Integer

from sympow_jax import config as config_lib
from sympow_jax.config import serialize
from sympow_jax.data import documents, files

__all__ = ["DTYPES", "describe", "locations", "open_documents", "sidecar"]

DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}

_SCAN_TOKENS = 1 << 24  # files are scanned for separators in pieces, because a file may be larger than memory
_DIGEST_BYTES = 1 << 20  # bytes of each end of a file that enter the digest


def sidecar(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of the JSON file that `prepare` writes next to a `.bin`."""
    return path.with_name(path.name + ".json")


def _map(file: files.File, config: config_lib.DataConfig) -> Integer[np.ndarray, " tokens"]:
    dtype = DTYPES[config.token_dtype]
    if file.size == 0:
        raise ValueError(f"{file.path} is empty; it must hold {config.token_dtype} token ids")
    if file.size % dtype.itemsize:
        raise ValueError(
            f"{file.path} has {file.size} bytes, not a multiple of the {dtype.itemsize} of one "
            f"{config.token_dtype}; the file is truncated or data.token_dtype is wrong"
        )
    metadata = sidecar(file.path)
    if metadata.is_file():
        stored = serialize.read_object(metadata).get("token_dtype")
        if not isinstance(stored, str) or stored not in DTYPES:
            raise ValueError(
                f"{metadata}: its token_dtype is not one of {', '.join(DTYPES)}; `sympow prepare` did not write this "
                f"file, so correct or remove it"
            )
        if stored != config.token_dtype:
            raise ValueError(
                f"{file.path} holds {stored} ids according to {metadata.name}, but data.token_dtype is "
                f"{config.token_dtype!r}; set it to {stored!r}"
            )
    try:
        return np.memmap(file.path, dtype, mode="r")
    except OSError as error:
        raise ValueError(f"cannot read {file.path}: {error.strerror or error}") from error


def _ends(
    array: Integer[np.ndarray, " tokens"], separator: int | None, *, limit: int
) -> Int64[np.ndarray, " documents"] | None:
    """Returns the position after each document, which ends with a separator or with the file.

    None if there are more than `limit` documents, without looking further.
    """
    if separator is None:
        return np.array([len(array)])
    pieces, count = [], 0  # positions in each piece, which 32 bits hold
    for start in range(0, len(array), _SCAN_TOKENS):
        pieces.append(np.flatnonzero(array[start : start + _SCAN_TOKENS] == separator).astype(np.uint32))
        count += len(pieces[-1])
        if count > limit:
            return None
    ended = array[-1] == separator
    ends = np.full(count if ended else count + 1, len(array), np.int64)
    filled = 0
    for i, piece in enumerate(pieces):
        ends[filled : filled + len(piece)] = piece
        ends[filled : filled + len(piece)] += i * _SCAN_TOKENS + 1
        filled += len(piece)
    return ends


def _all_ends(
    setting: str,
    matches: list[files.File],
    arrays: list[Integer[np.ndarray, " tokens"]],
    separator: int | None,
) -> list[Int64[np.ndarray, " documents"]]:
    """Returns the ends of the documents of every file, if memory can hold them."""
    ends, left = [], documents.MAX_DOCUMENTS
    for file, array in zip(matches, arrays):
        inside = _ends(array, separator, limit=left)
        if inside is None or len(inside) > left:
            raise ValueError(
                f"{setting}: there are more than {documents.MAX_DOCUMENTS} documents up to {file.path}, each ended by "
                f"the data.document_separator {separator}; correct it, name fewer files, or leave it unset, so that "
                f"every file is one document"
            )
        ends.append(inside)
        left -= len(inside)
    return ends


def _scan(
    setting: str, paths: tuple[str, ...], config: config_lib.DataConfig
) -> tuple[documents.Spans, Bool[np.ndarray, " documents"]]:
    """Returns the documents that are long enough, and a mask of those that their hashes hold out; reads all tokens."""
    matches = files.find(setting, paths, suffix=".bin")
    separator = config.document_separator
    arrays = [_map(file, config) for file in matches]
    ends = _all_ends(setting, matches, arrays, separator)
    occurs = any(array[end[0] - 1] == separator for array, end in zip(arrays, ends))
    if separator is not None and not occurs:
        raise ValueError(
            f"{setting}: no file holds the data.document_separator {separator}; correct it, or leave it "
            f"unset where every file is one document"
        )
    lengths = np.concatenate([np.diff(end, prepend=0) for end in ends])
    spans = documents.Spans(
        arrays,
        [str(file.path) for file in matches],
        array=np.repeat(np.arange(len(arrays), dtype=np.int32), [len(end) for end in ends]),
        starts=np.concatenate(ends) - lengths,
        lengths=lengths,
    )
    masks = (
        files.held_out([file.key], np.arange(len(end)), config.heldout_fraction)
        for file, end in zip(matches, ends)
    )
    chosen = np.flatnonzero(lengths >= config.shortest_document)
    return spans.select(chosen), np.concatenate([*masks])[chosen]


def open_documents(config: config_lib.DataConfig, *, heldout: bool) -> documents.Spans:
    """Returns the training or the held-out documents of the `.bin` files.

    `data.document_separator` is the last token of every document. Without a separator, every file is one document.

    Raises:
        ValueError: nothing matches, a file is empty, truncated or of another dtype, or there are more than 2^28
            documents.
    """
    spans, out = _scan(*files.side(config, heldout=heldout), config)
    return spans if config.heldout_paths else spans.select(np.flatnonzero(out == heldout))


def locations(setting: str, paths: tuple[str, ...], config: config_lib.DataConfig) -> set[str]:
    """Returns the real path of each file that the setting names."""
    return {location for location, _ in files.located(files.find(setting, paths, suffix=".bin"))}


def describe(config: config_lib.DataConfig) -> dict[str, Any]:
    """Returns counts of files, documents and tokens, and a SHA-256 as `digest_of` says."""
    spans, out = _scan("data.paths", config.paths, config)
    train, heldout = spans.lengths[~out], spans.lengths[out]
    if config.heldout_paths:
        train, heldout = spans.lengths, open_documents(config, heldout=True).lengths
    matches = files.find_all(config, suffix=".bin")

    def ends(file: files.File) -> Iterator[bytes]:
        with file.path.open("rb") as stream:
            yield stream.read(_DIGEST_BYTES)
            stream.seek(max(0, file.size - _DIGEST_BYTES))
            yield stream.read(_DIGEST_BYTES)

    return {
        "files": len(matches),
        "bytes": sum(file.size for file in matches),
        "documents": len(train),
        "tokens": int(train.sum()),
        "heldout_documents": len(heldout),
        "heldout_tokens": int(heldout.sum()),
        "digest": files.digest(matches, ends, samples=True),
        "digest_of": "names, sizes, first and last MiB of each file, and 64 samples of all",
    }
