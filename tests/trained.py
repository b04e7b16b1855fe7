"""A run of two updates, which the tests of evaluation and generation share and do not write to."""

import contextlib
import functools
import io
import pathlib

import pytest

from sympow_jax import config, loop


@functools.cache
def _make(base: pathlib.Path) -> pathlib.Path:
    folder = base / "trained"
    folder.mkdir()
    for index in range(60):
        text = f"{index}: the quick brown fox jumps over the lazy dog. " * (1 + index % 3)
        (folder / f"{index:02}.txt").write_text(text)
    settings = config.Config(
        model=config.ModelConfig(
            vocab_size=128, layers=1, width=16, heads=2, dtype="float32", attention=config.preset("softmax")
        ),
        data=config.DataConfig(
            paths=(f"{folder}/*.txt",), heldout_fraction=0.5, context_length=16, batch_tokens=32
        ),
        training=config.TrainingConfig(steps=2),
        evaluation=config.EvaluationConfig(context_lengths=(8, 16, 32)),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        assert loop.train(settings, folder / "a") == 0
    return folder / "a"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Workdir of a decoder of bytes below 128; next to it are its texts."""
    return _make(tmp_path_factory.getbasetemp())
