"""Tests of the learning rates that the experiment of optimizers tries."""

import math
import pathlib

import pytest

from experiments import _shared, optimizers
from sympow_jax import config


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (1.0, [-1, 0, 1]),
        (3.0, [-1, 0, 1, 2]),
        (1 / 9, [-1, 0, 1, -2, -3]),
        (math.inf, [-1, 0, 1, 2, 3]),
    ],
)
def test_rates_go_on_until_the_best_is_inside(monkeypatch, best, tried):
    trained = []

    def loss(folder: pathlib.Path) -> float:
        """Returns the distance from the best rate, in factors."""
        rate = float(folder.name.split("_")[0])
        return -rate if best == math.inf else abs(math.log(rate / best))

    def train(_, runs: dict[str, config.Config]) -> list[pathlib.Path]:
        pairs = [(run.optimizer.learning_rate, run.training.seed) for run in runs.values()]
        trained.extend(pairs)
        return [pathlib.Path(f"{rate}_{seed}") for rate, seed in pairs]

    monkeypatch.setattr(optimizers, "_loss", loss)
    monkeypatch.setattr(_shared, "train_all", train)
    monkeypatch.setattr(optimizers, "_report", lambda *_: None)
    monkeypatch.setattr(_shared, "print_tables", lambda *_: None)
    options = _shared.Options(
        scale="tiny",
        plan=optimizers.PLANS["tiny"],
        variants=("prodigy",),
        power=2,
        results=pathlib.Path("results"),
        runs=pathlib.Path("runs"),
        data=(),
        heldout=(),
        more={},
        command="",
    )
    optimizers._run(options)
    first = [rate for rate, seed in trained if seed == 0]
    assert first == pytest.approx([3.0**exponent for exponent in tried])
    expected = first[-1] if best == math.inf else min(first, key=lambda rate: abs(math.log(rate / best)))
    assert [rate for rate, seed in trained if seed == 1] == [expected]
