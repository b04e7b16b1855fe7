"""Tests of the learning rates that the experiment of optimizers tries, and of rates at which training diverges."""

import dataclasses
import json
import math
import pathlib

import pytest

from experiments import _shared, optimizers
from sympow_jax.evaluation import report
from tests.experiments.conftest import OPTIONS

pytestmark = pytest.mark.robust

TINY = dataclasses.replace(OPTIONS, plan=optimizers.PLANS["tiny"], variants=("sgd",))


@pytest.mark.parametrize(
    ("best", "tried"),
    [(1.0, [-1, 0, 1]), (3.0, [-1, 0, 1, 2]), (1 / 9, [-1, 0, 1, -2, -3]), (math.inf, [-1, 0, 1, 2, 3])],
)
def test_rates_go_on_until_the_best_is_inside(monkeypatch, best, tried):
    trained = []

    def loss(folder: pathlib.Path) -> float:
        """Returns the distance from the best rate, in factors."""
        rate = float(folder.name.split("_")[0])
        return -rate if best == math.inf else abs(math.log(rate / best))

    def train(_, runs: dict) -> optimizers.Folders:
        trained.extend((rate, seed) for _, rate, seed in runs)
        return {key: pathlib.Path(f"{rate}_{seed}") for key in runs for _, rate, seed in [key]}

    monkeypatch.setitem(optimizers._MIDDLE_RATES, "sgd", 1.0)
    monkeypatch.setattr(optimizers, "_loss", loss)
    monkeypatch.setattr(_shared, "train_all", train)
    monkeypatch.setattr(optimizers, "_report", lambda *_: None)
    optimizers._run(TINY)
    first = [rate for rate, seed in trained if seed == 0]
    assert first == pytest.approx([3.0**exponent for exponent in tried])
    expected = first[-1] if best == math.inf else min(first, key=lambda rate: abs(math.log(rate / best)))
    assert [rate for rate, seed in trained if seed == 1] == [expected]


def write_losses(
    folder: pathlib.Path, heldout: float | None, training: list[dict[str, float]]
) -> pathlib.Path:
    folder.mkdir()
    (folder / "data.json").write_text(json.dumps({"digest": "0"}))
    (folder / "context_loss.json").write_text(json.dumps({"rows": [{"loss": heldout}]}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(values) + "\n" for values in training))
    return folder


def test_a_rate_that_diverges_is_not_the_best(tmp_path, monkeypatch):
    # The evaluation writes null for NaN, and an update that is skipped has no training loss.
    diverged = write_losses(tmp_path / "diverged", None, [{"step": 1}])
    good = write_losses(tmp_path / "good", 2.5, [{"step": 1, "loss": 3.0}])
    folders = {("sgd", 1.0, 0): diverged, ("sgd", 0.3, 0): good, ("lion", 1.0, 0): diverged}
    losses = {rate: optimizers._loss(folder) for (_, rate, _), folder in list(folders.items())[:2]}
    assert optimizers._best(losses) == 0.3
    # Lower rates are tried if all diverge.
    assert optimizers._best(dict.fromkeys((0.3, 0.1, 0.9), math.nan)) == 0.1
    written = {}

    def write(self, rows, folders, **more) -> pathlib.Path:
        written.update(json.loads(json.dumps(report.without_nan({"rows": rows, **more}))))
        return tmp_path / "optimizers.png"

    monkeypatch.setattr(_shared.Options, "write", write)
    monkeypatch.setattr(optimizers, "state_bytes", lambda *_: 4.0)
    optimizers._report(TINY, folders)
    assert (tmp_path / "optimizers.png").exists()
    assert [row["training_loss"] for row in written["rows"]] == [None, 3.0, None]
    best, tried = optimizers.tables(written)
    assert best.rows == [("sgd", "2.500", "0.3", "4.0"), ("lion", "nan", "1", "4.0")]
    assert tried.rows == [("sgd", "0.3: 2.500, 1: nan"), ("lion", "1: nan")]

    (good / "data.json").write_text(json.dumps({"digest": "1"}))
    with pytest.raises(ValueError, match="the runs in runs were trained on different data; use another"):
        optimizers._report(TINY, folders)
