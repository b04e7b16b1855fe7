"""Tests of the texts of context tasks; `test_known_answers` tests that answers follow from the context."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from sympow_jax.evaluation.context_tasks import prompts
from tests.evaluation.context_tasks.test_known_answers import BYTES, MATERIAL, TEXT

EACH_TASK = pytest.mark.parametrize("task", prompts.TASKS)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Tokenizer whose tokens are up to three bytes, after a lead."""

    lead: int | None = 0

    def encode(self, prompt, name):
        chunks = [prompt[start : start + 3] for start in range(0, len(prompt), 3)]
        return [0, *(int.from_bytes(chunk, "little") for chunk in chunks)]


def make(task, length=300, material=MATERIAL, index=0):
    return prompts.make_exam(task, material, length, index=index)


def text(tokens):
    return BYTES.decode(np.asarray(tokens).tolist()).decode()


@EACH_TASK
def test_an_exam_has_the_length_and_the_number_of_questions(task):
    for length in (256, 300, 1024):
        case, _, depths = make(task, length)
        assert len(depths) in (0, len(case.questions))
        assert len(case.questions) == prompts.TASKS[task].questions
        longest = max(len(x.prompt) + len(x.answer) for x in case.questions)
        # Recall has whole pairs of ten bytes only, a copy two equal parts.
        slack = {"recall": 9, "copy": length % 2}.get(task, 0)
        assert length - slack <= len(case.context) + longest <= length
    # It depends on the arguments only, and its tokens take four bytes.
    jax.tree.map(np.testing.assert_array_equal, make(task), make(task))
    assert make(task).case.context.tolist() != make(task, index=1).case.context.tolist()
    arrays = [case.context, *(tokens for question in case.questions for tokens in question)]
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


@EACH_TASK
def test_a_lead_comes_first_and_longer_tokens_are_counted(task):
    material = prompts.Material(TEXT.astype(np.int32), Chunks(), lead=0)
    case, _, _ = make(task, 200, material)
    assert case.context[0] == 0
    assert 0 not in case.context[1:]
    assert len(case.context) + max(len(x.prompt) + len(x.answer) for x in case.questions) <= 200


def test_needles_are_hidden_in_the_quarters_of_a_text():
    case, _, depths = make("needle", 1024)
    context = text(case.context)
    size = len(context) - sum(len(x.prompt) + len(x.answer) + 2 for x in case.questions)
    before = 0
    for quarter, question in enumerate(case.questions):
        needle = f"{text(question.prompt)}{text(question.answer)}.\n"
        assert context.count(needle) == 1
        position = context.index(needle) - before
        assert quarter * size // 4 <= position <= (quarter + 1) * size // 4
        assert position == int(depths[quarter] * size)
        before += len(needle)
    for question in case.questions:
        context = context.replace(f"{text(question.prompt)}{text(question.answer)}.\n", "")
    assert context in 3 * text(TEXT)


def test_recall_asks_in_each_eighth():
    assert [int(8 * depth) for depth in make("recall").depths] == list(range(8))


@EACH_TASK
def test_a_length_that_is_too_short_says_how_long_it_must_be(task):
    with pytest.raises(prompts.TooShortError, match=f"context length 3 is too short .* {task!r}") as error:
        make(task, 3)
    needed = int(re.search(r"at least (\d+) tokens", str(error.value))[1])
    make(task, needed + 12)  # words of other lengths may be drawn
    with pytest.raises(prompts.TooShortError):
        make(task, needed - 1)


def test_texts_need_a_tokenizer():
    with pytest.raises(ValueError, match="needs the tokenizer of the data; give it as --tokenizer=FILE"):
        make("needle", material=prompts.Material(TEXT))


def test_a_long_recall_does_not_run_out_of_keys(monkeypatch):
    """With two letters, of which keys are made, four would be 16 keys."""
    monkeypatch.setattr(prompts.string, "ascii_lowercase", "ab")
    case = prompts.make_exam("recall", MATERIAL, 2000, index=0).case
    keys = [line.split("=")[0] for line in text(case.context).splitlines()]
    assert len(set(keys)) == len(keys) > 100
