"""Tests of training encoders and image classifiers: loss, batch normalization, and initial parameters."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import config, layers, loop, models, training
from sympow_jax.training import restore, sharding

ROWS, TIME, CLASSES = 4, 8, 3


def make(task="classification", *, accumulate=1, **model) -> config.Config:
    """Returns a config of one layer of width 16 on rows of 8 tokens; updates are the gradient itself."""
    attention = config.preset("softmax", causal=False)
    shape = {"vocab_size": 32, "layers": 1, "width": 16, "heads": 2, "dtype": "float32", **model}
    return config.Config(
        model=config.ModelConfig(attention=attention, **shape),
        task=config.TaskConfig(name=task, classes=CLASSES if task == "classification" else None),
        data=config.DataConfig(
            source="tsv", paths=("x",), text_columns=("text",), context_length=TIME, batch_tokens=ROWS * TIME
        ),
        optimizer=config.OptimizerConfig(name="sgd", learning_rate=1.0, accumulate=accumulate),
    )


def batch(task="classification") -> dict[str, np.ndarray]:
    """Returns rows of several lengths; the label of one of them does not count."""
    generator = np.random.default_rng(0)
    segments = np.zeros((ROWS, TIME), np.int32)
    segments[1, 5:], segments[3, 2:] = -1, -1
    labels = np.array([2, 0, -1, 1], np.int32)
    if task == "regression":
        labels = np.array([0.5, -2.0, np.nan, 3.0], np.float32)
    tokens = generator.integers(0, 32, (ROWS, TIME)).astype(np.int32)
    return {"inputs": tokens, "segment_ids": segments, "labels": labels}


def program(settings: config.Config) -> training.Program:
    return training.Program(settings, sharding.whole_mesh())


def update(settings: config.Config, rows) -> tuple[training.TrainState, dict[str, float]]:
    made = program(settings)
    state, metrics = made.update(made.init_state(), sharding.place_batch(rows, made.mesh))
    return state, {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize("task", ["classification", pytest.param("regression", marks=pytest.mark.slow)])
def test_the_loss_is_the_mean_over_labels_that_count(task):
    settings, rows = make(task), batch(task)
    made = program(settings)
    model, counts = made.merge(made.init_state().params), np.array([0, 1, 3])
    outputs = jax.jit(lambda tokens, ids: model.classify(tokens, segment_ids=ids))(
        rows["inputs"], rows["segment_ids"]
    )
    outputs = np.asarray(outputs, np.float64)[counts]
    labels = rows["labels"][counts]
    _, metrics = update(settings, rows)
    if task == "regression":
        assert metrics["loss"] == pytest.approx(np.mean((outputs[:, 0] - labels) ** 2), rel=1e-5)
        assert "accuracy" not in metrics
        return
    logs = outputs - np.log(np.exp(outputs).sum(-1, keepdims=True))
    assert metrics["loss"] == pytest.approx(-np.mean(logs[np.arange(3), labels]), rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(np.mean(outputs.argmax(-1) == labels))


@pytest.mark.slow
def test_micro_batches_equal_the_batch():
    whole, expected = update(make(), batch())
    state, metrics = update(make(accumulate=2), batch())
    assert metrics == pytest.approx(expected, rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, whole.params)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_running_means_of_the_first_norm_are_the_formula(accumulate):
    """The first norm's input is the embeddings of tokens, which are known.

    Each micro-batch moves its means by a tenth.
    """
    settings, rows = make(norm="batch", accumulate=accumulate), batch()
    embedding = np.asarray(program(settings).init_state().params["embedding"], np.float64)
    state, _ = update(settings, rows)
    mean, variance = np.zeros(16), np.ones(16)
    for part in range(accumulate):
        tokens = rows["inputs"][part::accumulate][rows["segment_ids"][part::accumulate] >= 0]
        mean = 0.9 * mean + 0.1 * embedding[tokens].mean(0)
        variance = 0.9 * variance + 0.1 * embedding[tokens].var(0)
    found = state.statistics["embedding_norm"]
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(found["var"], variance, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["elementwise", "attention", "full"])
def test_rematerialization_changes_neither_gradients_nor_running_means(remat):
    expected, _ = update(make(norm="batch"), batch())
    state, _ = update(make(norm="batch", remat=remat), batch())
    for found, wanted in ((state.params, expected.params), (state.statistics, expected.statistics)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)


def test_only_batch_normalization_has_running_means():
    assert program(make()).abstract.statistics == {}
    assert len(jax.tree.leaves(program(make(norm="batch")).abstract.statistics)) == 2 * 4


@pytest.fixture
def texts(tmp_path: pathlib.Path):
    """Makes runs of a few steps on lines whose label is their first word."""
    words = ("red", "green", "blue")
    lines = [f"{words[i % 3]} {'thing ' * (i % 4)}\t{i % 3}\t{words[i // 3 % 3]}" for i in range(60)]
    (tmp_path / "lines.tsv").write_text("\n".join(["text\tlabel\tother", *lines]) + "\n")
    (tmp_path / "plain.txt").write_text(" ".join(words) * 40)

    def of(task="classification", steps=2, initial_run=None, dual_encoder=False, **model) -> config.Config:
        base = make(task, vocab_size=256, **model)
        data = dataclasses.replace(base.data, paths=(str(tmp_path / "lines.tsv"),), heldout_fraction=0.0)
        if dual_encoder:
            data = dataclasses.replace(data, text_columns=("text", "other"))
        if task == "masked_token":
            data = dataclasses.replace(data, source="text", paths=(str(tmp_path / "plain.txt"),))
        return dataclasses.replace(
            base,
            data=data,
            task=dataclasses.replace(base.task, initial_run=initial_run, dual_encoder=dual_encoder),
            optimizer=config.OptimizerConfig(learning_rate=1e-2),
            training=config.TrainingConfig(steps=steps, checkpoint_every=2),
        )

    return of


def test_resuming_is_exact_with_batch_normalization(texts, tmp_path):
    assert loop.train(texts(steps=4, norm="batch"), tmp_path / "whole") == 0
    assert loop.train(texts(steps=2, norm="batch"), tmp_path / "halves") == 0
    assert loop.train(texts(steps=4, norm="batch"), tmp_path / "halves") == 0
    made = program(texts(norm="batch"))
    (found, _), (expected, _) = (
        restore.restore_arrays(made, tmp_path / name) for name in ("halves", "whole")
    )
    assert set(found) == {"params", "statistics"}
    assert np.abs(found["statistics"]["final_norm"]["mean"]).max() > 0
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    _, model, _ = training.restore_model(tmp_path / "whole")
    means, norm = found["statistics"]["embedding_norm"], model.embedding_norm
    x = np.random.default_rng(0).normal(size=(1, 3, 16)).astype(np.float32)
    wanted = (x - means["mean"]) / np.sqrt(means["var"] + 1e-5) * norm.scale[...] + norm.bias[...]
    np.testing.assert_allclose(layers.normalize(norm, jnp.asarray(x), None), wanted, rtol=1e-4, atol=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "halves" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(0 <= line["accuracy"] <= 1 for line in lines)


def test_a_run_starts_from_the_encoder_of_another(texts, tmp_path):
    first = tmp_path / "first"
    assert loop.train(texts("masked_token"), first) == 0
    second = program(texts(initial_run=str(first)))
    state, new = restore.begin(second), second.init_state()
    arrays, _ = restore.restore_arrays(program(texts("masked_token")), first)
    assert set(state.params) - set(arrays["params"]) == {"head"}
    for name, found in state.params.items():
        expected = new.params["head"] if name == "head" else arrays["params"][name]
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert int(state.step) == 0


@pytest.mark.slow
def test_a_dual_encoder_starts_from_an_encoder_and_is_resumed(texts, tmp_path):
    first, runs = tmp_path / "first", (tmp_path / "whole", tmp_path / "halves")
    assert loop.train(texts("masked_token", norm="batch"), first) == 0

    def pairs(steps):
        return texts(steps=steps, initial_run=str(first), dual_encoder=True, norm="batch")

    begun, (arrays, _) = (
        restore.begin(program(pairs(2))),
        restore.restore_arrays(program(texts("masked_token", norm="batch")), first),
    )
    params = {name: found for name, found in begun.params.items() if name != "head"}
    jax.tree.map(np.testing.assert_array_equal, params, dict(arrays["params"]))
    assert set(begun.params["head"]) == {"first", "second", "linear"}
    for steps, folder in ((4, runs[0]), (2, runs[1]), (4, runs[1])):
        assert loop.train(pairs(steps), folder) == 0
    found, expected = (restore.restore_arrays(program(pairs(4)), folder)[0] for folder in runs)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert (
        np.abs(found["params"]["head"]["first"]["kernel"] - begun.params["head"]["first"]["kernel"]).max() > 0
    )
    assert isinstance(training.restore_model(runs[0])[1], models.DualEncoder)


@pytest.mark.slow
def test_a_run_that_has_begun_no_longer_needs_what_it_started_from(texts, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert loop.train(texts("masked_token", steps=1), first) == 0
    settings = texts(initial_run=str(first))
    assert loop.train(settings, second) == 0
    first.rename(tmp_path / "gone")
    longer = dataclasses.replace(settings.training, steps=3)
    assert loop.train(dataclasses.replace(settings, training=longer), second) == 0


def test_an_initial_run_that_cannot_be(texts, tmp_path):
    with pytest.raises(ValueError, match=r"task\.initial_run: .*nowhere is not the workdir of a run"):
        restore.begin(program(texts(initial_run=str(tmp_path / "nowhere"))))
    first = tmp_path / "first"
    assert loop.train(texts("masked_token", steps=1), first) == 0
    with pytest.raises(
        ValueError, match=r"does not fit: model\.head_dim was 8 and is 4, .*model\.width was 16 and is 8"
    ):
        restore.begin(program(texts(initial_run=str(first), width=8)))
    with pytest.raises(ValueError, match=r"model\.norm was 'layer' and is 'batch'"):
        restore.begin(program(texts(initial_run=str(first), norm="batch")))
    (first / "checkpoints").rename(first / "moved")
    with pytest.raises(ValueError, match=r"task\.initial_run: .*first has no checkpoint yet"):
        restore.begin(program(texts(initial_run=str(first))))
