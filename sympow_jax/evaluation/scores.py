"""Losses and hits of tokens after a state: of whole documents, and of answers after a shared context.

Rows longer than a call are processed in segments, each of which gets the state after the one before.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Int32

from sympow_jax import models
from sympow_jax.config import checks

CALL_TOKENS = 16_384
"""Maximum number of tokens of one call of a model, and of a segment of a longer row."""
# Limits of the bytes of logits that exist at the same time, and of the states of one call.
_LOGIT_BYTES = 2**26
_STATE_BYTES = 2**30
_SHORTEST = 16  # tokens of a padded row
_DOCUMENT, _PADDING = 0, -1  # segment ids

Tokens = Sequence[int] | Int[np.ndarray, " tokens"]


class Question(NamedTuple):
    """Tokens after a context.

    Attributes:
        prompt: tokens before the answer; may be empty.
        answer: tokens to predict, at least one.
    """

    prompt: Tokens
    answer: Tokens


class Case(NamedTuple):
    """A context and the questions about it, each of which sees the context and its own prompt only.

    Attributes:
        context: tokens before every question, at least one.
        questions: the questions.
    """

    context: Tokens
    questions: Sequence[Question]


class Score(NamedTuple):
    """Teacher-forced predictions of an answer.

    Attributes:
        losses: loss in nats of each token, given all tokens before it.
        correct: whether each token has the highest logit.
    """

    losses: Float[np.ndarray, " answer"]
    correct: Bool[np.ndarray, " answer"]


def token_losses(
    model: models.DecoderLM,
    tokens: Int[np.ndarray, "documents length"],
    *,
    on_call: Callable[[int], None] | None = None,
) -> Float[np.ndarray, "documents length-1"]:
    """Returns the loss in nats of every token of a document, except the first, given all tokens before it.

    Documents of at most 16,384 predictions are batched into calls of at most that many, without a state. A longer
    document is split into equal segments of at most 16,384 tokens, and each call gets the state after the previous
    segment. Padding makes the segments equal. It follows the last prediction, so causality keeps it from having an
    effect. Every call has the same shape, so the model is compiled once.

    Memory in addition to the parameters: activations of at most 16,384 tokens, the recurrent state or KV cache of one
    document, 64 MiB of logits whatever the vocabulary, and 4 bytes per token of `tokens` on the host.

    Args:
        model: the decoder.
        tokens: documents of equal length.
        on_call: called after each call of the model with its number of tokens, padding included.
    """
    count, predictions = tokens.shape[0], tokens.shape[1] - 1
    segments = -(-predictions // CALL_TOKENS)
    segment = -(-predictions // segments)
    calls = -(-count // (CALL_TOKENS // segment))
    batch = -(-count // calls)
    padding = ((0, 0), (0, segments * segment - predictions))
    engine = _Engine(model, on_call)
    losses = np.empty((count, predictions), np.float32)
    for start in range(0, count, batch):
        # The last batch has documents of the one before, so that all have one shape.
        rows = slice(min(start, count - batch), min(start, count - batch) + batch)
        inputs, targets = np.pad(tokens[rows, :-1], padding), np.pad(tokens[rows, 1:], padding)
        losses[rows] = engine.score(inputs, targets, segment=segment).losses[:, :predictions]
    return losses


def answer_scores(
    model: models.DecoderLM,
    cases: Sequence[Case],
    *,
    on_call: Callable[[int], None] | None = None,
) -> list[list[Score]]:
    """Returns the scores of the questions of each case.

    A context is processed once, to a state from which each question continues, where that needs fewer tokens, and once
    per question elsewhere. Lengths and batch sizes are rounded up to a few sizes, so that few programs are compiled.
    Rows of more than 16,384 tokens are processed in segments of that length through the state.

    Memory in addition to the parameters: activations of 16,384 tokens, 64 MiB of logits, and up to two copies of the
    states or KV caches of the rows of a call. Each copy takes at most 1 GiB, or the memory of a single row.

    Args:
        model: the decoder.
        cases: contexts with their questions. The scores of a case without questions are empty.
        on_call: called after each call of the model with its number of tokens, padding included.

    Raises:
        ValueError: a context or an answer is empty, a token id is outside the vocabulary, a row is longer than the
            model's learned positions, or the recurrent state would exceed the memory of the device.
    """
    vocab_size, longest = model.config.vocab_size, model.config.longest_document
    for case in cases:
        ids = np.concatenate(
            [np.asarray(x, np.int64) for x in (case.context, *itertools.chain.from_iterable(case.questions))]
        )
        wrong = ids[(ids < 0) | (ids >= vocab_size)]
        length = max((_row_length(case, question) for question in case.questions), default=0)
        checks.refuse(
            (
                not len(case.context),
                "a context is empty; it needs at least one token, such as the id between documents",
            ),
            (
                not all(len(question.answer) for question in case.questions),
                "an answer is empty; it needs at least one token",
            ),
            (
                len(wrong),
                f"token id {[*wrong, None][0]} is outside the model's vocabulary of {vocab_size}; use the model's "
                f"tokenizer",
            ),
            (
                longest is not None and length > longest,
                f"a context with its question has {length} tokens before the last one, but the model's learned "
                f"positions end at {longest}; shorten it",
            ),
        )
    engine = _Engine(model, on_call)
    scores: dict[tuple[int, int], Score] = {}  # by the indices of case and question

    # Group rows of one padded length, and cases of one padded size.
    whole: dict[int, list[tuple[int, int]]] = {}
    shared: dict[tuple[int, int], list[int]] = {}
    for index, case in enumerate(cases):
        lengths = [padded_length(_row_length(case, question)) for question in case.questions]
        # The last token of a context is the first input of each question, as its output predicts what follows.
        context_size = padded_length(len(case.context) - 1)
        question_size = padded_length(max((len(x.prompt) + len(x.answer) for x in case.questions), default=1))
        fewer = context_size + len(lengths) * question_size < sum(lengths)
        # One token of context leaves none for the state before the questions.
        if lengths and len(case.context) > 1 and fewer:
            shared.setdefault((context_size, question_size), []).append(index)
        else:
            for number, length in enumerate(lengths):
                whole.setdefault(length, []).append((index, number))

    # Score each context with each of its questions.
    for length, keys in whole.items():
        questions = {key: cases[key[0]].questions[key[1]] for key in keys}
        answer_size = padded_length(max(len(question.answer) for question in questions.values()))
        for row_keys in _batches(keys, max(1, CALL_TOKENS // length)):
            rows = [(cases[key[0]].context, questions[key]) for key in row_keys]
            scores.update(zip(row_keys, engine.answers(rows, length, answer_size)))

    # Process each context once, and score its questions after that state.
    for (context_size, question_size), indices in shared.items():
        answer_size = padded_length(max(len(x.answer) for index in indices for x in cases[index].questions))
        max_length = context_size + question_size
        row = jax.eval_shape(lambda: model.init_state(1, max_length=max_length))  # noqa: B023
        state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(row))
        rows_at_once = min(CALL_TOKENS // max(context_size, question_size), _STATE_BYTES // state_bytes)
        for batch in _batches(indices, max(1, rows_at_once)):
            state = model.init_state(len(batch), max_length=max_length)
            state = engine.advance([cases[index].context[:-1] for index in batch], context_size, state)
            for number in range(max(len(cases[index].questions) for index in batch)):
                # A case with fewer questions repeats its last one.
                keys = [(index, min(number, len(cases[index].questions) - 1)) for index in batch]
                rows = [(cases[i].context[-1:], cases[i].questions[j]) for i, j in keys]
                scores.update(zip(keys, engine.answers(rows, question_size, answer_size, state)))
    return [[scores[i, j] for j in range(len(case.questions))] for i, case in enumerate(cases)]


def padded_length(length: int) -> int:
    """Returns the length that a row is padded to: a power of two, or a multiple of 16,384 if it is longer than that."""
    if length > CALL_TOKENS:
        return -(-length // CALL_TOKENS) * CALL_TOKENS
    return max(_SHORTEST, 1 << (length - 1).bit_length())


def _row_length(case: Case, question: Question) -> int:
    """Returns the number of tokens of a context with a question, without the last one, which is only predicted."""
    return len(case.context) + len(question.prompt) + len(question.answer) - 1


def _batches[Item](items: Sequence[Item], largest: int) -> Iterator[list[Item]]:
    """Yields batches of one size, a power of two; the last is filled with copies of its last item."""
    size = min(1 << (largest.bit_length() - 1), 1 << (len(items) - 1).bit_length())
    for batch in itertools.batched(items, size):
        yield [*batch, *batch[-1:] * (size - len(batch))]


def _pad(rows: Sequence[Tokens], length: int) -> tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, "B T"]]:
    """Returns tokens and segment ids of rows that are padded to `length`."""
    tokens = np.zeros((len(rows), length), np.int32)
    segment_ids = np.full((len(rows), length), _PADDING, np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
        segment_ids[index, : len(row)] = _DOCUMENT
    return tokens, segment_ids


class _Engine:
    """A model that is called on padded rows, segment by segment."""

    def __init__(self, model: models.DecoderLM, on_call: Callable[[int], None] | None):
        self._model = model
        self._on_call = on_call or (lambda _: None)

    def advance(self, rows: Sequence[Tokens], length: int, state: models.DecoderState) -> models.DecoderState:
        """Returns the state after rows that are padded to `length`; the state before them is donated."""
        tokens, segment_ids = _pad(rows, length)
        for start in range(0, length, CALL_TOKENS):
            part = np.s_[:, start : start + CALL_TOKENS]
            _, state = self._hidden(tokens[part], segment_ids[part], state, advance=True)
            self._on_call(tokens[part].size)
        return state

    def answers(
        self,
        rows: Sequence[tuple[Tokens, Question]],
        length: int,
        answer_size: int,
        state: models.DecoderState | None = None,
    ) -> list[Score]:
        """Returns the score of each answer after the state, its context and its prompt; sizes are padded ones."""
        inputs, spans, targets = [], [], np.zeros((len(rows), length), np.int32)
        for index, (context, (prompt, answer)) in enumerate(rows):
            # Each part on its own, because an empty list is an array of floats.
            parts = [np.asarray(part, np.int32) for part in (context, prompt, answer[:-1])]
            inputs.append(np.concatenate(parts))
            spans.append(slice(len(inputs[-1]) - len(answer), len(inputs[-1])))
            targets[index, spans[-1]] = answer
        tokens, segment_ids = _pad(inputs, length)
        starts = np.array([span.start for span in spans])
        found = self.score(
            tokens, targets, segment_ids=segment_ids, starts=starts, scored=answer_size, state=state
        )
        return [Score(found.losses[row, span], found.correct[row, span]) for row, span in enumerate(spans)]

    def score(
        self,
        inputs: Int[np.ndarray, "B T"],
        targets: Int[np.ndarray, "B T"],
        *,
        segment: int | None = None,
        segment_ids: Int[np.ndarray, "B T"] | None = None,
        starts: Int[np.ndarray, " B"] | None = None,
        scored: int | None = None,
        state: models.DecoderState | None = None,
    ) -> Score:
        """Returns the loss and the hit of each target, the token after an input; the state is not modified.

        Each call has `segment` tokens of a row, which divides T; None means at most 16,384. With `starts`, only
        `scored` positions from there on are scored, and values elsewhere have no meaning.
        """
        batch, length = inputs.shape
        segment = min(CALL_TOKENS, length) if segment is None else segment
        scored = segment if scored is None else min(scored, segment)
        in_segments = length > segment
        if in_segments:
            # The segments reuse the memory of this state, which the caller may need again.
            state = (
                self._model.init_state(batch, max_length=length)
                if state is None
                else jax.tree.map(jnp.copy, state)
            )
        losses, correct = np.zeros((batch, length), np.float32), np.zeros((batch, length), bool)
        for start in range(0, length, segment):
            part = np.s_[:, start : start + segment]
            ids = None if segment_ids is None else segment_ids[part]
            columns: tuple[Any, ...] = part
            positions = None
            segment_targets = targets[part]
            if starts is not None:
                # The `scored` positions of this segment that include every position to score.
                positions = np.clip(starts - start, 0, segment - scored)[:, None] + np.arange(scored)
                columns = np.arange(batch)[:, None], start + positions
                segment_targets = targets[columns]
            hidden, state = self._hidden(inputs[part], ids, state, advance=in_segments)
            loss, hit = _losses_and_hits(self._model, hidden, segment_targets, positions)
            losses[columns], correct[columns] = np.asarray(loss), np.asarray(hit)
            self._on_call(batch * segment)
        return Score(losses, correct)

    def _hidden(
        self,
        tokens: Int[np.ndarray, "B T"],
        segment_ids: Int[np.ndarray, "B T"] | None,
        state: Any,
        *,
        advance: bool,
    ) -> tuple[Float[Array, "B T M"], Any]:
        """Returns hidden states and the state: as it was, or after the tokens with `advance`, which donates it."""
        ids = None if segment_ids is None else jnp.asarray(segment_ids)
        if advance:
            return self._model.extend_hidden(jnp.asarray(tokens), state, segment_ids=ids, donate_state=True)
        hidden = self._model.hidden(jnp.asarray(tokens), segment_ids=ids, initial_state=state, compiled=True)
        return hidden, state


@jax.jit
def _losses_and_hits(
    model: models.DecoderLM,
    hidden: Float[Array, "B T M"],
    targets: Int[Array, "B A"],
    positions: Int[Array, "B A"] | None,
) -> tuple[Float[Array, "B A"], Bool[Array, "B A"]]:
    """Returns the loss in nats of each target, and whether it has the highest logit, at positions or at all tokens.

    At most 64 MiB of logits exist at the same time, or those of one target.
    """

    def score_token(pair):
        hidden_M, target = pair
        logits = model.unembed(hidden_M[None, None])[0, 0]
        loss = optax.losses.softmax_cross_entropy_with_integer_labels(logits, target)
        # The first of the highest logits, as by argmax, which on a CPU takes half as long as the logits themselves.
        lower = jnp.where(jnp.arange(len(logits)) < target, logits < logits[target], logits <= logits[target])
        return loss, lower.all()

    if positions is not None:
        hidden = jnp.take_along_axis(hidden, positions[..., None], axis=1)
    vocabulary = jax.eval_shape(model.unembed, hidden).shape[-1]
    tokens_at_once = min(max(1, _LOGIT_BYTES // (4 * vocabulary)), targets.size)
    pairs = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1))
    losses, hits = jax.lax.map(score_token, pairs, batch_size=tokens_at_once)
    return losses.reshape(targets.shape), hits.reshape(targets.shape)
