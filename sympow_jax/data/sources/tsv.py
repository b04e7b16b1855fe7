"""Labeled texts in tab-separated columns, one example per line, without quoting or escapes (GLUE's layout)."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from sympow_jax import config as config_lib
from sympow_jax import spelling
from sympow_jax.data import documents, files, rows, sources
from sympow_jax.data import tokenizer as tokenizer_lib


class _Example(NamedTuple):
    """The texts and the label of a line, and where it is, for errors."""

    texts: list[bytes]
    label: bytes
    name: str


def _read(file: files.File, config: config_lib.DataConfig) -> list[_Example]:
    """Returns the examples of a file, in order."""
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
    examples = []
    for number, line in enumerate(lines[header:], 1 + header):
        cells, name = line.removesuffix(b"\r").split(b"\t"), f"{file.path} (line {number})"
        if len(cells) != len(names):
            raise ValueError(
                f"{name} has another number of columns, {len(cells)}, than the first line, {len(names)}; columns are "
                f"divided by single tabs and texts hold neither tabs nor line breaks; correct the line"
            )
        examples.append(_Example([cells[column] for column in texts], cells[label], name))
    return examples


class Source(sources.Source):
    """Labeled lines; a folder stands for its `.tsv` files."""

    def open_paths(self, setting: str, paths: tuple[str, ...]) -> list[tuple[files.File, list[_Example]]]:
        """Returns the files and their examples."""
        return [(file, _read(file, self.config)) for file in super().open_paths(setting, paths)]

    def _examples(self, *, heldout: bool) -> list[_Example]:
        examples: list[_Example] = []
        for file, found in self.opened(heldout=heldout):
            chosen = files.on_side(self.config, [file.key], np.arange(len(found)), heldout=heldout)
            examples += itertools.compress(found, chosen)
        return examples

    def side(self, *, heldout: bool) -> rows.Labeled:
        """Returns the training or the held-out lines, which are checked at once and tokenized on access."""
        config, task, vocab_size = self.config, self.task, self.vocab_size
        length, examples = config.context_length, self._examples(heldout=heldout)
        tokenizer, separator = tokenizer_lib.load(config.text_tokenizer, setting="data.tokenizer"), -1
        if len(config.text_columns) == 2 and not task.dual_encoder:
            setting = "data.document_separator"
            separator = tokenizer.end_of_text(config.document_separator, setting=setting)
            if separator >= vocab_size:
                raise ValueError(
                    f"the id between two texts is {separator}, but model.vocab_size is {vocab_size}; raise it, or set "
                    f"{setting}"
                )
            if length < 3:
                raise ValueError(f"data.context_length is {length}; two texts and a separator need 3")
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
        labels = np.empty(len(examples), np.float32 if numbers else np.int32)
        for index, (texts, label, name) in enumerate(examples):
            try:
                value = float(label) if numbers else named[label]
            except (ValueError, KeyError):
                value = math.nan
            if not abs(value) <= float(np.finfo(np.float32).max):  # NaN included
                shown = spelling.shown(label.decode("utf-8", "replace"))
                raise ValueError(f"{name}: label {shown} is not {known}")
            if not any(texts):
                raise ValueError(f"{name} has no text; leave the line out")
            labels[index] = value

        def row(index: int, key: tuple[int, ...]) -> rows.Row:
            written, _, name = examples[index]
            texts = [
                tokenizer.encode_document(text, name=f"a text of {name}", begin=False) for text in written
            ]
            # Before they are joined, because two joined texts have the separator even if both are empty.
            if not any(map(len, texts)):
                raise ValueError(f"{name}: the tokenizer finds no token in the text; leave the line out")
            if task.dual_encoder:
                texts = [text[: length // 2] for text in texts]
            elif len(texts) == 2:
                # The longer text is truncated first.
                one, two = texts
                first = min(len(one), max(length - 1 - len(two), length // 2))
                texts = [np.concatenate([one[:first], [separator], two[: length - 1 - first]])]
            else:
                texts = [texts[0][:length]]
            for tokens in texts:
                documents.check_vocabulary(tokens, vocab_size=vocab_size, name=lambda: name)
            return {**rows.padded(texts, length), "labels": np.array(labels[index])}

        return rows.Labeled(len(examples), row)

    def describe(self) -> dict[str, Any]:
        """Returns counts, the tokenizer, and the SHA-256 of every file's key, size and bytes."""
        matches = [file for opened in self.all_opened() for file, _ in opened]
        return sources.described(
            matches,
            *(len(self._examples(heldout=side)) for side in (False, True)),
            tokenizer=tokenizer_lib.load(self.config.text_tokenizer, setting="data.tokenizer").identity,
            digest=files.digest(matches, lambda file: [files.read(file.path)]),
            digest_of="names, sizes and contents",
        )
