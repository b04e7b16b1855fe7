"""Reads one column of parquet files, a range of rows at a time."""

import functools

import numpy as np
from jaxtyping import Shaped

from sympow_jax import extras, spelling
from sympow_jax.data import files
from sympow_jax.data.corpus import pieces

with extras.required("corpora", __name__):
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

# Rows that are decoded at a time. A whole row group of long documents might not fit in memory.
_BATCH_ROWS = 128
_OPEN_FILES = 16
# A row group of up to this many pieces of average size is not split.
_MAX_PIECES_PER_GROUP = 2

_TEXTS = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())


def _open(path: str) -> pq.ParquetFile:
    with files.errors(path):
        # Pre-buffering would hold the compressed column of a whole row group.
        return pq.ParquetFile(
            files.open_file(path), pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        )


def _holds_text(opened: pq.ParquetFile, path: str, column: str) -> bool:
    schema = opened.schema_arrow
    # Column `a.b` and field b of a column a have one path, by which pyarrow reads both.
    leaves = [opened.schema.column(index).path for index in range(len(opened.schema))]
    number = schema.names.count(column)
    if number != 1 or leaves.count(column) > 1:
        lack = "several columns" if number else "no column"
        columns = spelling.listed(map(repr, schema.names)) or "none"
        raise ValueError(
            f"{path} has {lack} {column!r}: there are {columns}; name one of them, or rename others"
        )
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind in _TEXTS:
        return True
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if any(check(kind) for check in lists) and pa.types.is_integer(kind.value_type):
        return False
    shown = spelling.cut(str(kind), 160)  # a struct names all its fields
    raise ValueError(
        f"column {column!r} of {path} is of type {shown}; it must hold text, or lists of token ids"
    )


def holds_text(file: files.File, column: str) -> bool:
    """Returns True if the column holds text, False if it holds token ids; only the footer is read.

    Raises:
        ValueError: the file is not a parquet file, or does not have such a column.
    """
    return _holds_text(_open(file.path), file.path, column)


class Reader:
    """Reader of pieces of parquet files, from one column of text or of lists of token ids.

    A piece starts at a row group, except that row groups larger than two pieces are split, and then decoded from their
    start.
    """

    def __init__(self, column: str):
        self._column = column
        self._open = functools.lru_cache(maxsize=_OPEN_FILES)(_open)

    def read(self, piece: pieces.Piece) -> tuple[list[int], list[bytes | Shaped[np.ndarray, " tokens"]]]:
        """Returns the rows of the documents of a piece that are not empty, and their texts or ids.

        Raises:
            ValueError: the file or a row group is corrupt, the column is missing or of another type, or a list has a
                null.
        """
        path = piece.file.path
        opened = self._open(path)
        texts = _holds_text(opened, path, self._column)
        sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
        starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        total, ends = int(starts[-1]), []
        for index in (piece.index, piece.index + 1):
            row = index * total // piece.count
            if 0 < index < piece.count and total:
                # A piece starts at a row group, unless the group is large.
                group = int(np.searchsorted(starts, row, side="right")) - 1
                begin, end = int(starts[group]), int(starts[group + 1])
                row = begin if (end - begin) * piece.count <= _MAX_PIECES_PER_GROUP * total else row
            ends.append(row)
        first, stop = ends
        positions: list[int] = []
        documents: list[bytes | np.ndarray] = []
        groups = np.searchsorted(starts, first, side="right") - 1, np.searchsorted(starts, stop)
        for group in range(*groups):
            row = int(starts[group])
            batches = opened.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[self._column])
            while row < stop:
                with files.errors(f"{path} (row group {group})"):
                    if (batch := next(batches, None)) is None:
                        break
                    column = batch.column(0)
                part = column[max(0, first - row) : max(0, stop - row)]
                begin = max(row, first)
                if texts:
                    if pa.types.is_dictionary(part.type):
                        part = part.dictionary_decode()
                    # Not by way of text, which would fail for the whole batch if one document is not UTF-8.
                    values = part.cast(pa.large_binary()).to_pylist()
                else:
                    lengths = pc.fill_null(pc.list_value_length(part), 0).to_numpy(zero_copy_only=False)
                    flat = pc.list_flatten(part)
                    if flat.null_count:
                        # Before to_numpy, which would turn the ids of all rows into floats.
                        wrong = begin + pc.list_parent_indices(part).filter(flat.is_null())[0].as_py()
                        raise ValueError(
                            f"{piece.name(wrong)} has a null among its token ids; correct the document"
                        )
                    values = np.split(flat.to_numpy(zero_copy_only=False), np.cumsum(lengths)[:-1])
                for i, value in enumerate(values):
                    if value is not None and len(value):
                        positions.append(begin + i)
                        documents.append(value)
                row += len(column)
        return positions, documents
