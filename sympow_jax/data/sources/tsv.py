"""Labeled texts in tab-separated columns, one example per line, without quoting or escapes (GLUE's layout)."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from sympow_jax import config as config_lib
from sympow_jax import spelling
from sympow_jax.data import documents, files, rows, sources
from sympow_jax.data import tokenizer as tokenizer_lib

__all__ = ["Source", "TsvExamples"]


class _File(NamedTuple):
    """Lines of a file without its header, and the indices of their columns."""

    file: files.File
    lines: list[bytes]
    first_line: int  # number of the first example, counted from 1
    texts: list[int]
    label: int
    width: int  # number of columns

    def name(self, line: int) -> str:
        return f"{self.file.path} (line {self.first_line + line})"

    def read(self, line: int) -> tuple[list[bytes], bytes]:
        """Returns the texts and the label of a line."""
        cells = self.lines[line].removesuffix(b"\r").split(b"\t")
        if len(cells) != self.width:
            raise ValueError(
                f"{self.name(line)} has another number of columns, {len(cells)}, than the first line, {self.width}; "
                f"columns are divided by single tabs and texts hold neither tabs nor line breaks; correct the line"
            )
        return [cells[column] for column in self.texts], cells[self.label]


def _open(file: files.File, config: config_lib.DataConfig) -> _File:
    content = files.read(file.path).removeprefix(b"\xef\xbb\xbf")  # a byte order mark
    if not content:
        raise ValueError(f"{file.path} is empty; it must hold lines of columns divided by tabs")
    lines = content.removesuffix(b"\n").split(b"\n")
    names = lines[0].removesuffix(b"\r").decode("utf-8", "replace").split("\t")
    columns = [*config.text_columns, config.label_column]
    header = not all(name.isdecimal() for name in columns)
    if not header:
        names = [str(1 + column) for column in range(len(names))]
    for name in columns:
        if names.count(name) != 1:
            lack = "no column" if name not in names else f"{names.count(name)} columns named"
            available = spelling.listed(map(repr, names)) if header else f"columns 1 to {len(names)}"
            raise ValueError(
                f"{file.path} has {lack} {name!r}: there are {available}; correct data.text_columns and "
                f"data.label_column, or, where the first line is no header, give the numbers of all columns"
            )
    if len(lines) == header:
        raise ValueError(f"{file.path} has no examples, only a header; name a file that has some")
    *texts, label = map(names.index, columns)
    return _File(file, lines[header:], 1 + header, texts, label, len(names))


class TsvExamples:
    """The training or the held-out lines, which are checked at once and tokenized on access."""

    def __init__(
        self,
        lines: list[tuple[_File, int]],
        config: config_lib.DataConfig,
        task: config_lib.TaskConfig,
        *,
        vocab_size: int,
    ):
        self._lines, self._length, self._vocab_size = lines, config.context_length, vocab_size
        self._dual, self._separator = task.dual_encoder, -1
        self._tokenizer = tokenizer_lib.load(config.text_tokenizer, setting="data.tokenizer")
        if len(config.text_columns) == 2 and not task.dual_encoder:
            setting = "data.document_separator"
            self._separator = self._tokenizer.end_of_text(config.document_separator, setting=setting)
            if self._separator >= vocab_size:
                raise ValueError(
                    f"the id between two texts is {self._separator}, but model.vocab_size is {vocab_size}; raise it, "
                    f"or set {setting}"
                )
            if self._length < 3:
                raise ValueError(f"data.context_length is {self._length}; two texts and a separator need 3")
        numbers, classes = task.predicted is config_lib.Predicted.NUMBER, task.classes or 0
        names = config.labels or [*map(str, range(classes))]
        if not numbers and len(names) != classes:
            raise ValueError(
                f"data.labels names {len(names)} classes, but task.classes is {classes}; make them agree"
            )
        named = {name.encode(): i for i, name in enumerate(names)}
        known = f"a finite number, as task {task.name!r} predicts"
        if not numbers:
            known = f"one of {spelling.listed(map(repr, names))}; correct it, or data.labels and task.classes"
        self._labels = np.empty(len(lines), np.float32 if numbers else np.int32)
        for index, (file, line) in enumerate(lines):
            texts, label = file.read(line)
            try:
                value = float(label) if numbers else named[label]
            except (ValueError, KeyError):
                value = math.nan
            if not math.isfinite(value):
                shown = spelling.shown(label.decode("utf-8", "replace"))
                raise ValueError(f"{file.name(line)}: label {shown} is not {known}")
            if not any(texts):
                raise ValueError(f"{file.name(line)} has no text; leave the line out")
            self._labels[index] = value

    def __len__(self) -> int:
        return len(self._lines)

    together = property(__len__)  # any order of reading costs the same

    def row(self, index: int, key: tuple[int, ...]) -> rows.Row:
        """Returns the tokens and the label of example `index`; `key` is unused."""
        file, line = self._lines[index]
        name = file.name(line)
        texts = [
            self._tokenizer.encode_document(text, name=f"a text of {name}", begin=False)
            for text in file.read(line)[0]
        ]
        # Before they are joined, because two joined texts have the separator even if both are empty.
        if not any(map(len, texts)):
            raise ValueError(f"{name}: the tokenizer finds no token in the text; leave the line out")
        if self._dual:
            texts = [text[: self._length // 2] for text in texts]
        elif len(texts) == 2:
            # The longer text is truncated first.
            one, two = texts
            room = self._length - 1
            first = min(len(one), max(room - len(two), room - room // 2))
            texts = [np.concatenate([one[:first], [self._separator], two[: room - first]])]
        else:
            texts = [texts[0][: self._length]]
        for tokens in texts:
            documents.check_vocabulary(tokens, vocab_size=self._vocab_size, name=lambda: name)
        return {**rows.padded(texts, self._length), "labels": np.array(self._labels[index])}


class Source:
    """Labeled lines; a folder stands for its `.tsv` files."""

    def __init__(self, config: config_lib.DataConfig):
        self._config = config
        self._open = functools.cache(
            lambda heldout: [_open(file, config) for file in sources.find_all(config, heldout=heldout)]
        )

    def _lines(self, *, heldout: bool) -> list[tuple[_File, int]]:
        """Returns the files and indices of the training or the held-out lines, in order."""
        config, lines = self._config, []
        for file in self._open(heldout and bool(config.heldout_paths)):
            chosen = files.on_side(config, [file.file.key], np.arange(len(file.lines)), heldout=heldout)
            lines += [(file, line) for line in np.flatnonzero(chosen).tolist()]
        return lines

    def side(self, task: config_lib.TaskConfig, *, vocab_size: int, heldout: bool) -> TsvExamples:
        """Returns the training or the held-out lines."""
        return TsvExamples(self._lines(heldout=heldout), self._config, task, vocab_size=vocab_size)

    def describe(self) -> dict[str, Any]:
        """Returns counts, the tokenizer, and the SHA-256 of every file's key, size and bytes."""
        matches = [file.file for side in files.sides(self._config) for file in self._open(side)]
        return sources.described(
            matches,
            *(len(self._lines(heldout=side)) for side in (False, True)),
            tokenizer=tokenizer_lib.load(self._config.text_tokenizer, setting="data.tokenizer").identity,
            digest=files.digest(matches, lambda file: [files.read(file.path)]),
            digest_of="names, sizes and contents",
        )
