"""Reads one column of parquet files, a range of rows at a time."""

import contextlib
import functools
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Int32, Int64

from sympow_jax import spelling
from sympow_jax.data.corpus import blocks, files

__all__ = ["ParquetReader", "holds_text"]

# Rows that are decoded at a time. A whole row group of long documents might not fit in memory.
_BATCH_ROWS = 128
# Most token ids of a row group that may be stored in less than a bit each, as runs of one id are.
_MAX_REPEATED_IDS = 1 << 24
_OPEN_FILES = 16
# Characters of the type of a column that an error shows. A struct names all its fields.
_MAX_TYPE_CHARACTERS = 160
# A row group of up to this many pieces of average size is not split.
_MAX_PIECES_PER_GROUP = 2


@contextlib.contextmanager
def _arrow_errors(place: str) -> Iterator[None]:
    try:
        yield
    except MemoryError:  # an ArrowException too
        raise
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{place} cannot be read: {spelling.one_line(error)}; copy or make the file again"
        ) from error


class _GroupReader:
    """Reads rows of one row group, in order."""

    def __init__(self, opened: pq.ParquetFile, group: int, column: str):
        self.row = 0  # next row
        self._batches = opened.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[column])
        self._rest: pa.Array = pa.nulls(0)

    def read(self, start: int, stop: int) -> Iterator[pa.Array]:
        """Yields parts of rows start .. stop - 1 of the group; rows before `start` are skipped."""
        while self.row < stop:
            if not len(self._rest):
                batch = next(self._batches, None)
                if batch is None:
                    raise pa.ArrowInvalid(f"it has {self.row} rows, fewer than its metadata says")
                self._rest = batch.column(0)
            skips = self.row < start
            part = self._rest[: (start if skips else stop) - self.row]
            self._rest = self._rest[len(part) :]
            self.row += len(part)
            if not skips:
                yield part


class ParquetReader:
    """Reader of pieces of parquet files, from one column of text or of lists of token ids.

    A piece starts at a row group, except that row groups larger than two pieces are split. A split group is decoded
    once if its pieces are read in order; otherwise, it is decoded from its start for each piece.
    """

    def __init__(self, column: str, *, texts: bool):
        self._column, self._texts = column, texts
        self._open = functools.lru_cache(maxsize=_OPEN_FILES)(functools.partial(_open, column=column))
        self._last: tuple[str, int, _GroupReader] | None = None

    def read(self, piece: files.Piece) -> blocks.Block:
        """Returns the documents of a piece.

        Raises:
            ValueError: the file or a row group is corrupt, or the column is missing or not of the type that is read, or
                has a null or an id outside 0 .. 2^31 - 1 in a list, or decodes to more than a GiB.
        """
        url = piece.file.url
        opened = self._open(url)
        if _holds_text(opened, url, self._column) != self._texts:
            raise ValueError(
                f"column {self._column!r} of {url} holds {blocks.KINDS[not self._texts]}, but the first file's holds "
                f"{blocks.KINDS[self._texts]}; all must be of one type"
            )
        sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
        starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        first = _boundary(starts, piece.index, piece.count)
        stop = _boundary(starts, piece.index + 1, piece.count)
        positions: list[int] = []
        documents: list[blocks.Document] = []
        row, size = first, 0
        groups = np.searchsorted(starts, first, side="right") - 1, np.searchsorted(starts, stop)
        for group in range(*groups):
            begin, end = max(first, starts[group]), min(stop, starts[group + 1])
            for part in self._parts(opened, url, group, begin - starts[group], end - starts[group]):
                size += _decoded_bytes(part)
                if size > blocks.MAX_PIECE_BYTES:
                    raise ValueError(
                        f"{url} decodes to more than {blocks.MAX_PIECE_BYTES} bytes from row {first} to "
                        f"{row + len(part)}, far more than text does; check the file, or write it in smaller row groups"
                    )
                values = _texts(part) if self._texts else _ids(part, url, row)
                for i, value in enumerate(values):
                    if value is not None and len(value):
                        positions.append(row + i)
                        documents.append(value)
                row += len(part)
        return blocks.Block(url, "row", np.array(positions, np.int64), documents)

    def _parts(
        self, opened: pq.ParquetFile, url: str, group: int, start: int, stop: int
    ) -> Iterator[pa.Array]:
        reader = self._last[2] if self._last is not None and self._last[:2] == (url, group) else None
        with _arrow_errors(f"row group {group} of {url}"):
            if reader is None or reader.row > start:
                if not self._texts:
                    _check_repeated(opened, url, group, self._column)
                reader = _GroupReader(opened, group, self._column)
                self._last = url, group, reader
            yield from reader.read(start, stop)


def holds_text(file: files.CorpusFile, column: str) -> bool:
    """Returns True if the column holds text, False if it holds token ids.

    Raises:
        ValueError: the file is not a parquet file, or has no such column, or the column holds something else.
    """
    return _holds_text(_open(file.url, column), file.url, column)


_TEXT_CHECKS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
)
_LIST_CHECKS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def _holds_text(opened: pq.ParquetFile, url: str, column: str) -> bool:
    schema = opened.schema_arrow
    if column not in schema.names:
        columns = spelling.listed(map(repr, schema.names)) or "none"
        raise ValueError(f"{url} has no column {column!r}: there are {columns}; name one of them")
    # Column `a.b` and field b of a column a have one path, by which pyarrow reads both.
    if (number := max(schema.names.count(column), _leaf_paths(opened).count(column))) > 1:
        raise ValueError(f"{url} has {number} columns {column!r}; rename all but one")
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if any(check(kind) for check in _TEXT_CHECKS):
        return True
    if any(check(kind) for check in _LIST_CHECKS) and pa.types.is_integer(kind.value_type):
        return False
    shown = spelling.cut(str(kind), _MAX_TYPE_CHARACTERS)
    raise ValueError(
        f"column {column!r} of {url} is of type {shown}; it must hold text, or lists of token ids"
    )


def _open(url: str, column: str) -> pq.ParquetFile:
    # Pre-buffering would hold the compressed column of a whole row group.
    open_file = functools.partial(
        pq.ParquetFile,
        files.CorpusStream(url),
        pre_buffer=False,
        buffer_size=1 << 20,
        page_checksum_verification=True,
    )
    with _arrow_errors(url):
        opened = open_file()
        if column not in _leaf_paths(opened):  # it is missing, or of lists
            return opened
        # Read as indices into the texts that differ: a file of a megabyte can repeat one until no memory is left.
        return open_file(metadata=opened.metadata, read_dictionary=[column])


def _leaf_paths(opened: pq.ParquetFile) -> list[str]:
    return [opened.schema.column(index).path for index in range(len(opened.schema))]


def _check_repeated(opened: pq.ParquetFile, url: str, group: int, column: str) -> None:
    """Raises ValueError if the lists of a row group have runs of one id that would fill the memory when decoded.

    Rows are decoded a few at a time, but a row of any length is a few bytes if it repeats one id.
    """
    leaf = next(i for i, path in enumerate(_leaf_paths(opened)) if path.startswith(f"{column}."))
    stored = opened.metadata.row_group(group).column(leaf)
    if stored.num_values > max(_MAX_REPEATED_IDS, 8 * stored.total_uncompressed_size):
        raise ValueError(
            f"row group {group} of {url} has {stored.num_values} token ids in {stored.total_uncompressed_size} bytes, "
            f"so they are hardly a text; check the file, or leave it out"
        )


def _boundary(starts: Int64[np.ndarray, " groups+1"], index: int, count: int) -> int:
    """Returns the first row of piece `index` of `count`; `starts` are the first rows of row groups."""
    rows = int(starts[-1])
    row = index * rows // count
    if index in (0, count) or not rows:
        return row
    group = int(np.searchsorted(starts, row, side="right")) - 1
    begin, end = int(starts[group]), int(starts[group + 1])
    return begin if (end - begin) * count <= _MAX_PIECES_PER_GROUP * rows else row


def _decoded_bytes(part: pa.Array) -> int:
    """Returns the size of the documents of consecutive rows, as UTF-8 or as 4 bytes for each token id."""
    if pa.types.is_dictionary(part.type):
        return pc.sum(pc.binary_length(part.dictionary).take(part.indices)).as_py() or 0
    return 4 * (pc.sum(pc.list_value_length(part)).as_py() or 0)


def _texts(part: pa.Array) -> list[bytes | None]:
    if pa.types.is_dictionary(part.type):
        part = part.dictionary_decode()
    # Not by way of text, which would fail for the whole batch if one document is not UTF-8.
    return part.cast(pa.large_binary()).to_pylist()


def _ids(part: pa.Array, url: str, row: int) -> list[Int32[np.ndarray, " tokens"]]:
    """Returns the token ids of consecutive rows, of which the first is row `row` of the file."""
    lengths = pc.fill_null(pc.list_value_length(part), 0).to_numpy(zero_copy_only=False)
    flat = pc.list_flatten(part)
    if flat.null_count:
        # Before to_numpy, which would turn the ids of all rows into floats.
        wrong = pc.list_parent_indices(part).filter(flat.is_null())[0].as_py()
        raise ValueError(f"{url} (row {row + wrong}) has a null among its token ids; correct the document")
    values = np.split(flat.to_numpy(zero_copy_only=False), np.cumsum(lengths)[:-1])
    return [blocks.as_ids(value, f"{url} (row {row + i})") for i, value in enumerate(values)]
