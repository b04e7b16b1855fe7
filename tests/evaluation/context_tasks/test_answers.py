"""Tests of the scores of answers against one pass over each row, with and without sharing contexts."""

import jax
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, evaluation, models
from sympow_jax.evaluation.context_tasks import answers

VOCABULARY = 13


def decoder(preset, **options):
    """Returns a decoder whose outputs depend visibly on the whole context."""
    settings = config.ModelConfig(
        vocab_size=VOCABULARY,
        layers=1,
        width=16,
        heads=2,
        dtype="float32",
        attention=config.preset(preset, **options),
    )
    model = models.DecoderLM(settings, rngs=nnx.Rngs(0))
    for parameter in jax.tree.leaves(nnx.state(model), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        parameter[...] = 5 * parameter[...]
    return model


def draw_cases():
    """Draws ragged cases: one token of context, several questions, no prompt, and rows of several segments."""
    rng = np.random.default_rng(0)

    def tokens(size):
        return rng.integers(0, VOCABULARY, size).tolist()

    shapes = [
        (1, [(0, 3)]),
        (7, [(2, 1), (0, 4), (5, 2)]),
        (40, [(2, 3), (0, 1)]),
        (45, [(3, 2), (1, 1), (4, 5)]),
        (6, [(1, 70)]),
    ]
    return [
        answers.Case(
            tokens(context),
            [answers.Question(tokens(prompt), tokens(answer)) for prompt, answer in questions],
        )
        for context, questions in shapes
    ]


def reference(model, cases):
    """Returns losses and hits of each question from one pass over padded rows without a state, in float64."""
    rows = [[*case.context, *x.prompt, *x.answer] for case in cases for x in case.questions]
    padded = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    logits = np.asarray(jax.jit(lambda inputs: model(inputs))(padded), np.float64)
    scores = []
    for index, (row, answer) in enumerate(zip(rows, (x.answer for case in cases for x in case.questions))):
        positions = np.arange(len(row) - len(answer), len(row)) - 1
        answer_logits = logits[index, positions]
        loss = np.log(np.exp(answer_logits).sum(-1)) - answer_logits[np.arange(len(answer)), answer]
        scores.append((loss, answer_logits.argmax(-1) == answer))
    return scores


@pytest.mark.parametrize(
    ("preset", "call_tokens", "share"),
    [
        pytest.param("conformal", 32, None, marks=pytest.mark.slow),
        pytest.param("softmax", 32, True, marks=pytest.mark.slow),
        ("conformal", 16_384, True),
        ("softmax", 16_384, False),
    ],
)
def test_scores_equal_one_pass_over_each_row(monkeypatch, preset, call_tokens, share):
    # Long rows are several segments, or every row is one.
    monkeypatch.setattr(answers, "_CALL_TOKENS", call_tokens)
    model, cases = decoder(preset), draw_cases()
    scores = evaluation.answer_scores(model, cases, share=share)
    assert [len(of_case) for of_case in scores] == [len(case.questions) for case in cases]
    for score, (losses, correct) in zip((x for of_case in scores for x in of_case), reference(model, cases)):
        np.testing.assert_allclose(score.losses, losses, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(score.correct, correct)


def test_a_context_is_processed_once_where_that_needs_fewer_tokens():
    model, done = decoder("softmax"), []
    long = answers.Case([1] * 200, [answers.Question([2], [3])] * 4)
    evaluation.answer_scores(model, [long], on_call=done.append)
    assert done == [256, 16, 16, 16, 16]
    done.clear()
    evaluation.answer_scores(model, [answers.Case([1] * 200, long.questions[:1])], on_call=done.append)
    assert done == [256]


def test_a_context_that_is_processed_once_is_not_copied_for_each_question():
    class Context(list):
        reads = 0

        def __iter__(self):
            self.reads += 1
            return super().__iter__()

    context = Context([1] * 200)
    case = answers.Case(context, [answers.Question([2], [3])] * 4)
    ((first, *_),) = evaluation.answer_scores(decoder("softmax"), [case])
    assert len(first.losses) == 1
    assert context.reads == 1  # to check its ids


@pytest.mark.parametrize(("share", "calls"), [(True, 4), (False, 7)])
def test_segments_reuse_the_memory_of_the_state(monkeypatch, share, calls):
    monkeypatch.setattr(answers, "_CALL_TOKENS", 32)
    score_and_advance, states = answers._score_and_advance, []

    def recorded(graph, variables, state, *arguments):
        states.append(state)
        return score_and_advance(graph, variables, state, *arguments)

    monkeypatch.setattr(answers, "_score_and_advance", recorded)
    case = answers.Case([1] * 100, [answers.Question([2], [3] * 100)])
    evaluation.answer_scores(decoder("conformal"), [case], share=share)
    assert len(states) == calls
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(states))


@pytest.mark.parametrize("share", [None, True, False])
def test_a_case_without_questions_has_no_scores(share):
    cases = [answers.Case([1, 2], []), answers.Case([1, 2], [answers.Question([], [3])])]
    none, one = evaluation.answer_scores(decoder("softmax"), cases, share=share)
    assert (len(none), len(one)) == (0, 1)


def test_rows_of_similar_lengths_share_their_program():
    model = decoder("softmax")
    cases = [answers.Case([1] * size, [answers.Question([], [3] * (1 + size % 5))]) for size in range(17, 29)]
    answers._score.clear_cache()
    evaluation.answer_scores(model, cases)
    assert answers._score._cache_size() == 1


def test_states_of_a_call_are_bounded(monkeypatch):
    model = decoder("softmax")
    cases = [answers.Case([1] * 50, [answers.Question([2], [3])] * 4)] * 3
    monkeypatch.setattr(answers, "_STATE_BYTES", 1)
    done = []
    evaluation.answer_scores(model, cases, on_call=done.append)
    assert done == [64, 16, 16, 16, 16] * 3


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (answers.Case([], [answers.Question([1], [2])]), "a context is empty"),
        (answers.Case([1], [answers.Question([1], [])]), "an answer is empty"),
        (
            answers.Case([1, 99], [answers.Question([1], [2])]),
            "token id 99 is outside the model's vocabulary of 13; use the model's tokenizer",
        ),
        (answers.Case([1], [answers.Question([-1], [2])]), "token id -1 is outside"),
        (answers.Case([1], [answers.Question([1], [2, 13])]), "token id 13 is outside"),
        (
            answers.Case([1] * 6, [answers.Question([1], [2, 3])]),
            "has 8 tokens .* learned positions end at 7",
        ),
    ],
)
def test_a_case_that_cannot_be_scored_is_an_error(case, message):
    model = decoder("softmax", position="learned_absolute", max_document_length=7)
    with pytest.raises(ValueError, match=message):
        evaluation.answer_scores(model, [case])


def test_padding_beyond_learned_positions_changes_nothing():
    model = decoder("softmax", position="learned_absolute", max_document_length=20)
    cases = [answers.Case([1, 2] * 8, [answers.Question([3], [4, 5, 6]), answers.Question([], [7])])]
    scores = evaluation.answer_scores(model, cases, share=True)[0]
    for score, (losses, _) in zip(scores, reference(model, cases)):
        np.testing.assert_allclose(score.losses, losses, rtol=0, atol=1e-5)
