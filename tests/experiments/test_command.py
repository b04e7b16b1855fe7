"""Tests of mistakes on the command line, and of interrupted experiments."""

import importlib
import os
import signal

import pytest

from experiments import context_scaling
from sympow_jax.training import metrics
from tests import mistakes

pytestmark = pytest.mark.robust

FLAGS = "--scale=tiny", "--variants=softmax"


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("context_scaling", ["--scale=large"], "argument --scale: invalid choice: 'large'"),
        ("context_scaling", ["--scale=paper"], "say where with --data=PATH and --heldout=PATH"),
        ("context_scaling", ["--seeds=0,x"], "argument --seeds: '0,x' must be whole numbers below 2^32"),
        ("context_scaling", ["--steps=0"], "argument --steps: '0' must be one number of at least 1"),
        ("rotation_rates", ["--context=0"], "argument --context: '0' must be one number of at least 1"),
        ("gating", ["--variants=gated"], "argument --variants: it has only gated, which all else is"),
        ("context_scaling", ["--step=3"], "unknown option '--step'; did you mean --steps?"),
        ("gating", ["--variants=gate"], "argument --variants: there is no 'gate'; there are sympow, gated"),
        ("nt_tasks", ["--base=1"], "base is 1; it must be at least 2"),
        ("nt_tasks", ["--heads=3"], "heads is 3; it must divide the width, which is the base, 16"),
        ("nt_tasks", ["--context=2"], "context is 2; with delay 2"),
        ("nt_tasks", ["--momentum=1"], "momentum is 1.0; it must be at least 0 and below 1"),
        ("powers", ["--variants=p=2"], "argument --variants: it leaves out softmax"),
        ("overhead", ["--data=x"], "unknown option '--data'; see"),
        ("evaluation_context", [*FLAGS, "--data=/nowhere/*.txt"], "/nowhere/*.txt"),
        ("lrpe", ["--scale=paper", "--data=/nowhere.bin", "--heldout=/nowhere.bin"], "/nowhere.bin"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(tmp_path, capsys, name, flags, message):
    main = importlib.import_module(f"experiments.{name}").main
    assert message in mistakes.line(main, [f"--out={tmp_path}", *flags], capsys, at_once=False)


def test_documents_that_are_too_short_are_found_before_training(corpus, tmp_path, capsys):
    flags = ["--scale=toy", "--variants=softmax", f"--data={corpus}", f"--out={tmp_path}"]
    with pytest.raises(SystemExit):
        importlib.import_module("experiments.evaluation_context").main(flags)
    assert "context length 8192 is longer than any held-out document" in capsys.readouterr().err
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_folder_that_cannot_be_written(corpus, tmp_path, capsys):
    (tmp_path / "context_scaling").write_text("a file")
    with pytest.raises(SystemExit):
        context_scaling.main([*FLAGS, f"--data={corpus}", f"--out={tmp_path}"])
    printed, error = capsys.readouterr()
    assert "cannot write the results to" in error
    assert printed == ""  # nothing was trained


def test_a_stopped_experiment_goes_on_and_other_data_are_noticed(corpus, tmp_path, capsys, monkeypatch):
    arguments = [*FLAGS, "--steps=3", f"--data={corpus}", f"--out={tmp_path}"]
    report = metrics.Reporter.report

    def interrupt(self, step, values, held_out):
        report(self, step, values, held_out)
        if step == 1 and self._config.data.batch_tokens == 32:  # in the second of two runs
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.Reporter, "report", interrupt)
        with pytest.raises(SystemExit) as stopped:
            context_scaling.main(arguments)
    assert stopped.value.code == 128 + signal.SIGINT
    assert not list((tmp_path / "context_scaling").iterdir())
    capsys.readouterr()

    assert context_scaling.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "softmax_context8_steps3_seed0, done before" in printed
    assert "training: step 2 of 3" in printed
    assert len((tmp_path / "context_scaling" / "context_scaling.csv").read_text().splitlines()) == 3

    record = tmp_path / "runs/tiny/softmax_context16_steps3_seed0/data.json"
    record.write_text(record.read_text().replace('"digest": "', '"digest": "0'))
    with pytest.raises(SystemExit):
        context_scaling.main(arguments)
    assert "were trained on different data; use another --out" in capsys.readouterr().err
