"""Settings of a run's data."""

import dataclasses

from sympow_jax.config import _checks as checks

__all__ = ["DataConfig"]

SOURCES = ("text", "tokens", "longcrawl64", "tsv", "images", "listops")
PACKINGS = ("windows", "documents")
IMAGE_MODES = ("rgb", "gray")

_PATHLESS = ("text", "listops")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Source of a run's data: rows of `context_length` tokens, or images.

    Three sources hold documents, for predicting tokens:

    * `text` reads files as bytes. Without `paths`, it reads the Python interpreter's own standard library.
    * `tokens` reads flat little-endian `.bin` files.
    * `longcrawl64` reads a Zarr v2 array with one document per row.

    `packing` says how documents become rows. `windows` cuts the concatenated documents into windows that cross
    documents, so that state and attention cross the boundary too. `documents` gives every document its own segment id,
    so that neither does.

    Three sources hold labeled examples, for classification or regression:

    * `tsv` reads lines of text files whose columns are separated by tabs, without quoting (GLUE's layout). There are
      one or two `text_columns`; two are joined with a separator between them. `text_columns` and `label_column` are
      named as in the header. For files without a header, all of them are numbers that count from 1. `labels` are the
      classes in order; without them a label is an integer from 0. `tokenizer` is `byte`, a `tokenizers` JSON file or
      tiktoken's. A text is truncated to the context; of two texts, the longer is truncated first.
    * `images` reads one folder per class in every path. With `image_tokens`, the pixels of gray images of `image_size`
      squared are read row by row as ids 0 .. 255 (the long-range tasks). Otherwise rows are arrays
      [image_size, image_size, channels], cropped and mirrored at random in training if `augment`.
    * `listops` generates examples and reads no files (`data/listops.py` defines them and lists the ids).
    """

    source: str = "text"
    paths: tuple[str, ...] = ()
    heldout_paths: tuple[str, ...] = ()  # if empty, heldout_fraction of the documents are held out by hash
    heldout_fraction: float = 0.1
    token_dtype: str = "uint16"
    # tokens: the id that ends a document. longcrawl64: the id before every row, 50,256 if None. tsv: the id between two
    # texts, the tokenizer's end of text if None.
    document_separator: int | None = None
    text_columns: tuple[str, ...] = ()
    label_column: str = "label"
    labels: tuple[str, ...] = ()
    tokenizer: str = "byte"
    image_size: int = 224
    image_mode: str = "rgb"
    image_tokens: bool = False
    augment: bool = True
    listops_lengths: tuple[int, ...] = (500, 2000)  # shortest and longest example, in tokens
    listops_examples: tuple[int, ...] = (96_000, 2000)  # for training, and held out
    context_length: int = 1024
    batch_tokens: int = 524_288
    packing: str = "windows"
    seed: int = 0

    def __post_init__(self):
        checks.require_choice("data.source", self.source, SOURCES)
        checks.require_choice("data.packing", self.packing, PACKINGS)
        checks.require_choice("data.token_dtype", self.token_dtype, ("uint16", "uint32"))
        checks.require_choice("data.image_mode", self.image_mode, IMAGE_MODES)
        checks.require_fraction(**{"data.heldout_fraction": self.heldout_fraction})
        checks.require_at_least(
            1, **{"data.context_length": self.context_length, "data.image_size": self.image_size}
        )
        checks.require_at_least(0, **{"data.seed": self.seed})
        if self.batch_tokens < self.context_length or self.batch_tokens % self.context_length:
            raise ValueError(
                f"data.batch_tokens is {self.batch_tokens}; it must be a multiple of "
                f"data.context_length {self.context_length}"
            )
        for field in dataclasses.fields(self):
            if isinstance(getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(getattr(self, field.name)))
        if self.source not in _PATHLESS and not self.paths:
            raise ValueError(f"data.paths is empty; source {self.source!r} needs the path of its data")
        if self.source == "tsv":
            self._check_columns()
        if self.source == "images" and self.image_tokens:
            self._check_pixels()
        if self.source == "listops":
            self._check_listops()

    def _check_columns(self):
        if len(self.text_columns) not in (1, 2):
            raise ValueError(
                f"data.text_columns is {self.text_columns}; source 'tsv' needs the name of one column of text, or of "
                f"two that are read together"
            )
        if len(set(self.labels)) != len(self.labels):
            raise ValueError(f"data.labels is {self.labels}; every class must be named once")

    def _check_pixels(self):
        if self.image_mode != "gray":
            raise ValueError("data.image_tokens reads gray pixels as ids; set data.image_mode=gray")
        if self.image_size**2 != self.context_length:
            raise ValueError(
                f"data.context_length is {self.context_length}, but the pixels of data.image_size {self.image_size} "
                f"squared are {self.image_size**2} tokens; make them equal"
            )

    def _check_listops(self):
        if self.paths or self.heldout_paths:
            raise ValueError(
                "data.paths and data.heldout_paths must be empty; source 'listops' reads no file"
            )
        for name in ("listops_lengths", "listops_examples"):
            if len(getattr(self, name)) != 2:
                raise ValueError(f"data.{name} is {getattr(self, name)}; it must be two numbers")
        checks.require_at_least(1, **{"data.listops_examples": min(self.listops_examples)})
        shortest, longest = self.listops_lengths
        if not 4 <= shortest <= longest <= self.context_length:
            raise ValueError(
                f"data.listops_lengths is {self.listops_lengths}; the shortest example must have at least 4 tokens "
                f"and the longest at most data.context_length, {self.context_length}"
            )

    @property
    def batch_size(self) -> int:
        """Number of rows in a batch."""
        return self.batch_tokens // self.context_length
