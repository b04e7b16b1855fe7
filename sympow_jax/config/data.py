"""Where a run's data comes from."""

import dataclasses

from sympow_jax.config import _checks as checks

__all__ = ["DataConfig"]

SOURCES = ("text", "tokens", "longcrawl64", "tsv", "images", "listops")
PACKINGS = ("windows", "documents")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from and how documents become rows of `context_length` tokens.

    `source`: `text` reads files as bytes, `tokens` flat little-endian `.bin` files, `longcrawl64` a Zarr v2
    array of one document a row. Without `paths`, `text` reads the interpreter's own standard library.
    `packing`: `windows` cuts the concatenated documents into windows that cross documents (state and attention
    run across the boundary); `documents` gives every document its own segment id, so that nothing does.
    """

    source: str = "text"
    paths: tuple[str, ...] = ()
    heldout_paths: tuple[str, ...] = ()  # if empty, heldout_fraction of the documents are held out, by hash
    heldout_fraction: float = 0.1
    token_dtype: str = "uint16"
    # tokens: the id that ends a document; longcrawl64: the id in front of every row, 50,256 if None
    document_separator: int | None = None
    context_length: int = 1024
    batch_tokens: int = 524_288
    packing: str = "windows"
    seed: int = 0

    def __post_init__(self):
        checks.require_choice("data.source", self.source, SOURCES)
        checks.require_choice("data.packing", self.packing, PACKINGS)
        checks.require_choice("data.token_dtype", self.token_dtype, ("uint16", "uint32"))
        checks.require_fraction(**{"data.heldout_fraction": self.heldout_fraction})
        checks.require_at_least(1, **{"data.context_length": self.context_length})
        checks.require_at_least(0, **{"data.seed": self.seed})
        if self.batch_tokens < self.context_length or self.batch_tokens % self.context_length:
            raise ValueError(
                f"data.batch_tokens is {self.batch_tokens}; it must be a multiple of "
                f"data.context_length {self.context_length}"
            )
        object.__setattr__(self, "paths", tuple(self.paths))
        object.__setattr__(self, "heldout_paths", tuple(self.heldout_paths))
        if self.source != "text" and not self.paths:
            raise ValueError(f"data.paths is empty; source {self.source!r} needs the path of its data")

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self.batch_tokens // self.context_length
