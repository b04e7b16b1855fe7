"""Tests of the results of context tasks: numbers by hand, and runs that cannot be evaluated."""

import dataclasses
import math

import numpy as np
import pytest

from sympow_jax import config, evaluation
from sympow_jax.evaluation.context_tasks import answers, prompts, results
from sympow_jax.training import workdir


def make_exam(log_candidates):
    return prompts.Exam(
        answers.Case([1], [answers.Question([], [1, 2]), answers.Question([], [3])]), log_candidates
    )


def make_score(losses, correct):
    return answers.Score(np.array(losses, np.float32), np.array(correct))


def test_a_result_is_over_all_answers_and_tokens():
    exams = [make_exam(math.log(2)), make_exam(math.log(8))]
    scores = [
        [make_score([1, 2], [True, False]), make_score([3], [True])],
        [make_score([0, 2], [True, True]), make_score([7], [False])],
    ]
    found = results.summarize("recall", 64, exams, scores)
    assert dataclasses.asdict(found) == pytest.approx(
        {
            "task": "recall",
            "context_length": 64,
            "exact_match": 2 / 4,
            "standard_error": math.sqrt(0.5 * 0.5 / 4),
            "token_accuracy": 4 / 6,
            "loss": 15 / 6,
            "questions": 4,
            "contexts": 2,
            "answer_tokens": 6,
            "chance": (1 / 2 + 1 / 8) / 2,
            "chance_loss": 2 * math.log(16) / 6,
        }
    )


def test_a_run_of_another_task_is_an_error(tmp_path):
    attention = config.preset("softmax", causal=False)
    settings = config.Config(
        model=config.ModelConfig(vocab_size=8, layers=1, width=8, heads=2, attention=attention),
        task=config.TaskConfig(name="masked_token"),
        data=config.DataConfig(context_length=8, batch_tokens=8),
    )
    workdir.open_workdir(tmp_path / "a", settings)
    with pytest.raises(
        ValueError, match="a holds a run of task 'masked_token'; --tasks is for models of the next"
    ):
        evaluation.evaluate_context_tasks([tmp_path / "a"], ["copy"], out=tmp_path)
