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

from sympow_jax import config, evaluation, models, tasks, training
from sympow_jax.commands import evaluate as eval_program
from sympow_jax.commands import launch
from sympow_jax.process import workdir
from tests import mistakes

MODEL = {"layers": 1, "width": 16, "heads": 2, "dtype": "float32"}


def make(**task):
    """Returns a task and a model for it."""
    attention = config.preset("softmax", causal=False)
    model = config.ModelConfig(vocab_size=32, norm="batch", attention=attention, **MODEL)
    settings = config.Config(model=model, task=config.TaskConfig(**task))
    return tasks.make(settings), models.make(model, settings.task, rngs=nnx.Rngs(0))


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
    task, model = make(name="classification", classes=2)
    labels = np.array([0, 1, 1, 0, 1, 1], np.int32)
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
    task, model = make(name="regression")
    labels = np.array([0.5, -1.0, 2.0, 0.0, 3.0], np.float32)
    values = outputs(model, labels)[:, 0]
    results = evaluation.heldout_metrics(model, task, batches(labels))
    assert results["loss"] == pytest.approx(np.mean((values - labels) ** 2), rel=1e-5)
    assert results["pearson"] == pytest.approx(np.corrcoef(values, labels)[0, 1], rel=1e-5)
    assert (list(results), results["count"]) == (["loss", "pearson", "spearman", "count"], 5)
    model.head.linear.bias[...] = jnp.nan
    diverged = evaluation.heldout_metrics(model, task, batches(labels))
    assert all(math.isnan(diverged[name]) for name in ("loss", "pearson", "spearman"))


def read(folder: pathlib.Path) -> dict:
    return json.loads((folder / "heldout.json").read_text())


@pytest.fixture(scope="module")
def masked(tmp_path_factory) -> pathlib.Path:
    """Trains a short run that predicts masked tokens of texts; next to it is `tokens`, an unstarted decoder."""
    folder = tmp_path_factory.mktemp("encoders")
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"{index}: the quick brown fox jumps over the lazy dog. " * 2)
    settings = {f"model.{name}": value for name, value in MODEL.items()}
    settings |= {"model.attention.causal": "false", "task.name": "masked_token", "training.steps": 2}
    settings |= {"data.paths": f"{folder}/*.txt", "data.context_length": 16, "data.batch_tokens": 64}
    settings |= {"data.heldout_fraction": 0.4, "evaluation.context_lengths": "()"}
    arguments = [f"--config.{name}={value}" for name, value in settings.items()]
    run = ["--config=configs/quickstart.py:softmax", f"--workdir={folder / 'masked'}", *arguments]
    assert launch.main(run) == 0
    workdir.open_workdir(folder / "tokens", config.load("configs/quickstart.py"))
    return folder / "masked"


def test_masked_tokens_of_held_out_rows_are_the_same_every_time(masked, tmp_path):
    (run,) = read(masked)["runs"]
    assert (run["run"], run["step"], run["config"]["task"]["name"]) == ("masked", 2, "masked_token")
    assert run["metrics"]["perplexity"] == pytest.approx(math.exp(run["metrics"]["loss"]))
    assert eval_program.main([f"--workdir={masked}", f"--out={tmp_path}"]) == 0
    assert read(tmp_path)["runs"][0]["metrics"] == run["metrics"]


def test_nothing_held_out_is_an_error(masked, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(masked, folder)
    written = (folder / "config.json").read_text()
    (folder / "config.json").write_text(written.replace('"heldout_fraction": 0.4', '"heldout_fraction": 0.0'))
    with pytest.raises(ValueError, match=r"no example is held out .*heldout_fraction is 0\.0, .*; name"):
        evaluation.evaluate_heldout([folder], out=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["masked,{}/tokens"],
            "the runs are of different tasks: .*masked .masked_token., .*tokens .next_token.",
        ),
        (
            ["masked", "--context_lengths=8"],
            "--context_lengths and --documents are for runs that predict the next",
        ),
        (["masked", "--documents=3"], "--context_lengths and --documents are for runs"),
    ],
)
def test_mistakes_are_one_line(masked, tmp_path, arguments, message, capsys):
    names, *others = arguments
    folders = f"{masked.parent}/{names.format(masked.parent)}"
    line = mistakes.line(eval_program.main, [f"--workdir={folders}", f"--out={tmp_path}", *others], capsys)
    assert re.search(message, line)


CLASSES = ("entailment", "neutral", "contradiction")


@pytest.fixture(scope="module")
def mnli(tmp_path_factory) -> pathlib.Path:
    """Makes files of MNLI, a run `whole` of `configs/glue.py` on them, and its like `halves`, which is resumed."""
    folder = tmp_path_factory.mktemp("mnli")
    labels = {"train": [0, 1, 2] * 8, "matched": [0, 0, 0, 0, 1, 1, 2], "mismatched": [0, 1, 2, 2, 2]}
    for name, numbers in labels.items():
        lines = [f"{name} {i}\tis {i % 4}\t{CLASSES[label]}" for i, label in enumerate(numbers)]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence1\tsentence2\tgold_label", *lines]) + "\n")
    settings = {f"model.{name}": value for name, value in MODEL.items()}
    settings |= {"model.vocab_size": 256, "data.tokenizer": "byte", "evaluation.every": 2}
    settings |= {"data.context_length": 32, "data.batch_tokens": 256, "data.paths": f"{folder}/train.tsv"}
    settings |= {"data.heldout_paths": f"{folder}/matched.tsv,{folder}/mismatched.tsv"}
    # A schedule that falls would depend on the number of steps.
    settings |= {
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "optimizer.learning_rate": 0.01,
    }
    arguments = ["--config=configs/glue.py:mnli,softmax", *(f"--config.{k}={v}" for k, v in settings.items())]
    for name, steps in (("whole", 4), ("halves", 2), ("halves", 4)):
        run = [f"--config.training.steps={steps}", f"--workdir={folder / name}"]
        assert launch.main([*arguments, *run]) == 0
    return folder


def lines_of(folder: pathlib.Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_mnli_is_measured_on_both_files(mnli, tmp_path, capsys):
    _, model, _ = training.restore_model(mnli / "whole")
    expected = {}
    for name in ("matched", "mismatched"):
        examples = [line.split("\t") for line in (mnli / f"{name}.tsv").read_text().splitlines()[1:]]
        right = [
            CLASSES[int(model.classify(jnp.asarray([[*f"{one}\0{two}".encode()]]))[0].argmax())] == label
            for one, two, label in examples
        ]
        expected[name] = (np.mean(right), len(right))
    assert expected["matched"][0] != expected["mismatched"][0]
    (run,) = read(mnli / "whole")["runs"]
    for name, (accuracy, count) in expected.items():
        assert run["metrics"][f"{name}_accuracy"] == accuracy
        assert run["metrics"][f"{name}_count"] == count
    names = ("loss", "accuracy", "matthews", "count")
    assert list(run["metrics"]) == [f"{part}_{name}" for part in expected for name in names]
    assert eval_program.main([f"--workdir={mnli}/whole,{mnli}/halves", f"--out={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    for name, (accuracy, _) in expected.items():
        assert f" {name} accuracy " in printed
        assert f" {accuracy:.4f} " in printed
    assert [found["metrics"] for found in read(tmp_path)["runs"]] == [run["metrics"]] * 2


def test_mnli_is_measured_on_both_files_during_training(mnli):
    lines = lines_of(mnli / "whole")
    assert [line["step"] for line in lines if "heldout_matched_accuracy" in line] == [2, 4]
    # A batch of 8 rows has all lines of a file.
    (run,) = read(mnli / "whole")["runs"]
    for name in ("matched", "mismatched"):
        assert lines[-1][f"heldout_{name}_accuracy"] == pytest.approx(run["metrics"][f"{name}_accuracy"])
        assert lines[-1][f"heldout_{name}_loss"] == pytest.approx(run["metrics"][f"{name}_loss"], rel=1e-5)
    exact = (
        "loss",
        "accuracy",
        *(f"heldout_{part}_{name}" for part in ("matched", "mismatched") for name in ("loss", "accuracy")),
    )
    resumed = lines_of(mnli / "halves")
    assert [[line.get(name) for name in exact] for line in resumed] == [
        [line.get(name) for name in exact] for line in lines
    ]
