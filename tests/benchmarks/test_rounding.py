"""Tests of the measurement of rounding: its errors in float64, and that rounded models differ a little."""

import json

import numpy as np
import pytest

from benchmarks import rounding
from sympow_jax import config, loop

pytestmark = pytest.mark.robust


def test_errors():
    generator = np.random.default_rng(0)
    expected = generator.normal(size=(2, 5, 7))
    targets = generator.integers(7, size=(2, 5))
    # A number that is added to all logits changes nothing.
    same = rounding.compare(expected + 3, expected, targets)
    np.testing.assert_allclose(same, (0, 0, 1, 0), atol=1e-12)
    actual = np.log([[[0.5, 0.5]]]), np.log([[[0.75, 0.25]]]), np.array([[1]])
    rms, kl, agreement, loss = rounding.compare(*actual)
    assert rms == pytest.approx(1)
    assert kl == pytest.approx(0.75 * np.log(1.5) + 0.25 * np.log(0.5))
    assert agreement == 1
    assert loss == pytest.approx(np.log(0.25 / 0.5))


@pytest.mark.slow
def test_rows(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    settings = config.Config(
        model=config.ModelConfig(
            vocab_size=256, layers=1, width=16, heads=2, attention=config.preset("conformal")
        ),
        data=config.DataConfig(paths=(f"{tmp_path}/*.txt",), context_length=16, batch_tokens=64),
        training=config.TrainingConfig(steps=1),
    )
    assert loop.train(settings, tmp_path / "run") == 0
    out = tmp_path / "rounding.json"
    rounding.main([f"--workdirs={tmp_path}/run", f"--out={out}", "--tokens=600"])
    rows = json.loads(out.read_text())["rows"]
    assert {(row["rounded"], row["first"], row["last"]) for row in rows} == {
        (rounded, *part) for rounded in rounding.VARIANTS for part in ((1, 512), (89, 600))
    }
    assert all(0 < row["rms"] < 1e-2 for row in rows)
    assert all(row["kl"] > 0 for row in rows)
