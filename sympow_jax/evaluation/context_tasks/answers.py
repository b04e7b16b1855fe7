"""Losses of answers after a context, with one pass over the context for all of its questions."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Int32, PyTree

from sympow_jax import config as config_lib
from sympow_jax import models
from sympow_jax.evaluation import streaming

__all__ = ["Case", "Question", "Score", "Tokens", "answer_scores", "padded_length"]

# Limits of one call of the model: number of tokens, also of a segment of a longer row, and bytes of states.
_CALL_TOKENS = 16_384
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


class _Row(NamedTuple):
    """Inputs of the model; its outputs at the last `len(answer)` of them predict the answer."""

    inputs: Int32[np.ndarray, " tokens"]
    answer: Tokens


def answer_scores(
    model: models.DecoderLM,
    cases: Sequence[Case],
    *,
    share: bool | None = None,
    on_call: Callable[[int], None] | None = None,
) -> list[list[Score]]:
    """Returns the scores of the questions of each case.

    A context is either processed once, to a state from which each question continues, or once per question. Lengths and
    batch sizes are rounded up to a few sizes, so that few programs are compiled. Rows of more than 16,384 tokens are
    processed in segments of that length through the state.

    Memory in addition to the parameters: activations of 16,384 tokens, 64 MiB of logits, and up to two copies of the
    states or KV caches of the rows of a call. Each copy takes at most 1 GiB, or the memory of a single row.

    Args:
        model: the decoder.
        cases: contexts with their questions. The scores of a case without questions are empty.
        share: whether to process each context only once. If None, does so where it needs fewer tokens. A context of
            one token is never shared.
        on_call: called after each call of the model with its number of tokens, padding included.

    Raises:
        ValueError: a context or an answer is empty, a token id is outside the vocabulary, a row is longer than the
            model's learned positions, or the recurrent state would exceed the memory of the device.
    """
    for case in cases:
        _check(case, model.config)
    whole_rows: list[_Row] = []
    row_cases: list[int] = []  # index of the case of each row
    shared_cases: dict[tuple[int, int], list[int]] = {}  # indices of cases by their padded sizes
    for case_index, case in enumerate(cases):
        if not len(case.questions):
            continue
        context_size, question_size = _padded_sizes(case)
        shared_tokens = context_size + len(case.questions) * question_size
        fewer = shared_tokens < sum(padded_length(_row_length(case, question)) for question in case.questions)
        # One token of context is the first input of the questions, and leaves none for the state before them.
        if len(case.context) > 1 and (fewer if share is None else share):
            shared_cases.setdefault((context_size, question_size), []).append(case_index)
        else:
            for prompt, answer in case.questions:
                whole_rows.append(_Row(_concatenate(case.context, prompt, answer[:-1]), answer))
                row_cases.append(case_index)
    segmented = _SegmentedModel(model, on_call)
    scores: list[list[Score]] = [[] for _ in cases]
    for case_index, score in zip(row_cases, _score_whole_rows(segmented, whole_rows)):
        scores[case_index].append(score)
    for (context_size, question_size), indices in shared_cases.items():
        same_sizes = [cases[case_index] for case_index in indices]
        for case_index, case_scores in zip(
            indices, _score_shared(segmented, same_sizes, context_size, question_size)
        ):
            scores[case_index] = case_scores
    return scores


def padded_length(length: int) -> int:
    """Returns the length that a row is padded to: a power of two, or a multiple of 16,384 if it is longer than that."""
    if length > _CALL_TOKENS:
        return -(-length // _CALL_TOKENS) * _CALL_TOKENS
    return max(_SHORTEST, 1 << (length - 1).bit_length())


def _check(case: Case, config: config_lib.ModelConfig) -> None:
    if not len(case.context):
        raise ValueError("a context is empty; it needs at least one token, such as the id between documents")
    _check_vocabulary(case.context, config.vocab_size)
    longest = config.longest_document
    for question in case.questions:
        _check_vocabulary(question.prompt, config.vocab_size)
        _check_vocabulary(question.answer, config.vocab_size)
        if not len(question.answer):
            raise ValueError("an answer is empty; it needs at least one token")
        length = _row_length(case, question)
        if longest is not None and length > longest:
            raise ValueError(
                f"a context with its question has {length} tokens before the last one, but the model's learned "
                f"positions end at {longest}; shorten it"
            )


def _check_vocabulary(tokens: Tokens, vocab_size: int) -> None:
    ids = np.asarray(tokens)
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise ValueError(
            f"token id {wrong[0]} is outside the model's vocabulary of {vocab_size}; use the model's tokenizer"
        )


def _concatenate(*parts: Tokens) -> Int32[np.ndarray, " tokens"]:
    # Each part on its own, because an empty list is an array of floats.
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def _row_length(case: Case, question: Question) -> int:
    """Returns the number of tokens of a context with a question, without the last one, which is only predicted."""
    return len(case.context) + len(question.prompt) + len(question.answer) - 1


def _padded_sizes(case: Case) -> tuple[int, int]:
    """Returns the padded lengths of a context without its last token, and of its longest question with that token."""
    longest = max(len(question.prompt) + len(question.answer) for question in case.questions)
    return padded_length(len(case.context) - 1), padded_length(longest)


def _score_whole_rows(segmented: "_SegmentedModel", rows: Sequence[_Row]) -> list[Score]:
    """Returns the score of each row of a context with a question."""
    by_length: dict[int, list[int]] = {}
    for row_index, row in enumerate(rows):
        by_length.setdefault(padded_length(len(row.inputs)), []).append(row_index)
    scores: dict[int, Score] = {}
    for length, indices in by_length.items():
        answer_size = padded_length(max(len(rows[row_index].answer) for row_index in indices))
        for batch in _batches(indices, max(1, _CALL_TOKENS // length)):
            batch_rows = [rows[row_index] for row_index in batch]
            scores.update(zip(batch, segmented.score(batch_rows, length, answer_size)))
    return [scores[row_index] for row_index in range(len(rows))]


def _score_shared(
    segmented: "_SegmentedModel", cases: Sequence[Case], context_size: int, question_size: int
) -> list[list[Score]]:
    """Returns the scores of cases of one padded size, with one pass over each context.

    The last token of a context is the first input of each question, as its output predicts what follows.
    """
    scores: list[list[Score]] = [[] for _ in cases]
    answers = [question.answer for case in cases for question in case.questions]
    answer_size = padded_length(max(map(len, answers)))
    max_length = context_size + question_size
    call_rows = _CALL_TOKENS // max(context_size, question_size)
    state_rows = _STATE_BYTES // _state_bytes(segmented.model, max_length)
    for batch in _batches(range(len(cases)), max(1, min(call_rows, state_rows))):
        contexts = [cases[case_index].context for case_index in batch]
        state = segmented.model.init_state(len(batch), max_length=max_length)
        state = segmented.advance([context[:-1] for context in contexts], context_size, state)
        for question_index in range(max(len(cases[case_index].questions) for case_index in batch)):
            rows = []
            for case_index, context in zip(batch, contexts):
                # A case with fewer questions repeats its last one, whose score is dropped.
                questions = cases[case_index].questions
                prompt, answer = questions[min(question_index, len(questions) - 1)]
                rows.append(_Row(_concatenate(context[-1:], prompt, answer[:-1]), answer))
            # The dictionary drops the copies that fill a batch.
            batch_scores = dict(zip(batch, segmented.score(rows, question_size, answer_size, state)))
            for case_index, score in batch_scores.items():
                if question_index < len(cases[case_index].questions):
                    scores[case_index].append(score)
    return scores


def _state_bytes(model: models.DecoderLM, max_length: int) -> int:
    """Returns the bytes of the state of one row."""
    state = jax.eval_shape(lambda: model.init_state(1, max_length=max_length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _batches(items: Sequence[int], largest: int) -> list[list[int]]:
    """Returns batches of one size, a power of two; the last is filled with copies of its last item."""
    size = min(1 << (largest.bit_length() - 1), 1 << (len(items) - 1).bit_length())
    batches = [list(batch) for batch in itertools.batched(items, size)]
    batches[-1] += [batches[-1][-1]] * (size - len(batches[-1]))
    return batches


def _segments(
    rows: Sequence[Tokens], length: int
) -> Iterator[tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]]:
    """Yields tokens and segment ids of the consecutive segments of rows that are padded to `length`."""
    tokens = np.zeros((len(rows), length), np.int32)
    segment_ids = np.full((len(rows), length), _PADDING, np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
        segment_ids[index, : len(row)] = _DOCUMENT
    size = min(length, _CALL_TOKENS)
    for start in range(0, length, size):
        yield tokens[:, start : start + size], segment_ids[:, start : start + size]


class _SegmentedModel:
    """A model that is called on padded rows, segment by segment."""

    def __init__(self, model: models.DecoderLM, on_call: Callable[[int], None] | None):
        self.model = model
        self._graph_and_variables = nnx.split(model)
        self._on_call = on_call

    def advance(self, rows: Sequence[Tokens], length: int, state: models.DecoderState) -> models.DecoderState:
        """Returns the state after rows that are padded to `length`; the state before them is donated."""
        for tokens, segment_ids in _segments(rows, length):
            state = _advance(*self._graph_and_variables, state, tokens, segment_ids)
            self._report(tokens)
        return state

    def score(
        self, rows: Sequence[_Row], length: int, answer_size: int, state: models.DecoderState | None = None
    ) -> list[Score]:
        """Returns the scores of rows that are padded to `length`, after the state, which is not modified.

        Args:
            rows: the rows.
            length: padded length of the rows.
            answer_size: padded length of the answers.
            state: state before each row; None if the rows begin a document.
        """
        size = min(length, _CALL_TOKENS)
        in_segments = length > size
        if in_segments:
            # The segments reuse the memory of this state, which the caller may need again.
            state = (
                self.model.init_state(len(rows), max_length=length)
                if state is None
                else jax.tree.map(jnp.copy, state)
            )
        answer_size = min(answer_size, size)
        losses = np.zeros((len(rows), length), np.float32)
        correct = np.zeros((len(rows), length), bool)
        targets = np.zeros((len(rows), length), np.int32)
        starts = np.array([len(row.inputs) - len(row.answer) for row in rows])
        for index, (row, start) in enumerate(zip(rows, starts)):
            targets[index, start : start + len(row.answer)] = row.answer
        for segment, (tokens, segment_ids) in enumerate(_segments([row.inputs for row in rows], length)):
            # The `answer_size` positions of this segment that include every position predicting an answer token.
            first = np.clip(starts - segment * size, 0, size - answer_size)
            positions = first[:, None] + np.arange(answer_size)
            columns = segment * size + positions
            segment_targets = np.take_along_axis(targets, columns, axis=1)
            arguments = tokens, segment_ids, positions, segment_targets
            if in_segments:
                (loss, is_correct), state = _score_and_advance(*self._graph_and_variables, state, *arguments)
            else:
                loss, is_correct = _score(*self._graph_and_variables, state, *arguments)
            np.put_along_axis(losses, columns, np.asarray(loss), axis=1)
            np.put_along_axis(correct, columns, np.asarray(is_correct), axis=1)
            self._report(tokens)
        spans = [slice(start, start + len(row.answer)) for row, start in zip(rows, starts)]
        return [Score(losses[index, span], correct[index, span]) for index, span in enumerate(spans)]

    def _report(self, tokens: Int[np.ndarray, "B T"]) -> None:
        if self._on_call is not None:
            self._on_call(tokens.size)


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="state")
def _advance(
    graph: nnx.GraphDef,
    variables: nnx.State,
    state: PyTree,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> PyTree:
    model = nnx.merge(graph, variables)
    return model.hidden(tokens, segment_ids=segment_ids, initial_state=state, return_state=True)[1]


@functools.partial(jax.jit, static_argnames="graph")
def _score(
    graph: nnx.GraphDef,
    variables: nnx.State,
    state: PyTree | None,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B A"],
    targets: Int[Array, "B A"],
) -> tuple[Float[Array, "B A"], Bool[Array, "B A"]]:
    model = nnx.merge(graph, variables)
    hidden = model.hidden(tokens, segment_ids=segment_ids, initial_state=state)
    return _losses_and_hits_at(model, hidden, positions, targets)


@functools.partial(jax.jit, static_argnames="graph", donate_argnames="state")
def _score_and_advance(
    graph: nnx.GraphDef,
    variables: nnx.State,
    state: PyTree,
    tokens: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B A"],
    targets: Int[Array, "B A"],
) -> tuple[tuple[Float[Array, "B A"], Bool[Array, "B A"]], PyTree]:
    model = nnx.merge(graph, variables)
    hidden, state = model.hidden(tokens, segment_ids=segment_ids, initial_state=state, return_state=True)
    return _losses_and_hits_at(model, hidden, positions, targets), state


def _losses_and_hits_at(
    model: models.DecoderLM,
    hidden: Float[Array, "B T M"],
    positions: Int[Array, "B A"],
    targets: Int[Array, "B A"],
) -> tuple[Float[Array, "B A"], Bool[Array, "B A"]]:
    return streaming.losses_and_hits(
        model, jnp.take_along_axis(hidden, positions[..., None], axis=1), targets
    )
