"""Tests of Weights & Biases, with a stand-in module."""

import importlib.machinery
import json
import os
import sys
import types

import pytest

from sympow_jax import loop
from sympow_jax.training import metrics, writers
from tests.training import small


class _Run:
    def __init__(self, run_id):
        self.id = run_id
        self.logged = []
        self.axis = self.exit_code = None

    def define_metric(self, name, step_metric):
        assert name == "*"
        self.axis = step_metric

    def log(self, values):
        assert self.exit_code is None
        self.logged.append(values)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """Installs a module with the used part of wandb's interface; `runs` and `calls` record runs and their arguments."""
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="wandb/__init__.py")
    module.Error = type("Error", (Exception,), {})
    module.runs, module.calls = [], []

    def init(**arguments):
        module.calls.append(arguments)
        module.runs.append(_Run(arguments["id"] or f"run{len(module.runs)}"))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_metrics_that_are_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is a pipe or a device"):
        writers.JsonLines(tmp_path / "metrics.jsonl", start=0)


def test_one_run_for_all_starts(tmp_path, settings, wandb):
    folder = tmp_path / "run"
    for steps in (4, 8):
        reported = {"steps": steps, "log_every": 2, "wandb_project": "papers"}
        assert loop.train(small.changed(settings, training=reported, evaluation={"every": 2}), folder) == 0
    first, second = wandb.runs
    assert first.id == second.id == json.loads((folder / "wandb.json").read_text())["id"]
    assert [values["step"] for values in first.logged] == [2, 4]
    assert [values["step"] for values in second.logged] == [6, 8]
    assert first.logged + second.logged == [line for line in small.lines(folder) if line["step"] % 2 == 0]
    assert first.axis == second.axis == "step"
    assert first.exit_code == second.exit_code == 0
    arguments = wandb.calls[1]
    wanted = {"project": "papers", "name": "run", "id": first.id, "resume": "allow", "dir": str(folder)}
    assert arguments.items() >= wanted.items()
    assert arguments["config"]["training"]["steps"] == 8


def test_an_error_ends_the_run_as_failed(tmp_path, with_training, wandb):
    settings = with_training(wandb_project="papers")
    with pytest.raises(RuntimeError), metrics.Reporter(tmp_path, settings, start=0, devices=[]):
        raise RuntimeError
    assert [run.exit_code for run in wandb.runs] == [1]
    with metrics.Reporter(tmp_path, settings, start=0, devices=[], writes=False):
        assert len(wandb.runs) == 1  # a process that does not write begins none


def test_a_refusal_says_what_to_do(tmp_path, wandb, with_training):
    def refuse(**_):
        raise wandb.Error("no API key")

    wandb.init = refuse
    with pytest.raises(ValueError, match=r"refuses training.wandb_project='papers': no API key; use `wandb"):
        writers.Wandb("papers", tmp_path, {})
    assert not (tmp_path / "wandb.json").exists()
    with pytest.raises(ValueError, match="wandb_project is empty; name a project, or none"):
        with_training(wandb_project="")


def test_not_installed_is_said_before_anything_is_written(tmp_path, with_training, monkeypatch):
    # A folder of that name, which wandb leaves after a run, is not a package.
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match=r"not installed: pip install 'sympow-jax\[wandb\]'"):
        loop.train(with_training(wandb_project="papers"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
