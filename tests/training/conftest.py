"""A run small enough to train in a second."""

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from sympow_jax import config, loop
from sympow_jax.training import sharding


@pytest.fixture(scope="package")
def settings(tmp_path_factory: pytest.TempPathFactory) -> config.Config:
    """Returns a config of one layer of width 16 on a few files, 10 steps of 4 rows of 16 bytes."""
    folder = tmp_path_factory.mktemp("corpus")
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


@dataclasses.dataclass(frozen=True)
class Finished:
    """The run of `settings`, which is read but not written: `copy` has one to go on with.

    Attributes:
        folder: its workdir.
        batches: every batch that was placed on the devices, the held-out one first.
    """

    folder: pathlib.Path
    batches: list[dict[str, np.ndarray]]

    def copy(self, folder: pathlib.Path) -> pathlib.Path:
        return shutil.copytree(self.folder, folder)


@pytest.fixture(scope="package")
def finished(settings: config.Config, tmp_path_factory) -> Finished:
    """Trains the ten steps of `settings` once for all tests that need a whole run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with recorded_batches() as batches:
        assert loop.train(settings, folder) == 0
    return Finished(folder, batches)


@contextlib.contextmanager
def recorded_batches() -> Iterator[list[dict[str, np.ndarray]]]:
    """Yields a list of every batch that training places on the devices, the held-out one first."""
    seen, place = [], sharding.place_batch

    def record(batch, mesh):
        seen.append({name: array.copy() for name, array in batch.items()})
        return place(batch, mesh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "place_batch", record)
        yield seen


@pytest.fixture
def batches() -> Iterator[list[dict[str, np.ndarray]]]:
    with recorded_batches() as seen:
        yield seen


@pytest.fixture
def with_training(settings: config.Config):
    def change(**changes) -> config.Config:
        return dataclasses.replace(settings, training=dataclasses.replace(settings.training, **changes))

    return change
