"""Text of one row as its tokens arrive, in whole characters, up to the first stop string."""

import codecs
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Decoder", "Transcript"]

# Tokenizers decode a token depending on earlier ones. This many prompt tokens suffice for the first new token.
_PROMPT_TOKENS = 16


class Decoder(Protocol):
    """Decoder of tokens to text, such as `sympow_jax.data.Codec`."""

    @property
    def end(self) -> int | None:
        """Id that ends a document; None for none."""

    @property
    def is_bytes(self) -> bool:
        """True if tokens are bytes, so that a character may span several tokens."""

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Returns the bytes of tokens."""


class Transcript:
    """Incremental text after a prompt, from blocks of tokens; text that was returned never changes.

    Bytes that are not UTF-8 become U+FFFD. The text ends before the first stop string, before the end of the document,
    or after `max_tokens`. Then `done` is True.
    """

    def __init__(self, codec: Decoder, prompt: Sequence[int], *, max_tokens: int, stops: Sequence[str] = ()):
        """Raises ValueError for an empty stop string."""
        if "" in stops:
            raise ValueError("a stop string is empty; it would stop everything")
        self.text = ""
        self.done = False
        self._codec = codec
        self._prompt = list(prompt[-_PROMPT_TOKENS:])
        self._before = len(codec.decode(self._prompt))
        self._left = max_tokens
        self._stops = tuple(stops)
        self._tokens: list[int] = []

    def add(self, tokens: Sequence[int]) -> str:
        """Adds tokens and returns the new text that later tokens cannot change."""
        if self.done:
            return ""
        for token in tokens:
            self._left -= 1
            if token == self._codec.end:
                self._left = 0
            else:
                self._tokens.append(int(token))
            if self._left <= 0:
                self.done = True
                break
        text = self._decoded()
        ends = [index for index in map(text.find, self._stops) if index >= 0]
        if ends:
            self.done = True
            text = text[: min(ends)]
        elif not self.done:
            text = text[: len(text) - self._pending(text)]
        new, self.text = text[len(self.text) :], text
        return new

    def _decoded(self) -> str:
        data = self._codec.decode([*self._prompt, *self._tokens])[self._before :]
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = decoder.decode(data, final=self.done)
        # Tokenizers of text have already replaced the bytes of an incomplete character.
        return text if self.done or self._codec.is_bytes else text.rstrip("\ufffd")

    def _pending(self, text: str) -> int:
        """Returns the number of last characters that may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0
