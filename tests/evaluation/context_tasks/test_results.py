"""Tests of the results of context tasks: numbers by hand, and runs that cannot be evaluated."""

import dataclasses
import io
import math
import statistics

import numpy as np
import pytest
import rich.console

from sympow_jax.evaluation import scores as scores_lib
from sympow_jax.evaluation.context_tasks import prompts, results


def make_exam(log_candidates, depths=()):
    case = scores_lib.Case([1], [scores_lib.Question([], [1, 2]), scores_lib.Question([], [3])])
    return prompts.Exam(case, log_candidates, depths)


def make_score(losses, correct):
    return scores_lib.Score(np.array(losses, np.float32), np.array(correct))


def test_a_result_is_over_all_answers_and_tokens():
    exams = [make_exam(math.log(2)), make_exam(math.log(8))]
    scores = [
        [make_score([1, 2, 3], [True, False, True])],
        [make_score([0, 2], [True, True]), make_score([7], [False])],
    ]
    summary = results.summarize("recall", 64, exams, scores)
    # Wilson (1927), equation 5: n = 3 questions, of which one is right.
    n, p, z = 3, 1 / 3, statistics.NormalDist().inv_cdf(0.975)
    middle = (p + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    assert dataclasses.asdict(summary) == pytest.approx(
        {
            "task": "recall",
            "context_length": 64,
            "exact_match": 1 / 3,
            "exact_match_low": middle - half,
            "exact_match_high": middle + half,
            "token_accuracy": 4 / 6,
            "loss": 15 / 6,
            "questions": 3,
            "contexts": 2,
            "answer_tokens": 6,
            "chance": (1 / 2 + 2 / 8) / 3,
            "chance_loss": (math.log(2) + 2 * math.log(8)) / 6,
            "exact_match_0_25": None,
            "exact_match_25_50": None,
            "exact_match_50_75": None,
            "exact_match_75_100": None,
        }
    )


def test_answers_are_counted_in_the_quarter_of_their_depth():
    exams = [make_exam(0.0, (0.0, 0.75)), make_exam(0.0, (0.24, 0.25)), make_exam(0.0, (0.5, 0.99))]
    right, wrong = make_score([0], [True]), make_score([0], [False])
    summary = results.summarize("needle", 64, exams, [[wrong, right], [right, right], [wrong, wrong]])
    assert summary.exact_match_by_depth == (1 / 2, 1, 0, 1 / 2)
    assert summary.exact_match_50_75 == 0


def make_row(run, task, length, by_depth):
    run_of = {"preset": "conformal", "train_context": 256}
    run_of |= {"updates": 8, "update_tokens": 64, "data": "0a1b2c3d"}
    found = {"exact_match": 0.5, "exact_match_low": 0.4, "exact_match_high": 0.6, "token_accuracy": 0.75}
    found |= {"questions": 16, "contexts": 4, "answer_tokens": 80}
    found |= {"loss": 1.0, "chance": 0.25, "chance_loss": 0.3}
    found |= {f"exact_match_{25 * i}_{25 * i + 25}": value for i, value in enumerate(by_depth)}
    return results.Row(run=run, task=task, context_length=length, **run_of, **found)


def test_plot_has_a_map_of_depths_for_each_run_of_a_task_with_depths(monkeypatch, tmp_path):
    rows = [
        make_row(run, task, length, (0, 0.25, value, 1) if task == "needle" else (None,) * 4)
        for run, value in (("a", 0.5), ("b", 0.75))
        for task in ("copy", "needle")
        for length in (256, 512)
    ]
    figures = []
    monkeypatch.setattr(results.plotting, "save", lambda figure, path: figures.append(figure))
    results.write_plot(tmp_path / "x.png", rows)
    # The last of the axes is the bar of colors.
    *panels, _ = figures[0].axes
    titles = [axes.get_title(loc="left").split(":")[0] for axes in panels]
    assert titles == ["copy", "needle", "needle, a", "needle, b"]
    for axes, value in zip(panels[2:], (0.5, 0.75)):
        (image,) = axes.images
        np.testing.assert_array_equal(image.get_array(), [[0, 0], [0.25, 0.25], [value, value], [1, 1]])
        assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "512"]
        assert axes.get_ylim() == (3.5, -0.5)  # the beginning of the context is at the top
    # Tasks without depths have no map.
    results.write_plot(tmp_path / "x.png", [make_row("a", "copy", 256, (None,) * 4)])
    (panel,) = figures[1].axes
    assert not panel.images


def test_table_of_runs_has_a_line_for_each_task_and_length():
    rows = [
        dataclasses.replace(make_row(run, task, length, (None,) * 4), exact_match=value)
        for run, value in (("a", 0.5), ("b", 0.25))
        for task, length in (("needle", 256), ("copy", 256), ("copy", 512))
    ]
    console = rich.console.Console(file=io.StringIO(), width=200)
    results.print_table(rows, console)
    lines = [line.strip("|").split("|") for line in console.file.getvalue().splitlines() if "|" in line]
    both = ["0.500 (0.400 to 0.600)", "0.250 (0.400 to 0.600)", "0.250", "16"]
    assert [[cell.strip() for cell in line] for line in lines] == [
        ["task", "context length", "a", "b", "chance", "questions"],
        ["needle", "256", *both],
        ["copy", "256", *both],
        ["copy", "512", *both],
    ]
