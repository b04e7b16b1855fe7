"""Tests of eval.py from the command line, on runs made by train.py."""

import csv
import json
import shutil

import numpy as np
import pytest

from sympow_jax import data, evaluation, training
from sympow_jax.commands import evaluate as eval_program
from sympow_jax.commands import launch
from sympow_jax.process import progress
from tests import mistakes


@pytest.fixture(scope="module")
def runs(trained, tmp_path_factory):
    """Copies the run `a`, and to `b` with another training context; `c` has no checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    for name in "ab":
        shutil.copytree(trained, folder / name)
    values = json.loads((trained / "config.json").read_text())
    values["data"] |= {"context_length": 8}
    for name in "bc":
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(values))
    return folder


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_remote_data_of_a_stranger_is_not_opened(runs, tmp_path, capsys):
    values = json.loads((runs / "a" / "config.json").read_text())
    values["data"] |= {"source": "jsonl", "paths": ["http://127.0.0.1:9/x\x1b[2J.jsonl"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(SystemExit):
        eval_program.main([f"--workdir={tmp_path}"])
    assert (
        "on another host; if you trust it, name it again with --config.data.paths" in capsys.readouterr().err
    )
    train = [f"--config={tmp_path}/config.json", f"--workdir={tmp_path}/new"]
    with pytest.raises(SystemExit):
        launch.main(train)
    assert r"\x1b[2J.jsonl', on another host" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_training_ends_with_the_evaluation_of_its_config(runs, tmp_path):
    records = read(runs / "a" / "context_loss.csv")
    assert [record["context_length"] for record in records] == ["8", "16", "32"]
    assert eval_program.main([f"--workdir={runs}/a", f"--out={tmp_path}"]) == 0
    assert read(tmp_path / "context_loss.csv") == records


def test_results_are_in_the_first_workdir_by_default(runs, capsys):
    record = (runs / "b" / "context_loss.csv").read_text()
    assert eval_program.main([f"--workdir={runs}/b,{runs}/a", "--context_lengths=4,...,20"]) == 0
    out, err = capsys.readouterr()
    assert "positions up to" in out
    assert out.endswith(f"the results are in {runs}/b/evaluation\n")
    assert "20 is rounded down to 16" in err
    records = read(runs / "b" / "evaluation" / "context_loss.csv")
    assert [(record["run"], record["context_length"], record["train_context"]) for record in records] == [
        (name, length, context) for name, context in (("b", "8"), ("a", "16")) for length in ("4", "8", "16")
    ]
    documents = int(records[0]["documents"])
    assert [int(record["tokens"]) for record in records[:3]] == [documents * n for n in (3, 4, 8)]
    assert all(0 < float(record["loss"]) < 7 for record in records)
    assert (runs / "b" / "context_loss.csv").read_text() == record


def test_tasks_of_two_runs_are_written_next_to_the_losses(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    arguments = [f"--workdir={runs}/a,{runs}/b", f"--out={tmp_path}", "--trials=2"]
    assert eval_program.main([*arguments, "--tasks=copy,recall", "--context_lengths=128"]) == 0
    out, err = capsys.readouterr()
    assert "answers that are right" in out
    assert err.splitlines() == ["part 1/2  a", "part 2/2  a", "part 1/2  b", "part 2/2  b"]
    records = read(tmp_path / "tasks.csv")
    found = [(record["run"], record["task"], record["questions"]) for record in records]
    assert found == [(run, *row) for run in "ab" for row in (("copy", "2"), ("recall", "8"))]
    assert {record["context_length"] for record in records} == {"128"}
    quarters = [[record[f"exact_match_{25 * i}_{25 * i + 25}"] for i in range(4)] for record in records[:2]]
    assert quarters[0] == [""] * 4
    assert np.mean(list(map(float, quarters[1]))) == float(records[1]["exact_match"])
    content = json.loads((tmp_path / "tasks.json").read_text())
    assert [str(row["loss"]) for row in content["rows"]] == [record["loss"] for record in records]
    assert content["tasks"].keys() == {"copy", "recall"}
    assert (tmp_path / "tasks.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "context_loss.csv").exists()
    # Only the contexts of `recall` do not depend on the held-out text.
    settings, model, _ = training.restore_model(runs / "a")
    material = evaluation.Material(np.zeros(1, np.int32), data.codec_of_run(settings))
    (recall,) = evaluation.context_task_results(model, material, ["recall"], [128], trials=2)
    assert (float(records[1]["loss"]), int(records[1]["answer_tokens"])) == (
        recall.loss,
        recall.answer_tokens,
    )
    # The chance loss of a copy is the logarithm of its alphabet's size: letters, three signs and six digits.
    assert np.exp(float(records[0]["chance_loss"])) == pytest.approx(35)


MISTAKES = """
--context_lengths=8 --workdir={runs}/nothing               | is not the workdir of a run
--context_lengths=8 --workdir={runs}/c                     | has no checkpoint
--context_lengths=8 --workdir={runs}/a,{runs}/c            | c has no checkpoint
--context_lengths=8 --workdir={runs}/a,{runs}/b/../a       | given more than once
--context_lengths=8 --workdir={runs}/a,                    | a workdir has an empty name; separate
--context_lengths=8,x --workdir={runs}/a                   | 'x' is not a positive integer
--context_lengths=8,999 --workdir={runs}/a                 | context length 999 is longer than any held-out
--context_lengths=8 --workdir={runs}/a --out={runs}/c/config.json | cannot write the results
--context_lengths=8 --workdir={runs}/a --documents=many    | see sympow eval --help
--context_lengths=8                                        | --workdir
--workdir={runs}/a --trials=3                              | --trials is for --tasks
--workdir={runs}/a --tasks=copy --documents=3              | --documents is for losses by position
--workdir={runs}/a --tasks=copie                           | there is no task 'copie'; did you mean copy?
--workdir={runs}/a --tasks=copy --trials=1000000000        | tokens; they must be at most 268,435,456
--workdir={runs}/a --tasks=copy --context_lengths=1000000000000 | lower one of the two
--workdir={runs}/a --tasks=copy --tokenizer=x.json         | --tokenizer is for tasks with text
--workdir={runs}/a --tasks=recall                          | 32 is too short for the task 'recall': it must be at least
--workdir={runs}/a --context_length=8                      | '--context_length'; did you mean --context_lengths?
--workdir={runs}/a --config.model.layers=2                 | --config.model.layers cannot be changed here
--workdir={runs}/a --config.data.path=x                    | did you mean --config.data.paths?
--workdir={runs}/a --config.data.heldout_fraction=0.9      | it was trained on what is held out
--workdir={runs}/a --config.data.heldout_paths={runs}/none | there is no file or folder
"""


def test_a_mistake_is_one_line_and_exit_code_1(runs, tmp_path, capsys):
    before = sorted(runs.iterdir())
    for line in MISTAKES.format(runs=runs).strip().splitlines():
        arguments, message = line.split(" | ")
        # Some are found once the data is open, of which a line tells.
        error = mistakes.line(
            eval_program.main, [f"--out={tmp_path}", *arguments.split()], capsys, at_once=False
        )
        assert message in error
    assert sorted(runs.iterdir()) == before
    assert not (runs / "c" / "evaluation").exists()
