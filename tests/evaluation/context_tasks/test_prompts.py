"""Tests of the texts of context tasks: their length, and that their answers follow from the context."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from sympow_jax import data
from sympow_jax.evaluation.context_tasks import prompts

BYTES = data.Codec(data.tokenizer.load("byte"), vocab_size=256)
TEXT = np.frombuffer(
    b"It was a bright cold day in April, and the clocks were striking thirteen. " * 20, np.uint8
)
MATERIAL = prompts.Material(TEXT, BYTES)
LENGTHS = (256, 300, 1024)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Tokenizer whose tokens are up to three bytes, after a lead."""

    lead: int | None = 0

    def encode(self, prompt, name):
        chunks = [prompt[start : start + 3] for start in range(0, len(prompt), 3)]
        return [0, *(int.from_bytes(chunk, "little") for chunk in chunks)]


def make(task, length=300, material=MATERIAL, index=0):
    return prompts.make_exam(task, material, length, seed=0, index=index)


def text(tokens):
    return BYTES.decode(np.asarray(tokens).tolist()).decode()


@pytest.mark.parametrize("task", prompts.TASKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_an_exam_has_the_length_and_the_number_of_questions(task, length):
    case, _, depths = make(task, length)
    assert len(depths) in (0, len(case.questions))
    assert len(case.questions) == prompts.TASKS[task].questions
    longest = max(len(x.prompt) + len(x.answer) for x in case.questions)
    # Recall has whole pairs of ten bytes only, a copy two equal parts.
    slack = {"recall": 9, "copy": length % 2}.get(task, 0)
    assert length - slack <= len(case.context) + longest <= length


@pytest.mark.parametrize("task", prompts.TASKS)
def test_an_exam_depends_on_its_arguments_only(task):
    jax.tree.map(np.testing.assert_array_equal, make(task), make(task))
    assert make(task).case.context.tolist() != make(task, index=1).case.context.tolist()


@pytest.mark.parametrize("task", prompts.TASKS)
def test_tokens_take_four_bytes(task):
    case = make(task).case
    arrays = [case.context, *(tokens for question in case.questions for tokens in question)]
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


@pytest.mark.parametrize("task", prompts.TASKS)
def test_a_lead_comes_first_and_longer_tokens_are_counted(task):
    material = prompts.Material(TEXT.astype(np.int32), Chunks(), lead=0)
    case, _, _ = make(task, 200, material)
    assert case.context[0] == 0
    assert 0 not in case.context[1:]
    assert len(case.context) + max(len(x.prompt) + len(x.answer) for x in case.questions) <= 200


def test_recall_asks_for_the_values_of_different_pairs():
    case, log_candidates, depths = make("recall")
    pairs = dict(line.split("=") for line in text(case.context).splitlines())
    assert len(pairs) == (300 - 9) // 10
    asked = {text(x.prompt): text(x.answer) for x in case.questions}
    assert len(asked) == len(case.questions)
    assert all(pairs[key.removesuffix("=")] == value for key, value in asked.items())
    assert log_candidates == pytest.approx(np.log(len(set(pairs.values()))))
    assert [list(pairs)[round(depth * len(pairs))] for depth in depths] == [
        text(x.prompt).removesuffix("=") for x in case.questions
    ]
    assert [int(8 * depth) for depth in depths] == list(range(8))


def test_needles_are_hidden_in_the_quarters_of_a_text():
    case, log_candidates, depths = make("needle", 1024)
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
    assert log_candidates == pytest.approx(np.log(4))


def test_variables_follow_from_the_assignments():
    case, log_candidates, depths = make("variables", 400)
    assert not depths
    values, chain = {}, []
    for name, source in re.findall(r"\nVAR (\w+) = (?:VAR )?(\w+)\n", text(case.context)):
        values[name] = values.get(source, source)
        chain.append(name)
    (question,) = case.questions
    (asked,) = re.fullmatch(r"\nVariables assigned the value (\d{5}):", text(question.prompt)).groups()
    assert len(chain) == 5
    assert set(values.values()) == {asked}
    assert text(question.answer) == "".join(f" {name}" for name in chain)
    assert log_candidates == pytest.approx(np.log(120))


def test_a_copy_repeats_random_tokens_of_the_text():
    case, log_candidates, depths = make("copy", material=prompts.Material(TEXT))
    assert not depths
    (question,) = case.questions
    assert [*question.prompt, *question.answer] == case.context.tolist()
    alphabet = set(TEXT.tolist())
    assert set(case.context) <= alphabet
    assert log_candidates == pytest.approx(149 * np.log(len(alphabet)))


@pytest.mark.parametrize("task", prompts.TASKS)
def test_a_length_that_is_too_short_says_how_long_it_must_be(task):
    with pytest.raises(prompts.TooShortError, match=f"context length 3 is too short .* {task!r}") as error:
        make(task, 3)
    needed = int(re.search(r"at least (\d+) tokens", str(error.value))[1])
    make(
        task, needed + 12
    )  # other words may have more or fewer tokens; bytes have not, but other numbers are drawn
    with pytest.raises(prompts.TooShortError):
        make(task, needed - 1)


def test_texts_need_a_tokenizer():
    with pytest.raises(ValueError, match="needs the tokenizer of the data; give it as --tokenizer=FILE"):
        make("needle", material=prompts.Material(TEXT))


def test_a_long_recall_does_not_run_out_of_keys(monkeypatch):
    """With two letters, of which keys are made, four would be 16 keys."""
    monkeypatch.setattr(prompts.string, "ascii_lowercase", "ab")
    case = prompts.make_exam("recall", MATERIAL, 2000, seed=0, index=0).case
    keys = [line.split("=")[0] for line in text(case.context).splitlines()]
    assert len(set(keys)) == len(keys) > 100
