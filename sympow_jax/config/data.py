"""Settings of a run's data."""

import dataclasses

from sympow_jax.config import checks, fields

__all__ = ["DataConfig", "source_of"]

SOURCES = ("text", "tokens", "longcrawl64", "parquet", "jsonl", "tsv", "images", "listops")
DOCUMENT_SOURCES = ("text", "tokens", "longcrawl64", "parquet", "jsonl")
CORPUS_SOURCES = ("parquet", "jsonl")
# Endings of the names of files that are found in folders, and of compressed ones; parquet compresses its own columns.
SUFFIXES = {
    "tokens": (".bin",),
    "parquet": (".parquet", ".parq"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")

# How documents become rows does not change the held-out documents.
_OF_ROWS = (fields.Occasion.HELDOUT_DOCUMENTS,)

_PATHLESS = ("text", "listops")


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
        source, names, columns, length = (
            self.source,
            self.heldout_names,
            self.text_columns,
            self.context_length,
        )
        checks.refuse(
            (
                self.batch_tokens % length,
                f"data.batch_tokens is {self.batch_tokens}; it must be a multiple of data.context_length {length}",
            ),
            (
                source not in _PATHLESS and not self.paths,
                f"data.paths is empty; source {source!r} needs the path of its data",
            ),
            (
                source == "listops" and (self.paths or self.heldout_paths),
                "data.paths and data.heldout_paths must be empty; source 'listops' reads no file",
            ),
            (
                self.shortest_document > 1 and source not in DOCUMENT_SOURCES,
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
                source in CORPUS_SOURCES and len(columns) > 1,
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
    def batch_size(self) -> int:
        """Number of rows in a batch."""
        return self.batch_tokens // self.context_length

    @property
    def text_tokenizer(self) -> str:
        """Tokenizer of the sources of text, `byte` by default."""
        return "byte" if self.tokenizer is None else self.tokenizer


def source_of(path: str) -> str | None:
    """Returns `tokens`, `parquet` or `jsonl`, as the name of a file says; None if it says none of them."""
    name = path.lower()
    if name.endswith(COMPRESSIONS):
        return "jsonl" if name.rpartition(".")[0].endswith(SUFFIXES["jsonl"]) else None
    return next((source for source, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)
