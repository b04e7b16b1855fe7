"""Tests of the evaluation of encoders: metrics against their formulas, outputs and rejected arguments."""

import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, data, evaluation, models, tasks, training
from sympow_jax.commands import evaluate as eval_program
from sympow_jax.evaluation import over_runs
from sympow_jax.process import workdir
from sympow_jax.training import sharding
from tests import mistakes

MODEL = {"layers": 1, "width": 16, "heads": 2, "dtype": "float32"}


def make(**task):
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
        yield {"inputs": tokens, "segment_ids": np.zeros_like(tokens), "labels": padded[start : start + rows]}


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


@pytest.fixture
def masked(tmp_path, monkeypatch) -> pathlib.Path:
    """Makes a run that predicts masked tokens, as if of a new model at step 2, and next to it `tokens`, a decoder."""
    for index in range(20):
        (tmp_path / f"{index}.txt").write_text(f"{index}: the quick brown fox jumps over the lazy dog. " * 2)
    attention = config.preset("softmax", causal=False)
    settings = config.Config(
        model=config.ModelConfig(vocab_size=256, attention=attention, **MODEL),
        task=config.TaskConfig(name="masked_token"),
        data=config.DataConfig(
            paths=(f"{tmp_path}/*.txt",), context_length=16, batch_tokens=64, heldout_fraction=0.4
        ),
    )
    workdir.open_workdir(tmp_path / "masked", settings)
    workdir.open_workdir(tmp_path / "tokens", config.load("configs/quickstart.py"))
    model = models.make(settings.model, settings.task, rngs=nnx.Rngs(0))
    monkeypatch.setattr(over_runs.training, "restore_model", lambda path: (settings, model, 2))
    monkeypatch.setattr(over_runs.checkpoint, "require_checkpoint", lambda path: None)
    return tmp_path / "masked"


def test_masked_tokens_of_held_out_rows_are_the_same_every_time(masked):
    for name in "ab":
        assert eval_program.main([f"--workdir={masked}", f"--out={masked}/{name}"]) == 0
    (run,), (again,) = (read(masked / name)["runs"] for name in "ab")
    assert (run["run"], run["step"], run["config"]["task"]["name"]) == ("masked", 2, "masked_token")
    assert run["metrics"]["perplexity"] == pytest.approx(math.exp(run["metrics"]["loss"]))
    assert again["metrics"] == run["metrics"]


MISTAKES = """
{folder}/masked,{folder}/tokens           | masked and .*tokens cannot be compared: .*'masked_token' and 'next_token'
{folder}/tokens,{folder}/masked           | tokens and .*masked cannot be compared: .*'next_token' and 'masked_token'
{folder}/masked --context_lengths=8       | --context_lengths and --documents are for runs that predict the next
{folder}/masked --documents=3             | --context_lengths and --documents are for runs
{folder}/masked --tasks=copy              | a run of task 'masked_token'; --tasks is for models of the next
{folder}/masked --config.data.heldout_fraction=0 | no example is held out .*heldout_fraction is 0
"""


def test_mistakes_are_one_line(masked, capsys):
    for line in MISTAKES.format(folder=masked.parent).strip().splitlines():
        arguments, message = line.split(" | ")
        arguments = f"--out={masked} --workdir={arguments}".split()
        assert re.search(message.strip(), mistakes.line(eval_program.main, arguments, capsys, at_once=False))


CLASSES = ("entailment", "neutral", "contradiction")


def test_mnli_is_measured_on_both_files(tmp_path, monkeypatch, capsys):
    """At the end of a run, by the program, and in each evaluation during training."""
    labels = {"train": [0, 1, 2] * 8, "matched": [0, 0, 0, 0, 1, 1, 2], "mismatched": [0, 1, 2, 2, 2]}
    for name, numbers in labels.items():
        lines = [f"{name} {i}\tis {i % 4}\t{CLASSES[label]}" for i, label in enumerate(numbers)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence1\tsentence2\tgold_label", *lines]) + "\n")
    changes = {f"model.{name}": str(value) for name, value in MODEL.items()} | {"model.vocab_size": "256"}
    changes |= {"data.tokenizer": "byte", "evaluation.every": "2", "training.steps": "5"}
    changes |= {
        "data.context_length": "32",
        "data.batch_tokens": "256",
        "data.paths": f"{tmp_path}/train.tsv",
    }
    changes |= {"data.heldout_paths": f"{tmp_path}/matched.tsv,{tmp_path}/mismatched.tsv"}
    settings = config.override(config.load("configs/glue.py:mnli,softmax"), changes)
    workdir.open_workdir(tmp_path / "run", settings)
    program = training.Program(settings, sharding.whole_mesh())
    state = program.init_state()
    model = program.model(state)
    monkeypatch.setattr(over_runs.training, "restore_model", lambda path: (settings, model, 4))
    monkeypatch.setattr(over_runs.checkpoint, "require_checkpoint", lambda path: None)

    opened = data.HeldoutData(settings.data, settings.task, vocab_size=256)
    assert evaluation.finish(settings, tmp_path / "run", opened) == {
        "table": tmp_path / "run" / "heldout.json"
    }
    (run,) = read(tmp_path / "run")["runs"]
    classify = jax.jit(lambda texts: model.classify(texts).argmax(-1))
    printed = capsys.readouterr().out
    accuracies = []
    for name in ("matched", "mismatched"):
        examples = [line.split("\t") for line in (tmp_path / f"{name}.tsv").read_text().splitlines()[1:]]
        # All texts of a file have one length; 2 is the separator of the config.
        texts = jnp.asarray([[*f"{one}\2{two}".encode()] for one, two, _ in examples])
        right = [CLASSES[x] == label for x, (*_, label) in zip(classify(texts).tolist(), examples)]
        accuracies.append(np.mean(right))
        assert run["metrics"][f"{name}_accuracy"] == accuracies[-1]
        assert run["metrics"][f"{name}_count"] == len(right)
        assert f" {name} accuracy " in printed
        assert f" {accuracies[-1]:.4f} " in printed
    assert accuracies[0] != accuracies[1]
    names = ("loss", "accuracy", "matthews", "count")
    assert list(run["metrics"]) == [f"{part}_{name}" for part in ("matched", "mismatched") for name in names]
    assert eval_program.main([f"--workdir={tmp_path}/run", f"--out={tmp_path}"]) == 0
    assert [found["metrics"] for found in read(tmp_path)["runs"]] == [run["metrics"]]
    # A batch of 8 rows has all lines of a file.
    periodic = evaluation.Periodic(program, opened)
    assert [step for step in range(1, 6) if periodic.is_due(step)] == [2, 4, 5]
    for name, value in periodic.metrics(state).items():
        assert value == pytest.approx(run["metrics"][name], rel=1e-5)
