"""Settings of a run's data."""

import dataclasses
from typing import NamedTuple

from sympow_jax.config import checks, fields
from sympow_jax.config.task import Predicted


class Kind(NamedTuple):
    """Properties of a value of `data.source`."""

    module: str  # of `sympow_jax.data.sources`
    predicted: tuple[Predicted, ...]  # quantities that may be
    suffixes: tuple[str, ...] = ("",)  # of its files in a folder; none if it reads no single files
    corpus: bool = False  # larger than memory and read in order only
    stored: bool = False  # tokens that were written earlier
    generated: bool = False  # it reads no files and always has held-out examples


_TOKENS = (Predicted.TOKEN, Predicted.ATTENTION)
_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
# Endings of the names of compressed JSON lines; parquet compresses its own columns.
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_LINES = tuple(x + end for end in ("", *COMPRESSIONS) for x in (".jsonl", ".ndjson", ".json"))

# A new source is a row here and a module.
SOURCES = {
    "text": Kind("text", _TOKENS),
    "tokens": Kind("tokens", _TOKENS, (".bin",), stored=True),
    "longcrawl64": Kind("zarr", _TOKENS, (), stored=True),
    "parquet": Kind("corpus", _TOKENS, (".parquet", ".parq"), corpus=True),
    "jsonl": Kind("corpus", _TOKENS, _LINES, corpus=True),
    "tsv": Kind("tsv", (Predicted.CLASS, Predicted.NUMBER), (".tsv",)),
    # Formats that are not read are an error on access, instead of being left out.
    "images": Kind("images", (Predicted.CLASS,), _IMAGES),
    "listops": Kind("listops", (Predicted.CLASS,), (), generated=True),
}
CORPUS_SOURCES = tuple(name for name, kind in SOURCES.items() if kind.corpus)

# How documents become rows does not change the held-out documents.
_OF_ROWS = (fields.Occasion.HELDOUT_DOCUMENTS,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Source of a run's data: rows of `context_length` tokens, or images.

    The sources `text`, `tokens`, `longcrawl64`, `parquet` and `jsonl` have documents, for predicting tokens. `tsv`,
    `images` and `listops` have labeled examples, for classification or regression.
    """

    source: str = fields.setting(
        "text",
        "Format of the data. `text`: files as bytes. `tokens`: `.bin` files of token ids. `longcrawl64`: a Zarr v2 "
        "array, one document per row. `parquet`, `jsonl`: a column of text or of lists of token ids, of any size. "
        "`tsv`: lines of columns between tabs. `images`: one folder per class. `listops`: generated.",
        choices=SOURCES,
    )
    paths: tuple[str, ...] = fields.setting(
        (),
        "Files, folders or globs to read, of `parquet` and `jsonl` also URLs such as `hf://datasets/...`. If empty, "
        "`text` reads the Python interpreter's standard library.",
    )
    heldout_paths: tuple[str, ...] = fields.setting(
        (), "Files, folders or globs with held-out data. If empty, `heldout_fraction` is held out."
    )
    heldout_names: tuple[str, ...] = fields.setting(
        (),
        "Names of the `heldout_paths`, one each, such as `matched,mismatched`. Classification and regression are then "
        "measured on each path alone, and the names of the metrics begin with its name.",
    )
    heldout_fraction: float = fields.setting(
        0.1,
        "Fraction that is held out without `heldout_paths`: of the documents, by hash, or of the bytes of each `text` "
        "file that `paths` names itself.",
        least=0,
        below=1,
    )
    token_dtype: str = fields.setting("uint16", "Type of stored token ids.", choices=("uint16", "uint32"))
    document_separator: int | None = fields.setting(
        None,
        "Id between documents. `tokens`: the id that ends a document; if none, every file is one. `longcrawl64`: the "
        "id before every row; if none, 50256. `parquet`, `jsonl`: the id after each document; if none, the tokenizer's "
        "end of text, and no id after lists of ids. `tsv`: the id between two texts, by default its end of text.",
        least=0,
        below=2**32,
    )
    text_columns: tuple[str, ...] = fields.setting(
        (),
        "Columns to read, by name, or by numbers from 1 if a file of `tsv` has no header. `parquet`, `jsonl`: one, by "
        "default `text`. `tsv`: one, or two that are joined with a separator, except by `task.dual_encoder`.",
    )
    label_column: str = fields.setting("label", "Column of the label of `tsv`, named as `text_columns` are.")
    labels: tuple[str, ...] = fields.setting(
        (), "Classes of `tsv`, in order. If empty, a label is an integer from 0."
    )
    tokenizer: str | None = fields.setting(
        None,
        "Tokenizer: `byte`, a `tokenizers` JSON file, a folder that has it as `tokenizer.json`, `hf://ORG/NAME`, or "
        "the name of a tiktoken encoding. `parquet`, `jsonl`, `tsv`: by default `byte`. `tokens`, `longcrawl64`: the "
        "one that made the tokens, for generation; by default the one that `sympow prepare` recorded.",
    )
    tokenizer_workers: int = fields.setting(
        2,
        "Number of processes that read and tokenize `parquet` and `jsonl`; 0 for a thread of the training process. "
        "Rows do not depend on it.",
        least=0,
        may_differ=fields.Occasion,
    )
    shortest_document: int = fields.setting(
        1, "Documents of fewer tokens, separator included, are left out.", least=1
    )
    image_size: int = fields.setting(224, "Side that images are cropped and resized to, in pixels.", least=1)
    image_tokens: bool = fields.setting(
        False,
        "Whether images, which must have `image_size`, are read in gray, row by row as ids 0 to 255, instead of as "
        "arrays of colors.",
    )
    context_length: int = fields.setting(1024, "Tokens per row.", least=1, may_differ=_OF_ROWS)
    batch_tokens: int = fields.setting(
        524_288,
        "Tokens per update, a multiple of `context_length`.",
        least=1,
        may_differ=(fields.Occasion.HELDOUT_ROWS, *_OF_ROWS),
    )
    packing: str = fields.setting(
        "windows",
        "Way from documents to rows. `windows` are cut from the concatenated documents, so that state and attention "
        "cross their boundaries. `documents` gives each document its own segment id, so that neither does.",
        choices=("windows", "documents"),
        may_differ=_OF_ROWS,
    )
    seed: int = fields.setting(
        0,
        "Seed of the order of rows and of random masks, crops and examples.",
        least=0,
        below=fields.SEEDS,
        may_differ=_OF_ROWS,
    )

    def __post_init__(self):
        fields.validate(self, "data")
        source, columns, length = self.source, self.text_columns, self.context_length
        names, generated = self.heldout_names, self.kind.generated
        checks.refuse(
            (
                self.batch_tokens % length,
                f"data.batch_tokens is {self.batch_tokens}; it must be a multiple of data.context_length {length}",
            ),
            (
                not (self.paths or generated or source == "text"),
                f"data.paths is empty; source {source!r} needs the path of its data",
            ),
            (
                generated and (self.paths or self.heldout_paths),
                f"data.paths and data.heldout_paths must be empty; source {source!r} reads no file",
            ),
            (
                self.shortest_document > 1 and not self.has_documents,
                f"data.shortest_document is set, but data.source {source!r} has no documents; leave it out",
            ),
            (
                self.tokenizer not in (None, "byte") and source in ("text", "images", "listops"),
                f"data.tokenizer is {self.tokenizer!r}, but data.source {source!r} has no tokenizer; leave it out, or "
                f"read parquet, jsonl, or tokens of `sympow prepare`",
            ),
            (
                names and len(names) != len(self.heldout_paths),
                f"data.heldout_names is {names} and data.heldout_paths {self.heldout_paths}; name every path, or none",
            ),
            (
                len(set(names)) != len(names) or not all(name.isidentifier() for name in names),
                f"data.heldout_names is {names}; every name must be another one, of letters, digits and _",
            ),
            (
                self.kind.corpus and len(columns) > 1,
                f"data.text_columns is {columns}; source {source!r} reads one column",
            ),
            (
                source == "tsv" and len(columns) not in (1, 2),
                f"data.text_columns is {columns}; source 'tsv' needs the names of one or two columns of text",
            ),
            (
                source == "tsv" and len(set(self.labels)) != len(self.labels),
                f"data.labels is {self.labels}; every class must be named once",
            ),
            (
                source == "images" and self.image_tokens and self.image_size**2 != length,
                f"data.context_length is {length}, but the pixels of data.image_size {self.image_size} squared are "
                f"{self.image_size**2} tokens; make them equal",
            ),
        )

    @property
    def kind(self) -> Kind:
        """Row of `SOURCES` that `source` names."""
        return SOURCES[self.source]

    @property
    def has_documents(self) -> bool:
        """True if the source has documents, instead of labeled examples."""
        return Predicted.TOKEN in self.kind.predicted

    @property
    def batch_size(self) -> int:
        """Number of rows in a batch."""
        return self.batch_tokens // self.context_length

    @property
    def text_tokenizer(self) -> str:
        """Tokenizer of the sources of text, `byte` by default."""
        return "byte" if self.tokenizer is None else self.tokenizer


def source_of(path: str) -> str | None:
    """Returns `tokens`, `parquet` or `jsonl`, as the name of a file says; None if it says none of them."""
    kinds = ("tokens", *CORPUS_SOURCES)
    return next((source for source in kinds if path.lower().endswith(SOURCES[source].suffixes)), None)
