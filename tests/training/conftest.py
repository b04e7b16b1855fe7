"""A run small enough to train in a second."""

import dataclasses
import pathlib
from collections.abc import Iterator

import pytest

from sympow_jax import config
from tests import programs


@pytest.fixture(autouse=True, scope="package")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """Returns a folder in which the tests cache compiled programs, since most of them train the same model."""
    folder = tmp_path_factory.mktemp("compilation_cache")
    with programs.kept_in(folder):
        yield folder


@pytest.fixture
def settings(tmp_path: pathlib.Path) -> config.Config:
    """Returns a config of one layer of width 16 on a few files, 10 steps of 4 rows of 16 bytes."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"{index}: the quick brown fox jumps over the lazy dog. " * 4)
    return config.Config(
        model=config.ModelConfig(
            vocab_size=256, layers=1, width=16, heads=2, dtype="float32", attention=config.preset("softmax")
        ),
        data=config.DataConfig(
            paths=(str(folder / "*.txt"),), heldout_fraction=0.3, context_length=16, batch_tokens=64
        ),
        optimizer=config.OptimizerConfig(learning_rate=1e-2),
        training=config.TrainingConfig(steps=10, log_every=5, checkpoint_every=4, keep_checkpoints=2),
        evaluation=config.EvaluationConfig(context_lengths=()),
    )


@pytest.fixture
def with_training(settings: config.Config):
    """Returns the same config with other fields of `training`."""

    def change(**changes) -> config.Config:
        return dataclasses.replace(settings, training=dataclasses.replace(settings.training, **changes))

    return change
