"""Turns text into token files.

Every file is a document. `bin` writes the tokens of all documents, each followed by the separator. Next to
it, it writes a JSON file with the tokenizer, the size of its vocabulary, the separator and the dtype.

`longcrawl64` writes the same tokens as a Zarr v2 array in LongCrawl64's layout: documents and separators are
concatenated and cut into rows of `row_tokens`. A long document continues in the next row, short documents
share a row, and nothing is padded. The rest at the end, less than a row, is dropped, and its size is printed.
(LongCrawl64 itself has one document per row: it has only long documents, without their ends.)
"""

import json
import os
import pathlib
import tempfile
from typing import Any

import numpy as np
import tensorstore
from jaxtyping import Integer

from sympow_jax import atomic
from sympow_jax.data import files, longcrawl64, tokens
from sympow_jax.data import tokenizer as tokenizer_lib

__all__ = ["write_bin", "write_longcrawl64"]


def _encoded(
    path: pathlib.Path, tokenizer: tokenizer_lib.Tokenizer, separator: int
) -> Integer[np.ndarray, " tokens"]:
    try:
        ids = tokenizer.encode(path.read_bytes())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 at byte {error.start}; leave it out, convert it, or use --tokenizer=byte"
        ) from error
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if np.any(ids == separator):
        raise ValueError(
            f"{path} holds id {separator}, which separates documents; "
            f"leave the file out or set another --separator"
        )
    return ids


def _new(out: str | pathlib.Path) -> pathlib.Path:
    path = pathlib.Path(out).expanduser()
    if os.path.lexists(path):
        raise ValueError(f"{out} exists; remove it or choose another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _write_tokens(
    path: pathlib.Path, sources: list[files.File], tokenizer: tokenizer_lib.Tokenizer, separator: int | None
) -> dict[str, Any]:
    """Writes the concatenated tokens of the documents that are not empty, and returns a description of them."""
    separator = tokenizer.separator if separator is None else separator
    if separator is None:
        raise ValueError(f"the tokenizer {tokenizer.name} names no end of text; set --separator to an id")
    vocab_size = max(tokenizer.vocab_size, separator + 1)
    token_dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    dtype, documents, count = tokens.DTYPES[token_dtype], 0, 0
    with path.open("wb") as stream:
        for file in sources:
            if file.size:
                document = _encoded(file.path, tokenizer, separator)
                stream.write(np.append(document, separator).astype(dtype).tobytes())
                documents, count = documents + 1, count + len(document) + 1
    if not documents:
        raise ValueError(f"every file is empty ({len(sources)} found); name files that hold text")
    return {
        "tokenizer": tokenizer.name,
        "vocab_size": vocab_size,
        "separator": separator,
        "token_dtype": token_dtype,
        "documents": documents,
        "tokens": count,
    }


def write_bin(
    out: str, sources: list[files.File], tokenizer: tokenizer_lib.Tokenizer, *, separator: int | None = None
) -> dict[str, Any]:
    """Writes a `.bin` and its JSON file, the `.bin` last, and returns the content of the JSON file.

    Raises:
        ValueError: `out` exists, there is no separator, a file contains the separator or cannot be read, or there is
            nothing to write.
    """
    path = _new(out)
    sidecar = _new(tokens.sidecar(path))
    with atomic.replace(path) as draft:
        summary = _write_tokens(draft, sources, tokenizer, separator)
        with atomic.replace(sidecar) as description:
            description.write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def write_longcrawl64(
    out: str,
    sources: list[files.File],
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    separator: int | None = None,
    row_tokens: int = longcrawl64.ROW_TOKENS,
) -> dict[str, Any]:
    """Writes a Zarr v2 array with rows of `row_tokens`, and returns the content of its `.zattrs`.

    Raises:
        ValueError: as `write_bin`, or there are fewer tokens than one row.
    """
    path = _new(out)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".prepare-") as folder:
        flat = pathlib.Path(folder) / "tokens.bin"
        summary = _write_tokens(flat, sources, tokenizer, separator)
        rows = summary["tokens"] // row_tokens
        if not rows:
            raise ValueError(
                f"the files hold {summary['tokens']} tokens, fewer than one row of {row_tokens}; "
                f"name more files or set a smaller --row_tokens"
            )
        dtype = tokens.DTYPES[summary["token_dtype"]]
        stream = np.memmap(flat, dtype, mode="r", shape=(rows, row_tokens))
        partial = pathlib.Path(folder) / "rows.zarr"
        # Chunks of zeros are written too, because the reader treats a missing chunk as an error.
        writing = {
            **longcrawl64.spec(str(partial)),
            "metadata": longcrawl64.metadata(rows, row_tokens, dtype),
            "store_data_equal_to_fill_value": True,
        }
        array = tensorstore.open(writing, create=True).result()
        for start in range(0, rows, longcrawl64.CHUNKS[0]):
            stop = min(start + longcrawl64.CHUNKS[0], rows)
            array[start:stop].write(stream[start:stop]).result()
        summary |= {
            "rows": rows,
            "row_tokens": row_tokens,
            "dropped_tokens": summary["tokens"] - rows * row_tokens,
        }
        (partial / ".zattrs").write_text(json.dumps(summary, indent=2) + "\n")
        partial.rename(path)
    return summary
