"""Labeled texts in tab-separated columns, one example per line, without quoting or escapes (GLUE's layout)."""

import functools
import math
import mmap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64, Integer, Shaped

from sympow_jax import config as config_lib
from sympow_jax import spelling
from sympow_jax.data import documents, files, rows, sources
from sympow_jax.data import tokenizer as tokenizer_lib

__all__ = ["Source", "Table", "TsvExamples"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class _Columns(NamedTuple):
    """Indices of a file's text and label columns; `width` is the number of columns of a line."""

    texts: list[int]
    label: int
    width: int


class _File(NamedTuple):
    """A memory-mapped file, and the range of each of its examples, without the line ending."""

    path: str
    key: str  # as in `files.File`
    content: mmap.mmap
    columns: _Columns
    starts: Int64[np.ndarray, " lines"]
    stops: Int64[np.ndarray, " lines"]
    first_line: int  # line number of the first example, counted from 1

    def fields(self, line: int) -> list[bytes]:
        cells = self.content[self.starts[line] : self.stops[line]].removesuffix(b"\r").split(b"\t")
        if len(cells) != self.columns.width:
            raise ValueError(
                f"{self.name(line)} has {_counted(len(cells))}, but the file's first line has {self.columns.width}; "
                f"columns are divided by single tabs and texts hold neither tabs nor line breaks; correct the line"
            )
        return cells

    def name(self, line: int) -> str:
        return f"{self.path} (line {self.first_line + line})"


def _counted(columns: int) -> str:
    return f"{columns} column{'' if columns == 1 else 's'}"


def _map(file: files.File) -> mmap.mmap:
    with files.errors(file.path):
        stream = files.open_file(file.path)
    with stream:
        if stream.read(1 + len(_BYTE_ORDER_MARK)) in (b"", _BYTE_ORDER_MARK):
            raise ValueError(f"{file.path} is empty; it must hold lines of columns divided by tabs")
        with files.errors(file.path):
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _line_starts(content: mmap.mmap, start: int) -> Iterator[int]:
    while start < len(content):
        yield start
        start = content.find(b"\n", start) + 1 or len(content) + 1
    yield start  # start of the line that would follow the last one


def _find_columns(first: bytes, config: config_lib.DataConfig, path: str) -> tuple[_Columns, bool]:
    """Returns the columns, and whether the first line is a header that names them."""
    names = [field.decode("utf-8", "replace") for field in first.split(b"\t")]
    columns = [*config.text_columns, config.label_column]
    numbered = all(name.isdecimal() for name in columns)
    if numbered:
        names = [str(1 + column) for column in range(len(names))]
    for name in columns:
        if name not in names:
            available = f"columns 1 to {len(names)}" if numbered else spelling.listed(map(repr, names))
            raise ValueError(
                f"{path} has no column {name!r}: there are {available}; correct data.text_columns and "
                f"data.label_column, or, where the first line is no header, give the numbers of all columns"
            )
        if names.count(name) > 1:
            raise ValueError(
                f"{path} has {names.count(name)} columns named {name!r}; give each a name of its own in the first line"
            )
    *texts, label = (names.index(name) for name in columns)
    return _Columns(texts, label, len(names)), not numbered


def _open(file: files.File, config: config_lib.DataConfig) -> _File:
    content = _map(file)
    begin = len(_BYTE_ORDER_MARK) if content[:3] == _BYTE_ORDER_MARK else 0
    starts = np.fromiter(_line_starts(content, begin), np.int64)
    first = content[begin : starts[1] - 1].removesuffix(b"\r")
    columns, header = _find_columns(first, config, file.path)
    starts = starts[int(header) :]
    if len(starts) < 2:
        raise ValueError(f"{file.path} has no examples, only a header; name a file that has some")
    return _File(file.path, file.key, content, columns, starts[:-1], starts[1:] - 1, 1 + header)


def _label_reader(
    config: config_lib.DataConfig, task: config_lib.TaskConfig
) -> Callable[[bytes], int | float]:
    """Returns a function from a label's text to its value, which raises ValueError for an invalid label."""
    if task.predicted is config_lib.Predicted.NUMBER:

        def number(text: bytes) -> float:
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if not math.isfinite(value):
                raise ValueError(f"is not a finite number, as task {task.name!r} predicts")
            return value

        return number

    classes = task.classes or 0
    if config.labels and len(config.labels) != classes:
        raise ValueError(
            f"data.labels names {len(config.labels)} classes, but task.classes is {classes}; make them agree"
        )
    named = {name.encode(): index for index, name in enumerate(config.labels or map(str, range(classes)))}
    known = (
        f"one of data.labels {spelling.listed(map(repr, config.labels))}"
        if config.labels
        else f"an integer from 0 to {classes - 1} (task.classes is {classes}, data.labels names none)"
    )

    def index(text: bytes) -> int:
        if text not in named:
            raise ValueError(f"is not {known}")
        return named[text]

    return index


class Table:
    """Labeled lines of one or more files."""

    def __init__(self, found: list[files.File], config: config_lib.DataConfig):
        self.found, self._files = found, [_open(file, config) for file in found]
        counts = [len(file.starts) for file in self._files]
        self._file = np.repeat(np.arange(len(counts)), counts)
        self._line = np.concatenate([np.arange(count) for count in counts])

    def __len__(self) -> int:
        return len(self._line)

    def held_out(self, fraction: float) -> Bool[np.ndarray, " lines"]:
        """Returns a mask of the lines that are held out by their hashes."""
        masks = (files.held_out([file.key], np.arange(len(file.starts)), fraction) for file in self._files)
        return np.concatenate([*masks])

    def name(self, line: int) -> str:
        """Returns the file and the number of a line, for errors."""
        return self._files[self._file[line]].name(self._line[line])

    def read(self, line: int) -> tuple[list[bytes], bytes]:
        """Returns the texts and the label of a line."""
        file = self._files[self._file[line]]
        fields = file.fields(self._line[line])
        return [fields[column] for column in file.columns.texts], fields[file.columns.label]


class TsvExamples:
    """The training or the held-out lines, tokenized on access.

    Construction reads every line and checks its number of columns, its label and that it has a text. Access checks that
    the line has tokens and that these are in the vocabulary.
    """

    def __init__(
        self,
        table: Table,
        lines: Int64[np.ndarray, " n"],
        config: config_lib.DataConfig,
        task: config_lib.TaskConfig,
        *,
        vocab_size: int,
    ):
        self._table, self._lines, self._length = table, lines, config.context_length
        self._tokenizer = tokenizer_lib.load(config.text_tokenizer, setting="data.tokenizer")
        self._cut = self._halves if task.dual_encoder else self._joined
        if len(config.text_columns) == 2 and not task.dual_encoder:
            self._check_separator(config, vocab_size)
        self._vocab_size = vocab_size
        self._labels = self._read_labels(config, task)

    def _check_separator(self, config: config_lib.DataConfig, vocab_size: int):
        self._separator = self._tokenizer.end_of_text(
            config.document_separator, setting="data.document_separator"
        )
        if not 0 <= self._separator < vocab_size:
            raise ValueError(
                f"the id between two texts is {self._separator}, but model.vocab_size is {vocab_size}; raise it, or "
                f"set data.document_separator"
            )
        if self._length < 3:
            raise ValueError(
                f"data.context_length is {self._length}; two texts and a separator need at least 3"
            )

    def _read_labels(
        self, config: config_lib.DataConfig, task: config_lib.TaskConfig
    ) -> Shaped[np.ndarray, " n"]:
        read = _label_reader(config, task)
        labels = np.empty(len(self._lines), rows.label_dtype(task))
        for index, line in enumerate(self._lines):
            texts, label = self._table.read(line)
            try:
                labels[index] = read(label)
            except ValueError as error:
                shown = spelling.shown(label.decode("utf-8", "replace"))
                raise ValueError(f"{self._table.name(line)}: label {shown} {error}") from None
            if not any(texts):
                missing = "no text" if len(texts) == 1 else "two empty texts"
                raise ValueError(f"{self._table.name(line)} has {missing}; leave the line out")
        return labels

    def __len__(self) -> int:
        return len(self._lines)

    # Reading a line of a memory-mapped file costs about the same in any order.
    together = property(__len__)

    def row(self, index: int, key: tuple[int, ...]) -> rows.Row:
        """Returns the tokens and the label of example `index`; `key` is unused."""
        line = self._lines[index]
        name = self._table.name(line)
        texts = [
            self._tokenizer.encode_document(text, name=f"a text of {name}", begin=False)
            for text in self._table.read(line)[0]
        ]
        # Before they are cut, because two joined texts have the separator even if both are empty.
        if not any(map(len, texts)):
            place = "the text" if len(texts) == 1 else "either text"
            raise ValueError(f"{name}: the tokenizer finds no token in {place}; leave the line out")
        texts = self._cut(texts)
        for tokens in texts:
            documents.check_vocabulary(tokens, vocab_size=self._vocab_size, name=name)
        return {**rows.padded(texts, self._length), "labels": np.array(self._labels[index])}

    def _joined(self, texts: list[Integer[np.ndarray, " _"]]) -> list[Integer[np.ndarray, " _"]]:
        """Returns one text for a row; of two texts that do not fit, the longer is truncated first."""
        if len(texts) == 1:
            return [texts[0][: self._length]]
        one, two = texts
        room = self._length - 1
        first = min(len(one), max(room - len(two), room - room // 2))
        return [np.concatenate([one[:first], [self._separator], two[: room - first]])]

    def _halves(self, texts: list[Integer[np.ndarray, " _"]]) -> list[Integer[np.ndarray, " _"]]:
        """Returns two texts for a row, each truncated to half of it."""
        return [text[: self._length // 2] for text in texts]


class Source:
    """Labeled lines; a folder stands for its `.tsv` files.

    Raises:
        ValueError: nothing matches, a file is empty or cannot be read, a column does not exist or its name is
            repeated, a line has a different number of columns or no text, a label is not a class or not a number, or
            the tokenizer does not exist.
    """

    def __init__(self, config: config_lib.DataConfig):
        self._config = config
        self._table = functools.cache(
            lambda heldout: Table(sources.find_all(config, heldout=heldout), config)
        )

    def _lines(self, *, heldout: bool) -> tuple[Table, Int64[np.ndarray, " n"]]:
        """Returns the table that has the training or the held-out lines, and their indices."""
        table = self._table(heldout and bool(self._config.heldout_paths))
        if self._config.heldout_paths:
            return table, np.arange(len(table))
        return table, np.flatnonzero(table.held_out(self._config.heldout_fraction) == heldout)

    def examples(self, task: config_lib.TaskConfig, *, vocab_size: int, heldout: bool) -> TsvExamples:
        """Returns the training or the held-out lines."""
        table, lines = self._lines(heldout=heldout)
        return TsvExamples(table, lines, self._config, task, vocab_size=vocab_size)

    def describe(self) -> dict[str, Any]:
        """Returns counts, the tokenizer, and the SHA-256 of every file's key, size and bytes."""
        sides = [self._lines(heldout=side) for side in (False, True)]
        matches = sides[0][0].found + (sides[1][0].found if self._config.heldout_paths else [])
        return sources.described(
            matches,
            *(len(lines) for _, lines in sides),
            tokenizer=tokenizer_lib.load(self._config.text_tokenizer, setting="data.tokenizer").identity,
            digest=files.digest(matches, lambda file: [_map(file)]),
            digest_of="names, sizes and contents",
        )
