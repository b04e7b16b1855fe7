"""Text of one row as its tokens arrive, in whole characters, up to the first stop string."""

from collections.abc import Iterable, Sequence

import sympow_jax
from sympow_jax import spelling
from sympow_jax.ops import arguments

# Tokenizers decode a token depending on earlier ones. This many prompt tokens suffice for the first new token.
_PROMPT_TOKENS = 16


def texts(values: Iterable[str], name: str) -> list[str]:
    """Returns texts as a list; raises ValueError, which calls them `name`, if they are no list of texts."""
    found = list(values)
    if isinstance(values, str) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"{name} is {spelling.shown(values)}; it must be a list of texts")
    return found


class Transcript:
    """Incremental text after a prompt, from blocks of tokens; text that was returned never changes.

    Bytes that are not UTF-8 become U+FFFD. The text ends before the first stop string, before the end of the document,
    or after `max_tokens`. Then `done` is True, and `stopped` is True unless `max_tokens` is the reason.
    """

    def __init__(
        self,
        codec: "sympow_jax.data.Codec",
        prompt: Sequence[int],
        *,
        max_tokens: int,
        stops: Sequence[str] = (),
    ):
        """Raises ValueError for `max_tokens` below 1, an empty stop string, and stops that are no list of texts."""
        self._stops = texts(stops, "stops")
        if "" in self._stops:
            raise ValueError("a stop string is empty; it would stop everything")
        self.text = ""
        self.done = self.stopped = False
        self._codec = codec
        self._prompt = list(prompt[-_PROMPT_TOKENS:])
        self._before = self._decode(self._prompt)
        self._left = arguments.check_integer("max_tokens", max_tokens, 1)
        self._tokens: list[int] = []

    def add(self, tokens: Sequence[int]) -> str:
        """Adds tokens and returns the new text that later tokens cannot change."""
        if self.done:
            return ""
        for token in tokens:
            self._left -= 1
            if token == self._codec.end:
                self.stopped = True
            else:
                self._tokens.append(int(token))
            if self.stopped or self._left == 0:
                self.done = True
                break
        text = self._decode([*self._prompt, *self._tokens])
        # The first tokens may complete a character that the prompt begins.
        before = self._before if text.startswith(self._before) else self._before.rstrip("\ufffd")
        text = text[len(before) :]
        if not self.done:
            # Later tokens may complete a character that these end with.
            text = text.rstrip("\ufffd")
        ends = [index for index in map(text.find, self._stops) if index >= 0]
        if ends:
            self.done = self.stopped = True
            text = text[: min(ends)]
        elif not self.done:
            # The last characters may be the beginning of a stop string.
            longest = max(map(len, self._stops), default=1) - 1
            for size in range(min(longest, len(text)), 0, -1):
                if any(stop.startswith(text[-size:]) for stop in self._stops):
                    text = text[:-size]
                    break
        new, self.text = text[len(self.text) :], text
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._codec.decode(tokens).decode(errors="replace")
