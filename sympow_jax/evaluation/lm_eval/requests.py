"""Answers of a model to requests in text: likelihoods of continuations and of texts, and continuations."""

import collections
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sympow_jax import data, generation, models, spelling
from sympow_jax.evaluation import scores as scores_lib

_ROWS = 32  # prompts of one batch, if their tokens are no more than those of a call
_GREEDY = generation.Sampling(temperature=0)


class GenerateRequest(NamedTuple):
    """A prompt to continue.

    Attributes:
        prompt: text to continue; may be empty.
        max_tokens: maximum number of tokens after it.
        stops: texts to end before.
        sampling: options of sampling.
    """

    prompt: str
    max_tokens: int
    stops: tuple[str, ...] = ()
    sampling: generation.Sampling = _GREEDY


class TextModel:
    """A decoder and its tokenizer.

    Requests are batched by length, padded to few different shapes, and returned in their order. Tokens beyond learned
    positions are dropped from the beginning of a context; models without these have no limit.

    Args:
        model: the decoder.
        codec: tokenizer of the model, such as `data.codec_of_run(config)`.
    """

    def __init__(self, model: models.DecoderLM, codec: data.Codec):
        self._model, self._codec = model, codec
        self._longest = model.config.longest_document

    @property
    def prefix(self) -> int:
        """Token before a text that has no context: the lead, else the end of a document, else the newline."""
        for token in (self._codec.lead, self._codec.end):
            if token is not None:
                return token
        return self._codec.encode(b"\n")[-1]

    def room(self, request: GenerateRequest) -> int | None:
        """Returns the number of tokens that a prompt may have; None without learned positions.

        Raises:
            ValueError: `max_tokens` leaves none.
        """
        if self._longest is None:
            return None
        if self._longest < request.max_tokens:
            raise ValueError(
                f"max_gen_toks is {request.max_tokens}, but the model's learned positions end at {self._longest}; "
                f"make it smaller, so that there is room for a prompt"
            )
        # The last token that is sampled is not read.
        return self._longest - request.max_tokens + 1

    def continuation_log_likelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Returns, for pairs of a context and a continuation, the log-likelihood of the latter in nats.

        The second value is whether greedy decoding would give the continuation. White space at the end of a context is
        scored with the continuation, as the tokens of words begin with it. As in the harness, its tokens are those
        after the number of tokens that the context has alone, and at least the last one. Equal contexts are processed
        once.
        """
        rows = [self._encode_pair(*pair) for pair in pairs]
        by_context: dict[tuple[int, ...], list[int]] = {}
        for index, (context, continuation) in enumerate(rows):
            if continuation:
                by_context.setdefault(context, []).append(index)
        cases = [
            scores_lib.Case(context, [scores_lib.Question([], rows[index][1]) for index in indices])
            for context, indices in by_context.items()
        ]
        by_pair: dict[int, tuple[float, bool]] = {}
        for indices, scores in zip(by_context.values(), scores_lib.answer_scores(self._model, cases)):
            for index, score in zip(indices, scores):
                by_pair[index] = (_log_likelihood(score), bool(score.correct.all()))
        return [by_pair.get(index, (0.0, True)) for index in range(len(pairs))]

    def text_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Returns the log-likelihood of each whole text in nats, after `prefix`.

        A text beyond learned positions is cut into windows, in which each token is predicted once.
        """
        cases = [self._windows(self._tokens(text)) if text else [] for text in texts]
        scores = iter(scores_lib.answer_scores(self._model, [case for windows in cases for case in windows]))
        return [sum(_log_likelihood(next(scores)[0]) for _ in windows) for windows in cases]

    def generate(self, requests: Sequence[GenerateRequest]) -> list[str]:
        """Returns the continuation of each prompt, without the prompt.

        Of equal requests that sample, the first has the seed 0, the second 1, and so on.

        Raises:
            ValueError: learned positions leave no room for `max_tokens` after a token of the prompt, or as
                `generation.complete`.
        """
        texts = [""] * len(requests)
        prompts: list[list[int]] = []
        groups: dict[tuple, list[int]] = {}
        earlier: collections.Counter[GenerateRequest] = collections.Counter()
        for index, request in enumerate(requests):
            # Cut to leave room for the continuation within the learned positions.
            room = self.room(request)
            tokens = self._after_prefix(self._tokens(request.prompt))
            prompts.append(tokens if room is None else tokens[-room:])
            length = scores_lib.padded_length(len(prompts[-1]))
            length = length if room is None else min(length, room)
            seed = earlier[request] if request.sampling.temperature else 0
            earlier[request] += 1
            groups.setdefault((length, seed, *request[1:]), []).append(index)
        for (length, seed, max_tokens, stops, sampling), indices in groups.items():
            size = min(_ROWS, max(1, scores_lib.CALL_TOKENS // length), 1 << (len(indices) - 1).bit_length())
            for batch in itertools.batched(indices, size):
                # Copies of the first prompt, whose texts are dropped, give all batches one shape.
                rows = [prompts[index] for index in batch]
                rows += rows[:1] * (size - len(rows))
                pieces = generation.stream(
                    self._model,
                    self._codec,
                    rows,
                    max_tokens=max_tokens,
                    sampling=sampling,
                    stops=stops,
                    seed=seed,
                    prompt_length=length,
                )
                for step in pieces:
                    for index, piece in zip(batch, step):
                        texts[index] += piece.text
        return texts

    def _tokens(self, text: str) -> list[int]:
        """Returns the tokens of a text, without the id before a document."""
        tokens = self._codec.encode(text.encode(), f"the request {spelling.shown(text)}") if text else []
        return tokens if self._codec.lead is None else tokens[1:]

    def _after_prefix(self, tokens: list[int]) -> list[int]:
        """Puts `prefix` before tokens, unless the model has not learned to begin with one."""
        return tokens if tokens and self._codec.lead is None else [self.prefix, *tokens]

    def _encode_pair(self, context: str, continuation: str) -> tuple[tuple[int, ...], list[int]]:
        """Returns the tokens of a context, cut to the learned positions, and those of its continuation."""
        before, whole = self._tokens(context.rstrip()), self._tokens(context + continuation)
        if len(before) >= len(whole) and before != whole:
            before = whole[:-1]
        after = whole[len(before) :]
        before = self._after_prefix(before)
        if self._longest is not None:
            before = before[-max(1, self._longest + 1 - len(after)) :]
        return tuple(before), after

    def _windows(self, tokens: Sequence[int]) -> list[scores_lib.Case]:
        """Returns cases that predict each token of a text once, each within the learned positions."""
        limit = len(tokens) if self._longest is None else min(self._longest, len(tokens))
        windows = [scores_lib.Case([self.prefix], [scores_lib.Question([], tokens[:limit])])]
        for start in range(limit, len(tokens), limit):
            stop = min(start + limit, len(tokens))
            # As much context as there is room for.
            context = tokens[stop - limit - 1 : start]
            windows.append(scores_lib.Case(context, [scores_lib.Question([], tokens[start:stop])]))
        return windows


def _log_likelihood(score: scores_lib.Score) -> float:
    return -float(score.losses.sum(dtype=np.float64))
