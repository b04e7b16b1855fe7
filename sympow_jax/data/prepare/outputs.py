"""The files that prepared tokens are written to."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorstore

from sympow_jax.config import checks
from sympow_jax.data import files, longcrawl64, processes, tokens
from sympow_jax.data import tokenizer as tokenizer_lib
from sympow_jax.data.prepare import folder as folder_lib
from sympow_jax.data.prepare import pieces
from sympow_jax.process import atomic

__all__ = ["Options", "Progress", "write_bin", "write_longcrawl64"]

# Bytes. A file system allows 255, and names of drafts are longer.
_LONGEST_NAME = 200
# The vocabulary has one id more, and its size must fit an int32.
_LARGEST_ID = (1 << 31) - 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The way from documents to tokens.

    Attributes:
        tokenizer: name for `tokenizer.load`.
        separator: id that ends a document; None takes the tokenizer's.
        text_column: column of parquet and JSON lines files that holds the text; None if every file is a document.
        shortest_document: documents of fewer tokens, separator included, are left out.
        workers: number of processes that tokenize, at least 1; 1 for a thread of this process.
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
    """Counts of the work that is done.

    Attributes:
        done: number of finished pieces.
        pieces: number of all pieces.
        documents: number of documents in the finished pieces, without those left out.
        tokens: number of their tokens, with separators.
    """

    done: int
    pieces: int
    documents: int
    tokens: int


Report = Callable[[Progress], None]


def _require_absent(path: pathlib.Path) -> None:
    if os.path.lexists(path):
        raise ValueError(f"{path} exists; remove it or choose another --out")


def _new_output(out: str, paths: Sequence[str]) -> pathlib.Path:
    """Returns the path of an output.

    Raises:
        ValueError: the output exists, its name is too long, or `paths` name it or a file next to it.
    """
    path = pathlib.Path(os.path.expanduser(out))
    _require_absent(path)
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise ValueError(
            f"the name of the output has more than {_LONGEST_NAME} bytes; choose a shorter --out"
        )
    for read in filter(None, paths):
        if any(files.would_find(read, os.path.realpath(written)) for written in (path, tokens.sidecar(path))):
            raise ValueError(
                f"the output {out} is in {read}, and a later command that reads this would take it for a document; "
                f"choose another --out"
            )
    return path


@contextlib.contextmanager
def _prepared(
    path: pathlib.Path, paths: Sequence[str], options: Options, report: Report | None
) -> Iterator[tuple[folder_lib.Folder, dict[str, Any]]]:
    """Tokenizes all documents, and yields the folder with their tokens and a description of them.

    The caller must remove the folder once its tokens are written; otherwise, the same command continues from it.
    """
    tokenizer = tokenizer_lib.load(options.tokenizer)
    separator = tokenizer.end_of_text(options.separator, setting="--separator")
    vocab_size = max(tokenizer.vocab_size, separator + 1)
    encoding = pieces.Encoding(
        tokenizer=tokenizer_lib.local_name(options.tokenizer),
        separator=separator,
        token_dtype="uint16" if vocab_size <= 1 << 16 else "uint32",
        text_column=options.text_column,
        shortest_document=options.shortest_document,
    )
    summary = {
        "tokenizer": tokenizer_lib.absolute_name(options.tokenizer),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": vocab_size,
        "separator": separator,
        "token_dtype": encoding.token_dtype,
    }
    sources = pieces.find(paths, options.text_column)
    fingerprint = hashlib.sha256(
        os.fsencode("".join(f"{name}\0{size}\0{_modified(name)}\0" for name, size in sources.files))
    )
    manifest = summary | {
        "text_column": options.text_column,
        "shortest_document": options.shortest_document,
        "files": len(sources.files),
        "bytes": sum(size for _, size in sources.files),
        "names_sizes_times_sha256": fingerprint.hexdigest()[:16],
        "pieces": len(sources.pieces),
        "piece_bytes": pieces.PIECE_BYTES,
    }
    folder = folder_lib.Folder(folder_lib.folder_of(path), tokens.DTYPES[encoding.token_dtype].itemsize)
    with folder.opened(manifest, len(sources.pieces)):
        _tokenize(folder, sources.pieces, encoding, options.workers, report)
        counts = folder.counts
        if not counts.documents:
            folder.remove()
            raise ValueError(
                f"every document has fewer tokens than --shortest_document, {options.shortest_document}; lower it"
                if counts.left_out
                else f"there are no documents ({len(sources.files)} files read); name files that hold text"
            )
        summary |= {"documents": counts.documents, "tokens": counts.tokens}
        if options.shortest_document > 1:
            summary |= {
                "shortest_document": options.shortest_document,
                "left_out_documents": counts.left_out,
            }
        yield folder, summary


class _PieceWriter:
    """Tokenizes pieces and writes them to a folder."""

    def __init__(self, encoding: pieces.Encoding, folder: pathlib.Path):
        self._encoder, self._folder = pieces.PieceEncoder(encoding), folder

    def __call__(self, task: tuple[int, pieces.Piece]) -> int:
        """Returns the index of the piece."""
        index, piece = task
        folder_lib.write_piece(self._folder, index, self._encoder.encode(piece))
        return index


def _modified(name: str) -> int:
    """Returns when a local file was last changed; 0 for URLs, of which not all say so."""
    return 0 if "://" in name else os.stat(name).st_mtime_ns


def _tokenize(
    folder: folder_lib.Folder,
    all_pieces: Sequence[pieces.Piece],
    encoding: pieces.Encoding,
    workers: int,
    report: Report | None,
) -> None:
    """Tokenizes and joins the pieces that are not in the folder yet."""

    def report_progress() -> None:
        counts = folder.counts
        if report is not None:
            report(Progress(counts.pieces, len(all_pieces), counts.documents, counts.tokens))

    report_progress()
    tasks = iter([(index, piece) for index, piece in enumerate(all_pieces) if not folder.finished(index)])
    make = functools.partial(_PieceWriter, encoding, folder.path)
    with processes.pool(make, workers=workers if workers > 1 else 0, setting="--workers") as submit:
        running = {submit(task) for task in itertools.islice(tasks, workers)}
        while running:
            done, running = concurrent.futures.wait(running, return_when="FIRST_COMPLETED")
            for written in done:
                folder.add(written.result())
                report_progress()
            running |= {submit(task) for task in itertools.islice(tasks, len(done))}


def _json(summary: dict[str, Any]) -> str:
    return json.dumps(summary, indent=2) + "\n"


def write_bin(
    out: str, paths: Sequence[str], options: Options | None = None, *, report: Report | None = None
) -> dict[str, Any]:
    """Writes a `.bin` and its JSON file, the `.bin` last, and returns the content of the JSON file.

    Args:
        out: path of the `.bin`. Finished pieces are in a hidden folder next to it until all are there. If this folder
            exists, its work is continued.
        paths: files, folders or globs to read.
        options: the way from documents to tokens.
        report: called with the progress after every piece.

    Raises:
        ValueError: `out` exists or is in one of `paths`, there is no separator, a document contains the separator or
            cannot be read or encoded, there is nothing to write, a worker process ended, or the folder holds pieces of
            other sources or options.
    """
    path = _new_output(out, paths)
    sidecar = tokens.sidecar(path)
    # An earlier call may have been stopped between the two files.
    if not folder_lib.folder_of(path).is_dir():
        _require_absent(sidecar)
    with _prepared(path, paths, options or Options(), report) as (folder, summary):
        # If the folder was there, the sidecar may be of a stopped command, or the user's.
        if os.path.lexists(sidecar) and not (sidecar.is_file() and sidecar.read_text() == _json(summary)):
            _require_absent(sidecar)
        with atomic.replace(sidecar) as draft:
            draft.write_text(_json(summary))
        os.replace(folder.tokens, path)
        folder.remove()
    return summary


def write_longcrawl64(
    out: str,
    paths: Sequence[str],
    options: Options | None = None,
    *,
    row_tokens: int = longcrawl64.ROW_TOKENS,
    report: Report | None = None,
) -> dict[str, Any]:
    """Writes a Zarr v2 array with rows of `row_tokens`, and returns the content of its `.zattrs`.

    Args:
        out: path of the array's folder, as in `write_bin`.
        paths: files, folders or globs to read.
        options: the way from documents to tokens.
        row_tokens: number of tokens in a row. Those after the last whole row are dropped.
        report: called with the progress after every piece.

    Raises:
        ValueError: as `write_bin`, or there are fewer tokens than one row, or `row_tokens` is below 1.
    """
    checks.require_at_least(1, **{"--row_tokens": row_tokens})
    path = _new_output(out, paths)
    with _prepared(path, paths, options or Options(), report) as (folder, summary):
        rows = summary["tokens"] // row_tokens
        if not rows:
            folder.remove()
            raise ValueError(
                f"the files hold {summary['tokens']} tokens, fewer than one row of {row_tokens}; "
                f"name more files or set a smaller --row_tokens"
            )
        partial = folder.path / "rows.zarr"
        shutil.rmtree(partial, ignore_errors=True)
        _write_rows(partial, folder.tokens, (rows, row_tokens), tokens.DTYPES[summary["token_dtype"]])
        summary |= {
            "rows": rows,
            "row_tokens": row_tokens,
            "dropped_tokens": summary["tokens"] - rows * row_tokens,
        }
        (partial / ".zattrs").write_text(_json(summary))
        partial.rename(path)
        folder.remove()
    return summary


def _write_rows(partial: pathlib.Path, flat: pathlib.Path, shape: tuple[int, int], dtype: np.dtype) -> None:
    """Writes the first tokens of a flat file as an array."""
    rows = np.memmap(flat, dtype, mode="r", shape=shape)
    # Chunks of zeros are written too, because the reader treats a missing chunk as an error.
    spec = {
        **longcrawl64.spec(str(partial)),
        "metadata": longcrawl64.metadata(*shape, dtype),
        "store_data_equal_to_fill_value": True,
    }
    array = tensorstore.open(spec, create=True).result()
    for start in range(0, shape[0], longcrawl64.CHUNKS[0]):
        stop = min(start + longcrawl64.CHUNKS[0], shape[0])
        array[start:stop].write(rows[start:stop]).result()
