"""Conversion between text and the tokens of a run's data."""

import dataclasses
from collections.abc import Sequence

from sympow_jax import config as config_lib
from sympow_jax import hub, spelling
from sympow_jax.data import tokenizer
from sympow_jax.data.sources import zarr


@dataclasses.dataclass(frozen=True)
class Codec:
    """A tokenizer and the ids around a document.

    Attributes:
        tokenizer: converts bytes to ids and back.
        vocab_size: vocabulary size of the model, which must contain every token of a prompt.
        lead: id before every document and prompt; None for none.
        end: id after every document, at which generated text ends; None for none.
    """

    tokenizer: tokenizer.Tokenizer
    vocab_size: int
    lead: int | None = None
    end: int | None = None

    def encode(self, prompt: bytes, name: str = "the prompt") -> list[int]:
        """Returns the tokens of a prompt, which errors call `name`.

        Raises:
            ValueError: the prompt is empty, has a token outside the vocabulary, or is not UTF-8 and the tokenizer
                reads text.
        """
        reader = f"tokenizer {self.tokenizer.name}"
        try:
            tokens = [int(token) for token in self.tokenizer.encode(prompt)]
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8 (byte {error.start + 1}), which {reader} reads") from error
        if not tokens:
            lack = f"{reader} finds no tokens in {name}" if prompt else f"{name} is empty"
            raise ValueError(f"{lack}; it must have at least one token")
        tokens = tokens if self.lead is None else [self.lead, *tokens]
        if beyond := sorted({token for token in tokens if token >= self.vocab_size}):
            kind = "bytes" if self.tokenizer.name == "byte" else "tokens"
            raise ValueError(
                f"{name} has {kind} that the model's vocabulary of {self.vocab_size} lacks: {spelling.listed(beyond)}"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Returns the bytes of tokens, which need not be whole characters; raises ValueError for another id."""
        if beyond := [token for token in tokens if not 0 <= token < self.vocab_size]:
            raise ValueError(
                f"{beyond[0]} is no token of the model, whose ids are 0 to {self.vocab_size - 1}; decode others with "
                f"their own tokenizer"
            )
        return self.tokenizer.decode(tokens)

    @property
    def sampled_vocab_size(self) -> int:
        """Number of ids that may be sampled: the model's vocabulary, or the tokenizer's (with `end`) if smaller."""
        end = -1 if self.end is None else self.end
        return min(self.vocab_size, max(self.tokenizer.vocab_size, end + 1))


def codec_of_run(settings: config_lib.Config, name: str | None = None) -> Codec:
    """Returns the codec of a run whose `data.source` has documents.

    `name` is that of the tokenizer, as for `prepare`; by default `data.tokenizer`, which a run on prepared tokens
    records. It must be given for other tokens, if `parquet` or `jsonl` hold token ids, and if it would be downloaded.

    Raises:
        ValueError: the source is another, or the tokenizer is missing, cannot be loaded or is not the data's.
    """
    source, separator = settings.data.source, settings.data.document_separator
    if not settings.data.has_documents:
        raise ValueError(f"the run read data.source {source!r}, of which no text can be made")
    if source == "text":
        if name not in (None, "byte"):
            raise ValueError(f"--tokenizer={name}, but the run read text as bytes; leave it out")
        return Codec(tokenizer.load("byte"), settings.model.vocab_size)
    recorded = settings.data.text_tokenizer if settings.data.kind.corpus else settings.data.tokenizer
    if name is not None:
        loaded = tokenizer.load(name)
    elif recorded is None:
        raise ValueError(
            f"the run read data.source {source!r}, tokens without their text, and records no tokenizer; give the one "
            f"that made them as --tokenizer=FILE"
        )
    elif hub.is_remote(recorded):
        raise ValueError(
            f"the run's data.tokenizer is {recorded}, which would be downloaded; if you trust it, name it again with "
            f"--tokenizer"
        )
    else:
        try:
            loaded = tokenizer.load(recorded, setting="data.tokenizer")
        except ValueError as error:
            raise ValueError(f"the run's {error}; give the tokenizer as --tokenizer=FILE") from error
    if separator is None:
        separator = {"longcrawl64": zarr.DOCUMENT_START, "tokens": None}.get(source, loaded.separator)
    lead = separator if source == "longcrawl64" else loaded.begin
    return Codec(loaded, settings.model.vocab_size, lead=lead, end=separator)
