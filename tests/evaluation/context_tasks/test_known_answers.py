"""Tests of whole tasks with models whose results are known: one reads the context, one guesses."""

import itertools
import re

import numpy as np
import pytest

from sympow_jax import data, evaluation
from sympow_jax.evaluation import scores
from sympow_jax.evaluation.context_tasks import prompts

BYTES = data.Codec(data.tokenizer.load("byte"), vocab_size=256)
TEXT = np.frombuffer(
    b"It was a bright cold day in April, and the clocks were striking thirteen. " * 20, np.uint8
)
MATERIAL = evaluation.Material(TEXT, BYTES)
LENGTHS = (256, 700)


def read_recall(text, length):
    """Returns the answer with its quarter of the context, and all values of the context."""
    *lines, last = text.split(b"\n")
    pairs = dict(line.split(b"=") for line in lines)
    key = last.split(b"=")[0]
    return pairs[key], 4 * list(pairs).index(key) // len(pairs), sorted(set(pairs.values()))


def read_needle(text, length):
    numbers = dict(re.findall(rb"\nThe magic number of (\w{4}) is #(\d{5})\.\n", text))
    question = re.search(rb"\nThe magic number of (\w{4}) is #$", text)
    return numbers[question[1]], list(numbers).index(question[1]), sorted(numbers.values())


def read_variables(text, length):
    question = re.search(rb"\nVariables assigned the value (\d{5}):", text)
    values = {}
    for name, source in re.findall(rb"\nVAR (\w+) = (?:VAR )?(\w+)\n", text):
        values[name] = values.get(source, source)
    names = [b" " + name for name, value in values.items() if value == question[1]]
    return b"".join(names), None, list(map(b"".join, itertools.permutations(names)))


def read_copy(text, length):
    return text[1 : length // 2], None, None


READERS = {"recall": read_recall, "needle": read_needle, "variables": read_variables, "copy": read_copy}


def read(monkeypatch, task, length, *, guesses=False, blind=None):
    """Returns the result of a model that reads the question and the context.

    guesses: all answers that the context has to offer are equally probable. blind: the quarter of the context in which
    it reads nothing.
    """

    def score(case, question):
        answer, quarter, candidates = READERS[task](bytes([*case.context, *question.prompt]), length)
        asked = bytes([*question.answer])
        assert answer == asked
        if not guesses:
            right = blind is None or quarter != blind
            return scores.Score(np.full(len(asked), 0.0 if right else 20.0), np.full(len(asked), right))
        losses = []
        for index, byte in enumerate(asked):
            # A copy may be of any bytes of the text.
            starts = (x for x in candidates or () if x.startswith(asked[:index]))
            offered = [x[index] for x in starts] or [*set(TEXT.tolist())]
            losses.append(np.log(len(offered) / offered.count(byte)))
        return scores.Score(np.array(losses), np.zeros(len(asked), bool))

    def answer_scores(_, cases):
        return [[score(case, question) for question in case.questions] for case in cases]

    monkeypatch.setattr(scores, "answer_scores", answer_scores)
    (result,) = evaluation.context_task_results(None, MATERIAL, [task], [length], trials=4)
    return result


EACH_TASK = pytest.mark.parametrize("task", prompts.TASKS)


@EACH_TASK
def test_a_model_that_reads_the_context_is_right_everywhere(monkeypatch, task):
    for length in LENGTHS:
        result = read(monkeypatch, task, length)
        assert (result.exact_match, result.token_accuracy, result.exact_match_high) == (1, 1, 1)
        assert result.loss == pytest.approx(0, abs=1e-6)
        depths = (None,) * 4 if task in ("variables", "copy") else (1,) * 4
        assert result.exact_match_by_depth == depths


@pytest.mark.parametrize("task", ["recall", "needle"])
def test_a_model_that_is_blind_at_a_depth_is_wrong_at_that_depth_alone(monkeypatch, task):
    for quarter, length in zip(range(4), (LENGTHS[0], LENGTHS[1]) * 2):
        result = read(monkeypatch, task, length, blind=quarter)
        assert result.exact_match == 3 / 4
        assert result.exact_match_by_depth == tuple(float(other != quarter) for other in range(4))


@EACH_TASK
def test_a_model_that_guesses_among_the_answers_in_the_context_has_the_loss_of_chance(monkeypatch, task):
    for length in LENGTHS:
        result = read(monkeypatch, task, length, guesses=True)
        assert result.loss == pytest.approx(result.chance_loss, rel=1e-4)
        assert result.chance < 1
        assert result.chance > 0 or task == "copy"  # of hundreds of tokens
