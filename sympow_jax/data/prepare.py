"""Turns text into token files.

Without `--text_column`, every file is a document. With it, files are parquet or JSON lines, also compressed, local or
remote, and every row or line is a document, whose text is in this column or field.

`bin` writes a folder of token files, each with the tokens of some MB of text, every document followed by the separator.
`prepared.json` there has the tokenizer, the size of its vocabulary, the separator and the dtype.

`longcrawl64` writes the same tokens as a Zarr v2 array in LongCrawl64's layout: documents and separators are
concatenated and cut into rows of `row_tokens`. A long document continues in the next row, short documents
share a row, and nothing is padded. The rest at the end, less than a row, is dropped, and its size is printed.
(LongCrawl64 itself has one document per row: it has only long documents, without their ends.)

The work is done by `--workers` processes. A command that was stopped, for whatever reason, continues when it is
repeated: the token files that are there are not made again. Its output does not depend on the number of workers or of
repetitions.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore

from sympow_jax.config import checks, serialize
from sympow_jax.config import data as data_lib
from sympow_jax.data import files
from sympow_jax.data import tokenizer as tokenizer_lib
from sympow_jax.data.corpus import encoding as encoding_lib
from sympow_jax.data.corpus import pieces, processes
from sympow_jax.data.sources import tokens, zarr
from sympow_jax.process import atomic

PIECE_BYTES = 1 << 23
"""Bytes of text in a token file, roughly. Every worker holds one in memory, and a repeated command makes it again."""

# The vocabulary has one id more, and its size must fit an int32.
_LARGEST_ID = (1 << 31) - 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The way from documents to tokens.

    Attributes:
        tokenizer: name for `tokenizer.load`.
        separator: id that ends a document; None takes the tokenizer's.
        text_column: column of parquet and JSON lines that holds the text; None if every file is a document.
        shortest_document: documents of fewer tokens, separator included, are left out.
        workers: number of processes that tokenize; 1 for a thread of this process.
    """

    tokenizer: str = "byte"
    separator: int | None = None
    text_column: str | None = None
    shortest_document: int = 1
    workers: int = 1

    def __post_init__(self):
        checks.require_at_least(
            1, **{"--shortest_document": self.shortest_document, "--workers": self.workers}
        )
        if self.separator is not None and not 0 <= self.separator <= _LARGEST_ID:
            raise ValueError(f"--separator is {self.separator}; it must be an id from 0 to {_LARGEST_ID}")


class Progress(NamedTuple):
    """Numbers of finished token files and of all of them, and of the documents and tokens in the finished ones."""

    done: int
    pieces: int
    documents: int
    tokens: int


def _counts(shard: pathlib.Path) -> list[int]:
    """Returns the index of a token file such as `000012-345-6.bin`, its number of documents, and of those left out."""
    return [int(count) for count in shard.stem.split("-")]


@contextlib.contextmanager
def _write_errors(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}; correct this and repeat the command, which continues"
        ) from error


def _write(path: pathlib.Path, content: bytes | memoryview | dict[str, Any]) -> None:
    """Replaces a file by bytes or the JSON of a dict, whole even if the machine loses power then."""
    if isinstance(content, dict):
        content = (json.dumps(content, indent=2) + "\n").encode()
    with _write_errors(path), atomic.replace(path) as draft, draft.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


class _ShardWriter:
    """Tokenizes groups of pieces and writes them to a folder."""

    def __init__(self, encoding: encoding_lib.Encoding, folder: pathlib.Path):
        self._encode, self._folder = encoding_lib.Encoder(encoding), folder
        self._dtype = tokens.DTYPES[encoding.token_dtype]

    def __call__(self, task: tuple[int, pieces.Group]) -> pathlib.Path:
        index, group = task
        encoded = self._encode(group)
        path = self._folder / f"{index:06}-{len(encoded.lengths)}-{encoded.left_out}.bin"
        _write(path, encoded.tokens.astype(self._dtype, copy=False).view(np.uint8).data)
        return path


def _find(paths: Sequence[str], text_column: str | None) -> list[tuple[files.File, str]]:
    """Returns the files that `paths` name and their formats; raises ValueError if there are none of this kind."""
    if text_column is None:
        found = files.find("files", paths)
        texts = [file for file in found if file.size]
        if not texts:
            raise ValueError(f"every file is empty ({len(found)} found); name files that hold text")
        # A `.json` may be one document.
        kinds = {"text" if x.path.endswith(".json") else data_lib.source_of(x.key) for x in texts}
        if kinds <= set(data_lib.CORPUS_SOURCES):
            raise ValueError(
                f"{texts[0].path} has many documents, one per row or line; name the column that holds their text with "
                f"--text_column"
            )
        return [(file, "text") for file in texts]
    columns = []
    for path in paths:
        source = data_lib.source_of(path)
        if source not in data_lib.CORPUS_SOURCES:
            raise ValueError(
                f"{path} is neither .parquet nor .jsonl, nor a compressed .jsonl, which --text_column reads; name the "
                f"files of a folder with a glob, such as {os.path.join(path, '*.parquet')}, and leave others out"
            )
    for source in data_lib.CORPUS_SOURCES:
        own = [path for path in paths if data_lib.source_of(path) == source]
        columns += [(file, source) for file in files.find("files", own)]
    columns.sort(key=lambda item: (item[0].key, item[0].path))
    first, source = columns[0]
    if not importlib.import_module(f"sympow_jax.data.corpus.{source}").holds_text(first, text_column):
        raise ValueError(
            f"{first.path} holds token ids in {text_column!r}, and not text; train on it with data.source={source}"
        )
    return columns


def _new_output(out: str, paths: Sequence[str]) -> pathlib.Path:
    """Returns the path of an output; raises ValueError if `paths` name files in it."""
    path = pathlib.Path(os.path.expanduser(out))
    real = os.path.realpath(path)
    written = (real, os.path.join(real, tokens.METADATA), os.path.join(real, "000000-1-0.bin"))
    for read in filter(None, paths):
        if any(files.would_find(read, name) for name in written):
            raise ValueError(
                f"the output {out} is in {read}, and a later command that reads this would take it for a document; "
                f"choose another --out"
            )
    return path


def _write_shards(
    folder: pathlib.Path, paths: Sequence[str], options: Options, report: Callable[[Progress], None] | None
) -> tuple[dict[str, Any], list[pathlib.Path]]:
    """Tokenizes all documents; returns a description of them, and the token files in order.

    The caller writes the description to the folder, or removes the folder. Otherwise the same command continues it.
    """
    tokenizer = tokenizer_lib.load(options.tokenizer)
    separator = tokenizer.end_of_text(options.separator, setting="--separator")
    encoding = encoding_lib.Encoding(
        column=options.text_column,
        tokenizer=tokenizer_lib.local_name(options.tokenizer),
        separator=separator,
        only_separators=True,
        vocab_size=max(tokenizer.vocab_size, separator + 1),
        shortest=options.shortest_document,
    )
    about: dict[str, Any] = {
        "tokenizer": tokenizer_lib.absolute_name(options.tokenizer),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": encoding.vocab_size,
        "separator": separator,
        "token_dtype": encoding.token_dtype,
    }
    found = _find(paths, options.text_column)
    groups = pieces.grouped(found, PIECE_BYTES)
    # When a local file was last changed; not all servers say so.
    changed = [0 if "://" in file.path else os.stat(file.path).st_mtime_ns for file, _ in found]
    names = "".join(f"{file.path}\0{file.size}\0{time}\0" for (file, _), time in zip(found, changed))
    facts = about | {
        "text_column": options.text_column,
        "shortest_document": options.shortest_document,
        "files": len(found),
        "bytes": sum(file.size for file, _ in found),
        "names_sizes_times_sha256": hashlib.sha256(os.fsencode(names)).hexdigest()[:16],
        "token_files": len(groups),
    }

    # The folder is new, or of the same command that was stopped. What a link leads to would be written to and removed.
    # A process that was killed before it wrote the record may have left a draft of it, and nothing else.
    record = folder / tokens.METADATA
    before = serialize.read_object(record) if record.is_file() and not record.is_symlink() else {}
    if os.path.lexists(folder) and (
        folder.is_symlink()
        or not folder.is_dir()
        or "documents" in before
        or (not before and not all(name.startswith(f".{record.name}-") for name in os.listdir(folder)))
    ):
        raise ValueError(f"{folder} exists; remove it or choose another --out")
    if before and (different := serialize.differences(before, facts)):
        raise ValueError(
            f"{folder} holds part of another output: {different}; repeat the command as it was, on the same "
            f"files, or remove the folder to start again"
        )
    with _write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    _write(record, facts)

    # Token files that are there are not made again.
    itemsize = tokens.DTYPES[encoding.token_dtype].itemsize
    shards: dict[int, pathlib.Path] = {}
    progress = Progress(0, len(groups), 0, 0)

    def add(path: pathlib.Path) -> None:
        nonlocal progress
        index, documents, _ = _counts(path)
        shards[index] = path
        ids = progress.tokens + path.stat().st_size // itemsize
        progress = Progress(len(shards), len(groups), progress.documents + documents, ids)

    for path in folder.glob("[0-9]*-*-*.bin"):
        add(path)
    report = report or (lambda _: None)
    try:
        report(progress)
        left = [(index, group) for index, group in enumerate(groups) if index not in shards]
        tasks, workers = iter(left), min(options.workers, max(1, len(left)))
        make = functools.partial(_ShardWriter, encoding, folder)
        with processes.pool(make, workers=workers if workers > 1 else 0, setting="--workers") as submit:
            running = {submit(task) for task in itertools.islice(tasks, workers)}
            while running:
                done, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
                for written in done:
                    add(written.result())
                    report(progress)
                running |= {submit(task) for task in itertools.islice(tasks, len(done))}
        left_out = sum(_counts(path)[2] for path in shards.values())
        about |= {"documents": progress.documents, "tokens": progress.tokens}
        if not progress.documents:
            shards.clear()
            raise ValueError(
                f"every document has fewer tokens than --shortest_document, {options.shortest_document}; lower it"
                if left_out
                else f"there are no documents ({len(found)} files read); name files that hold text"
            )
    finally:
        if not shards:
            shutil.rmtree(folder)
    if options.shortest_document > 1:
        about |= {"shortest_document": options.shortest_document, "left_out_documents": left_out}
    for index, path in sorted(shards.items()):
        if not _counts(path)[1]:
            shards.pop(index).unlink()
    return about, [shards[index] for index in sorted(shards)]


def write_bin(
    out: str,
    paths: Sequence[str],
    options: Options | None = None,
    *,
    report: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Writes a folder of token files with `prepared.json`, and returns the content of that.

    Args:
        out: path of the folder. If it has part of the output of the same arguments, the work is continued.
        paths: files, folders or globs to read.
        options: the way from documents to tokens.
        report: called with the progress after every token file.

    Raises:
        ValueError: `out` exists, is in one of `paths` or holds part of another output; a document contains the
            separator or cannot be read or encoded; there is no separator or no document; or a worker process ended.
    """
    folder = _new_output(out, paths)
    about, _ = _write_shards(folder, paths, options or Options(), report)
    _write(folder / tokens.METADATA, about)
    return about


def write_longcrawl64(
    out: str,
    paths: Sequence[str],
    options: Options | None = None,
    *,
    row_tokens: int = zarr.ROW_TOKENS,
    report: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Writes a Zarr v2 array with rows of `row_tokens`, and returns the content of its `.zattrs`.

    Arguments are as in `write_bin`. Tokens after the last whole row are dropped. Until the array is complete, a hidden
    folder next to it has the token files.

    Raises:
        ValueError: as `write_bin`, or there are fewer tokens than one row, or `row_tokens` is below 1.
    """
    checks.require_at_least(1, **{"--row_tokens": row_tokens})
    path = _new_output(out, paths)
    if os.path.lexists(path):
        raise ValueError(f"{path} exists; remove it or choose another --out")
    folder = path.with_name(f".{path.name}.prepare")
    about, shards = _write_shards(folder, paths, options or Options(), report)
    rows = about["tokens"] // row_tokens
    if not rows:
        shutil.rmtree(folder)
        raise ValueError(
            f"the files hold {about['tokens']} tokens, fewer than one row of {row_tokens}; "
            f"name more files or set a smaller --row_tokens"
        )
    partial = folder / "rows.zarr"
    shutil.rmtree(partial, ignore_errors=True)
    dtype, source = tokens.DTYPES[about["token_dtype"]], iter(shards)
    with _write_errors(partial):
        # Chunks of zeros are written too, because the reader treats a missing chunk as an error.
        metadata = zarr.metadata(rows, row_tokens, dtype)
        spec = {**zarr.spec(str(partial)), "metadata": metadata, "store_data_equal_to_fill_value": True}
        array = tensorstore.open(spec, create=True).result()
        left = np.empty(0, dtype)
        for start in range(0, rows, zarr.CHUNKS[0]):
            stop = min(start + zarr.CHUNKS[0], rows)
            band, filled = np.empty((stop - start) * row_tokens, dtype), 0
            while filled < len(band):
                if not len(left):
                    left = np.memmap(next(source), dtype, mode="r")
                part = left[: len(band) - filled]
                band[filled : filled + len(part)] = part
                filled, left = filled + len(part), left[len(part) :]
            array[start:stop].write(band.reshape(stop - start, row_tokens)).result()
        about |= {
            "rows": rows,
            "row_tokens": row_tokens,
            "dropped_tokens": about["tokens"] - rows * row_tokens,
        }
        _write(partial / ".zattrs", about)
        partial.rename(path)
        shutil.rmtree(folder)
    return about
