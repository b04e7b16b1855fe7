"""Tests of the evaluation of encoders: metrics against their formulas, outputs and rejected arguments."""

import json
import math
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, evaluation, models
from sympow_jax.commands import evaluate as eval_program
from sympow_jax.commands import launch
from sympow_jax.training import workdir

MODEL = {"layers": 1, "width": 16, "heads": 2, "dtype": "float32"}


def make(task: config.TaskConfig):
    attention = config.preset("softmax", causal=False)
    model = config.ModelConfig(vocab_size=32, norm="batch", attention=attention, **MODEL)
    return models.make(model, task, rngs=nnx.Rngs(0))


def batches(labels, rows=4, time=6):
    """Returns batches of random rows, the last padded with rows that do not count."""
    generator = np.random.default_rng(0)
    missing = np.nan if labels.dtype == np.float32 else -1
    padded = np.append(labels, np.full(-len(labels) % rows, missing, labels.dtype))
    for start in range(0, len(padded), rows):
        tokens = generator.integers(0, 32, (rows, time)).astype(np.int32)
        yield {
            "inputs": tokens,
            "segment_ids": np.zeros_like(tokens),
            "labels": padded[start : start + rows],
        }


def outputs(model, labels):
    classify = jax.jit(lambda tokens: model.classify(tokens))
    results = np.concatenate([classify(jnp.asarray(batch["inputs"])) for batch in batches(labels)])
    return results[: len(labels)].astype(np.float64)


def test_classification_is_measured_over_the_labels_that_count():
    task = config.TaskConfig(name="classification", classes=2)
    model, labels = make(task), np.array([0, 1, 1, 0, 1, 1], np.int32)
    model.head.linear.kernel[...] *= 100
    logits = outputs(model, labels)
    results = evaluation.heldout_metrics(model, task, batches(labels))
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(6), labels]
    assert results["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert results["accuracy"] == np.mean(logits.argmax(-1) == labels)
    assert list(results) == ["loss", "accuracy", "matthews", "f1", "count"]
    assert results["count"] == 6
    correlation = np.corrcoef(labels, logits.argmax(-1))[0, 1]
    assert results["matthews"] == pytest.approx(correlation, abs=1e-12)


def test_regression_is_measured_over_the_labels_that_count():
    task = config.TaskConfig(name="regression")
    model, labels = make(task), np.array([0.5, -1.0, 2.0, 0.0, 3.0], np.float32)
    values = outputs(model, labels)[:, 0]
    results = evaluation.heldout_metrics(model, task, batches(labels))
    assert results["loss"] == pytest.approx(np.mean((values - labels) ** 2), rel=1e-5)
    assert results["pearson"] == pytest.approx(np.corrcoef(values, labels)[0, 1], rel=1e-5)
    assert (list(results), results["count"]) == (["loss", "pearson", "spearman", "count"], 5)
    model.head.linear.bias[...] = jnp.nan
    diverged = evaluation.heldout_metrics(model, task, batches(labels))
    assert all(math.isnan(diverged[name]) for name in ("loss", "pearson", "spearman"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> pathlib.Path:
    """Makes short runs: `classes` on lines, its copy `more`, `masked` on texts, and an unstarted decoder, `tokens`."""
    folder = tmp_path_factory.mktemp("encoders")
    lines = [f"{'good' if i % 2 else 'bad'} thing {i}\t{i % 2}" for i in range(50)]
    (folder / "lines.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n")
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"{index}: the quick brown fox jumps over the lazy dog. " * 2)
    small = [f"--config.model.{name}={value}" for name, value in MODEL.items()]
    small += ["--config.data.context_length=16", "--config.data.batch_tokens=64", "--config.training.steps=2"]
    small += ["--config.data.heldout_fraction=0.4"]
    base = "--config=configs/quickstart.py:softmax"
    encoder = [base, "--config.model.attention.causal=false", "--config.evaluation.context_lengths=()"]
    classes = [
        *encoder,
        "--config.task.name=classification",
        "--config.task.classes=2",
        "--config.data.source=tsv",
        f"--config.data.paths={folder}/lines.tsv",
        "--config.data.text_columns=text",
    ]
    masked = [*encoder, "--config.task.name=masked_token", f"--config.data.paths={folder}/*.txt"]
    for name, arguments in {"classes": classes, "masked": masked}.items():
        assert launch.main([*arguments, *small, f"--workdir={folder / name}"]) == 0
    shutil.copytree(folder / "classes", folder / "more")
    workdir.open_workdir(folder / "tokens", config.load("configs/quickstart.py"))
    return folder


def read(folder: pathlib.Path) -> dict:
    return json.loads((folder / "heldout.json").read_text())


def test_runs_end_with_their_held_out_rows(runs):
    results = read(runs / "classes")
    assert results["task"] == "classification"
    (run,) = results["runs"]
    assert (run["run"], run["step"]) == ("classes", 2)
    assert run["config"]["task"]["classes"] == 2
    assert set(run["metrics"]) == {"loss", "accuracy", "matthews", "f1", "count"}
    assert 5 < run["metrics"]["count"] < 35  # of 50 lines, 0.4 by hash
    (masked,) = read(runs / "masked")["runs"]
    assert masked["metrics"]["perplexity"] == pytest.approx(math.exp(masked["metrics"]["loss"]))


def test_masks_of_held_out_rows_are_the_same_every_time(runs, tmp_path):
    assert eval_program.main([f"--workdir={runs}/masked", f"--out={tmp_path}"]) == 0
    assert read(tmp_path)["runs"][0]["metrics"] == read(runs / "masked")["runs"][0]["metrics"]


def test_two_runs_in_one_table(runs, tmp_path, capsys):
    assert eval_program.main([f"--workdir={runs}/classes,{runs}/more", f"--out={tmp_path}"]) == 0
    both = {run["run"]: run["metrics"] for run in read(tmp_path)["runs"]}
    assert both["classes"] == both["more"] == read(runs / "classes")["runs"][0]["metrics"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("classes", "more", "accuracy", "matthews", "f1"))


def test_nothing_held_out_is_an_error(runs, tmp_path):
    folder = tmp_path / "classes"
    shutil.copytree(runs / "classes", folder)
    written = (folder / "config.json").read_text()
    (folder / "config.json").write_text(written.replace('"heldout_fraction": 0.4', '"heldout_fraction": 0.0'))
    with pytest.raises(ValueError, match=r"no example is held out .*heldout_fraction is 0\.0; name"):
        evaluation.evaluate_heldout([folder], out=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["classes,masked"],
            "the runs are of different tasks: .*classes .classification., .*masked .masked_token.",
        ),
        (["tokens,classes"], "the runs are of different tasks"),
        (
            ["classes", "--context_lengths=8"],
            "--context_lengths and --documents are for runs that predict the next",
        ),
        (["masked", "--documents=3"], "--context_lengths and --documents are for runs"),
    ],
)
def test_mistakes_are_one_line(runs, tmp_path, arguments, message, capsys):
    names, *others = arguments
    folders = ",".join(str(runs / name) for name in names.split(","))
    with pytest.raises(SystemExit, match="1"):
        eval_program.main([f"--workdir={folders}", f"--out={tmp_path}", *others])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line)
