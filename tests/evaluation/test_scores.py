"""Tests of losses and hits against one pass over each row, and with a model of known loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import evaluation
from sympow_jax.evaluation import scores
from tests import marked
from tests.evaluation import fakes

VOCABULARY = 13


@pytest.fixture
def compile_anew():
    """Clears the compiled programs, for tests that change a bound that is read while tracing, or count programs."""
    scores._losses_and_hits.clear_cache()


def decoder(preset, **options):
    return fakes.decoder(VOCABULARY, preset, **options)


def draw_cases(*shapes):
    rng = np.random.default_rng(0)

    def tokens(size):
        return rng.integers(0, VOCABULARY, size).tolist()

    return [
        scores.Case(
            tokens(context), [scores.Question(tokens(prompt), tokens(answer)) for prompt, answer in questions]
        )
        for context, questions in shapes
    ]


# Ragged: one token of context, several questions, and no prompt. Contexts are processed once per question,
SHORT = [(1, [(0, 3)]), (7, [(2, 1), (0, 4), (5, 2)]), (12, [(2, 3), (0, 1)])]
# or once.
SHARED = [(20, [(2, 1), (0, 4), (5, 2), (1, 1)]), (30, [(2, 3), (0, 1), (3, 2)])]
# Both, and rows, contexts and questions of several segments.
LONG = [*SHORT, *SHARED, (45, [(3, 2), (1, 1), (4, 5)]), (6, [(1, 70)]), (40, [(2, 60), (1, 50), (0, 3)])]


def reference(model, cases):
    """Returns losses and hits of each question from one pass over padded rows without a state, in float64."""
    rows = [[*case.context, *x.prompt, *x.answer] for case in cases for x in case.questions]
    padded = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    logits = np.asarray(jax.jit(lambda inputs: model(inputs))(padded), np.float64)
    found = []
    for index, (row, answer) in enumerate(zip(rows, (x.answer for case in cases for x in case.questions))):
        positions = np.arange(len(row) - len(answer), len(row)) - 1
        answer_logits = logits[index, positions]
        loss = np.log(np.exp(answer_logits).sum(-1)) - answer_logits[np.arange(len(answer)), answer]
        found.append((loss, answer_logits.argmax(-1) == answer))
    return found


@marked.cases(
    ("preset", "call_tokens", "shapes", "tokens"),
    [("linear", 16_384, [SHORT[0], *SHARED], 16 + 2 * (32 + 4 * 16)), ("softmax", 16, SHORT, 6 * 16)],
    slow=[("conformal", 32, LONG, 736), ("softmax", 32, LONG, 736)],
)
def test_scores_equal_one_pass_over_each_row(monkeypatch, preset, call_tokens, shapes, tokens):
    # Long rows are several segments, or every row is one.
    monkeypatch.setattr(scores, "CALL_TOKENS", call_tokens)
    model, cases, done = decoder(preset), draw_cases(*shapes), []
    found = evaluation.answer_scores(model, cases, on_call=done.append)
    assert sum(done) == tokens
    assert [len(of_case) for of_case in found] == [len(case.questions) for case in cases]
    for score, (losses, correct) in zip((x for of_case in found for x in of_case), reference(model, cases)):
        np.testing.assert_allclose(score.losses, losses, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(score.correct, correct)


def test_a_context_is_processed_once_where_that_needs_fewer_tokens():
    model, done = fakes.CountingModel(), []
    long = scores.Case([1] * 200, [scores.Question([2], [3])] * 4)
    evaluation.answer_scores(model, [long], on_call=done.append)
    assert done == [256, 16, 16, 16, 16]
    done.clear()
    evaluation.answer_scores(model, [scores.Case([1] * 200, long.questions[:1])], on_call=done.append)
    assert done == [256]


def test_segments_reuse_the_memory_of_the_state(monkeypatch):
    monkeypatch.setattr(scores, "CALL_TOKENS", 32)
    model, states = decoder("softmax"), []
    extend = type(model).extend_hidden

    def recorded(self, tokens, state, **options):
        states.append(state)
        return extend(self, tokens, state, **options)

    monkeypatch.setattr(type(model), "extend_hidden", recorded)
    case = scores.Case([1] * 100, [scores.Question([2], [3] * 100)] * 2)
    evaluation.answer_scores(model, [case])
    assert len(states) == 12
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(states))


def test_a_case_without_questions_has_no_scores():
    for count in (1, 4):  # a context that is processed once per question, or once
        cases = [scores.Case([1] * 200, [scores.Question([], [3])] * questions) for questions in (0, count)]
        assert [len(x) for x in evaluation.answer_scores(fakes.CountingModel(), cases)] == [0, count]


def test_rows_of_similar_lengths_share_their_program(compile_anew):
    cases = [scores.Case([1] * size, [scores.Question([], [3] * (1 + size % 5))]) for size in range(17, 29)]
    evaluation.answer_scores(fakes.CountingModel(), cases)
    assert scores._losses_and_hits._cache_size() == 1


def test_states_of_a_call_are_bounded(monkeypatch):
    cases = [scores.Case([1] * 50, [scores.Question([2], [3])] * 4)] * 3
    monkeypatch.setattr(scores, "_STATE_BYTES", 1)
    done = []
    evaluation.answer_scores(fakes.CountingModel(), cases, on_call=done.append)
    assert done == [64, 16, 16, 16, 16] * 3


def test_a_case_that_cannot_be_scored_is_an_error():
    model = decoder("softmax", position="learned_absolute", max_document_length=7)
    for context, prompt, answer, message in (
        ([], [1], [2], "a context is empty"),
        ([1], [1], [], "an answer is empty"),
        ([1, 99], [1], [2], "token id 99 is outside the model's vocabulary of 13; use the model's tokenizer"),
        ([1], [-1], [2], "token id -1 is outside"),
        ([1], [1], [2, 13], "token id 13 is outside"),
        ([1] * 6, [1], [2, 3], "has 8 tokens .* learned positions end at 7"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluation.answer_scores(model, [scores.Case(context, [scores.Question(prompt, answer)])])


def test_padding_beyond_learned_positions_changes_nothing():
    model = decoder("softmax", position="learned_absolute", max_document_length=20)
    # The context is processed once, in 16 tokens, and each question in as many.
    questions = [scores.Question([3], [4, 5, 6]), scores.Question([], [7]), scores.Question([8], [9])]
    cases, done = [scores.Case([1, 2] * 8, questions)], []
    found = evaluation.answer_scores(model, cases, on_call=done.append)[0]
    assert done == [16] * 4
    for score, (losses, _) in zip(found, reference(model, cases)):
        np.testing.assert_allclose(score.losses, losses, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("count", "length", "call"),
    [(3, 50, 16_384), (1, 2, 16_384), (5, 98, 16), (5, 98, 200), (2, 129, 32), (3, 34, 32), (2, 3, 1)],
)
def test_segments_batches_and_padding_change_nothing(monkeypatch, count, length, call):
    monkeypatch.setattr(scores, "CALL_TOKENS", call)
    losses = evaluation.token_losses(fakes.CountingModel(), fakes.counting_documents(count, length))
    expected = np.tile(fakes.expected_loss(np.arange(1, length)), (count, 1))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("documents", "length", "shape", "calls"),
    [
        (7, 90, (1, 45), 14),  # 89 predictions in two segments
        (7, 20, (2, 19), 4),  # 3 calls of 2 documents and one of 1, padded
        (5, 13, (3, 12), 2),  # as evenly as possible, not 4 and 1
    ],
)
def test_all_calls_share_one_shape(monkeypatch, documents, length, shape, calls):
    monkeypatch.setattr(scores, "CALL_TOKENS", 48)
    shapes, done = [], []

    class Traced(fakes.CountingModel):
        def extend_hidden(self, tokens, state, **options):
            shapes.append(tokens.shape)
            return super().extend_hidden(tokens, state, **options)

    evaluation.token_losses(Traced(), fakes.counting_documents(documents, length), on_call=done.append)
    assert shapes == [shape] * calls
    assert done == [np.prod(shape)] * calls


def test_a_small_bound_on_the_logits_changes_nothing(monkeypatch, compile_anew):
    monkeypatch.setattr(scores, "_LOGIT_BYTES", 4 * fakes.VOCABULARY * 10)  # ten tokens at once
    losses = evaluation.token_losses(fakes.CountingModel(), fakes.counting_documents(3, 50))
    np.testing.assert_allclose(losses, np.tile(fakes.expected_loss(np.arange(1, 50)), (3, 1)), rtol=1e-6)


def test_a_hit_is_the_first_of_the_highest_logits():
    logits = jnp.array([[[0, 2, 2.0]], [[2, 1, 2]], [[0, 0, 1]], [[jnp.nan, 1, 0]]])
    for target in range(3):
        _, hits = scores._losses_and_hits(fakes.CountingModel(), logits, jnp.full((4, 1), target), None)
        expected = logits[:3, 0].argmax(-1) == target
        np.testing.assert_array_equal(hits[:, 0], [*expected, False])


def test_the_logits_of_a_large_vocabulary_are_never_held_for_a_whole_call():
    class WideModel(fakes.CountingModel):
        def unembed(self, hidden):
            return jnp.pad(hidden, ((0, 0), (0, 0), (0, 50_000 - hidden.shape[-1])))

    model, targets = WideModel(), np.zeros((4, 2048), np.int32)
    lowered = scores._losses_and_hits.lower(model, model.hidden(targets), targets, None)
    # All logits would take 1.6 GB; a few copies of the 64 MiB at hand are what a loss needs.
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 4 * scores._LOGIT_BYTES
