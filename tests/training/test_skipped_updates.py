"""Tests of updates that are skipped because their loss or gradients are not finite."""

import dataclasses

import jax
import numpy as np
import pytest

from sympow_jax import config
from sympow_jax.training import metrics, sharding
from tests.training import test_metrics, test_tasks


def test_a_skipped_update_leaves_all_but_the_step():
    settings = test_tasks.make("regression", norm="batch")
    settings = dataclasses.replace(
        settings,
        optimizer=config.OptimizerConfig(
            name="adamw", learning_rate=4e-3, warmup_steps=4, ema_decay=0.9, weight_decay=0.1
        ),
        training=config.TrainingConfig(skip_nonfinite=True, scan_layers=True),
    )
    program = test_tasks.program(settings)
    good = test_tasks.batch("regression")
    bad = good | {"labels": np.array([0.5, np.inf, np.nan, 3.0], np.float32)}
    good, bad = (sharding.place_batch(rows, program.mesh) for rows in (good, bad))
    state, _ = program.update(program.init_state(), good)
    before = jax.tree.map(np.array, state)
    state, scalars = program.update(state, bad)
    assert not np.isfinite(scalars["grad_norm"])
    assert float(scalars["learning_rate"]) == pytest.approx(2e-3)
    assert float(scalars["update_norm"]) == 0
    assert (int(state.step), float(scalars["skipped_updates"]), float(scalars["skipped_in_a_row"])) == (
        2,
        1,
        1,
    )
    parts = ("params", "opt_state", "statistics", "average")
    for name in parts:
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(before, name))
    state, scalars = program.update(state, good)
    assert (float(scalars["skipped_updates"]), float(scalars["skipped_in_a_row"])) == (1, 0)
    # The rate of the second update that is done.
    assert float(scalars["learning_rate"]) == pytest.approx(2e-3)
    for name in parts:
        changed = jax.tree.map(
            lambda a, b: (np.asarray(a) != b).any(), getattr(state, name), getattr(before, name)
        )
        assert any(jax.tree.leaves(changed)), name


def test_the_rate_is_the_applied_one_however_skipping_changes():
    settings = test_tasks.make("regression")
    optimizer = config.OptimizerConfig(name="sgd", b1=0.0, learning_rate=0.1, warmup_steps=50, clip_norm=None)
    programs = {
        skips: test_tasks.program(
            dataclasses.replace(
                settings, optimizer=optimizer, training=config.TrainingConfig(skip_nonfinite=skips)
            )
        )
        for skips in (False, True)
    }
    good = test_tasks.batch("regression")
    bad = good | {"labels": np.full_like(good["labels"], np.inf)}
    state, applied = programs[True].init_state(), 0
    for skips, rows in [(True, good), (True, bad), (True, bad), (False, good), (True, bad), (True, good)]:
        program = programs[skips]
        state, scalars = program.update(state, sharding.place_batch(rows, program.mesh))
        assert float(scalars["learning_rate"]) == pytest.approx(0.1 * (applied + 1) / 50)
        applied += rows is good
        if rows is good:
            rate = float(scalars["update_norm"] / scalars["grad_norm"])
            assert rate == pytest.approx(0.1 * applied / 50, rel=1e-4)
        assert ("skipped_updates" in scalars) == skips


def test_the_run_ends_after_several_in_a_row_and_names_the_step(tmp_path, with_training):
    settings = with_training(skip_nonfinite=True, max_skips=3)
    device = test_metrics.CPU[0]
    with metrics.Reporter(tmp_path, settings, start=0, devices=[device]) as reporter:
        for number, in_a_row in enumerate([1, 2, 0, 1, 2, 3], 1):
            skipped = {"loss": np.nan, "grad_norm": np.inf} if in_a_row else {}
            values = test_metrics._scalars(**skipped, skipped_updates=number, skipped_in_a_row=in_a_row)
            with reporter.reading(number):
                pass
            if in_a_row < 3:
                reporter.report(number, values)
                continue
            with pytest.raises(ValueError, match=r"the last 3 updates up to step 6 were skipped") as raised:
                reporter.report(number, values)
            assert "\n" not in str(raised.value)
    lines = test_metrics._lines(tmp_path)
    assert ["loss" in line for line in lines] == [False, False, True, False, False]
    assert [line["skipped_updates"] for line in lines] == [1, 2, 3, 4, 5]
