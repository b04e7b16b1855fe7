"""Tests of the parameters that everything except training uses: moving averages, and those of schedule-free."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import config, data, loop, tasks, training, weights
from sympow_jax.training import optimizer, restore, sharding
from sympow_jax.weights import runs

AVERAGES = {
    "ema": {"name": "adafactor", "ema_decay": 0.9},
    "schedule_free": {"name": "schedule_free"},
}


def _with(settings: config.Config, steps: int = 10, **optimizer) -> config.Config:
    """Returns a config of two scanned layers with this optimizer, whose updates may be skipped."""
    return dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, layers=2),
        optimizer=config.OptimizerConfig(learning_rate=3e-2, **optimizer),
        training=dataclasses.replace(settings.training, steps=steps, scan_layers=True, skip_nonfinite=True),
    )


def _program(settings: config.Config) -> training.Program:
    return training.Program(settings, sharding.whole_mesh())


def test_the_average_is_its_formula(settings):
    program = _program(_with(settings, name="sgd", ema_decay=0.5))
    state = program.init_state()
    expected = jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 17)), jnp.int32)
    for step in range(1, 13):
        state, _ = program.update(state, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
        decay = min(0.5, (1 + step) / (10 + step))
        expected = jax.tree.map(
            lambda old, new, decay=decay: decay * old + (1 - decay) * np.asarray(new, np.float64),
            expected,
            state.params,
        )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state.average, expected)
    assert program.evaluation_params(state) is state.average


@pytest.mark.parametrize("name", ["ema", pytest.param("schedule_free", marks=pytest.mark.slow)])
def test_a_run_evaluates_and_resumes_with_its_averages(tmp_path, settings, name, monkeypatch):
    monkeypatch.setattr(optimizer, "FACTORED_SIZE", 8)
    options = AVERAGES[name]
    whole = _with(settings, **options)
    assert loop.train(whole, tmp_path / "whole") == 0
    assert loop.train(_with(settings, 4, **options), tmp_path / "halves") == 0
    assert loop.train(whole, tmp_path / "halves") == 0
    program = _program(whole)
    (arrays, _), (halves, _) = (
        restore.restore_arrays(program, tmp_path / name) for name in ("whole", "halves")
    )
    assert set(arrays) == {"params"}
    jax.tree.map(np.testing.assert_array_equal, halves, arrays)

    # The parameters that are trained are others.
    plain = dataclasses.replace(
        whole, optimizer=config.OptimizerConfig(name="adam"), training=config.TrainingConfig()
    )
    trained, _ = restore.restore_arrays(_program(plain), tmp_path / "whole")
    assert not np.array_equal(trained["params"]["embedding"], arrays["params"]["embedding"])

    # All that reads a run has the parameters of the held-out losses during training.
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    (rows,) = (
        part.sample(share=0, shares=1)
        for part in data.HeldoutData(whole.data, whole.task, vocab_size=256).parts.values()
    )
    _, model, _ = training.restore_model(tmp_path / "whole")
    runs.export_run(tmp_path / "whole", tmp_path / "weights.safetensors")
    exported = weights.load(tmp_path / "weights.safetensors", whole)
    for made in (model, exported, program.merge(**arrays)):
        mean = program.task.sums(made, rows).loss / tasks.count(rows)
        assert float(mean) == pytest.approx(lines[-1]["heldout_loss"], rel=1e-5)
    assert lines[-1]["skipped_updates"] == 0

    # Imported weights begin with an average of their own.
    runs.import_run(tmp_path / "weights.safetensors", whole, tmp_path / "imported")
    assert loop.train(whole, tmp_path / "imported") == 0


@pytest.mark.slow
def test_a_run_that_starts_from_an_average(tmp_path, settings):
    first = _with(settings, 4, name="adam", ema_decay=0.9)
    assert loop.train(first, tmp_path / "first") == 0
    for options in ({"name": "schedule_free"}, {"name": "adamw", "ema_decay": 0.9}):
        second = dataclasses.replace(
            _with(settings, **options), task=config.TaskConfig(initial_run=str(tmp_path / "first"))
        )
        program = _program(second)
        state = restore.begin(program)
        expected, _ = restore.restore_arrays(_program(first), tmp_path / "first")
        expected = jax.tree.map(np.array, expected["params"])
        jax.tree.map(np.testing.assert_array_equal, state.params, expected)
        # The average of schedule-free is computed from two arrays that are equal.
        np.testing.assert_allclose(program.model(state).embedding[...], expected["embedding"], rtol=1e-6)
        assert int(state.step) == 0
        program.update(state, _tokens(second))


def _tokens(settings: config.Config) -> dict[str, jax.Array]:
    shape = settings.data.batch_size, settings.data.context_length
    tokens = jax.random.randint(jax.random.key(0), shape, 0, 256)
    return {"inputs": tokens, "targets": jnp.roll(tokens, -1, axis=1)}


def test_skipping_may_begin_when_a_run_is_resumed(tmp_path, settings):
    plain = dataclasses.replace(settings, training=dataclasses.replace(settings.training, steps=4))
    assert loop.train(plain, tmp_path) == 0
    skipping = dataclasses.replace(settings.training, steps=6, skip_nonfinite=True)
    assert loop.train(dataclasses.replace(settings, training=skipping), tmp_path) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ["skipped_updates" in line for line in lines] == [False] * 4 + [True] * 2
    again = dataclasses.replace(settings.training, steps=8)
    assert loop.train(dataclasses.replace(settings, training=again), tmp_path) == 0
