"""Programs, batches and records of small runs, and what tests compare of them."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import config, training
from sympow_jax.process import workdir
from sympow_jax.training import checkpoint, restore, sharding

ROWS, TIME, CLASSES = 4, 8, 3


def program(settings: config.Config) -> training.Program:
    return training.Program(settings, sharding.whole_mesh())


def changed(settings: config.Config, **groups) -> config.Config:
    """Returns a config with other values of the named settings of each named group, or with another group."""
    return dataclasses.replace(
        settings,
        **{
            name: dataclasses.replace(getattr(settings, name), **values)
            if isinstance(values, dict)
            else values
            for name, values in groups.items()
        },
    )


def tokens(settings: config.Config) -> dict[str, jax.Array]:
    """Returns a batch of random tokens, whose rows have different numbers of targets."""
    generator = np.random.default_rng(0)
    shape = (settings.data.batch_size, settings.data.context_length)
    targets = generator.integers(0, 256, shape).astype(np.int32)
    # A mean of the rows' means would differ from the mean.
    for row in range(len(targets)):
        targets[row, : 4 * row] = -1
    inputs = generator.integers(0, 256, shape)
    return {"inputs": jnp.asarray(inputs, jnp.int32), "targets": jnp.asarray(targets)}


def encoder(task: str = "classification", *, accumulate: int = 1, **model) -> config.Config:
    """Returns a config of an encoder of width 16 on rows of 8 tokens; updates are the gradient itself."""
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


def labeled(task: str = "classification") -> dict[str, np.ndarray]:
    """Returns rows of several lengths for `encoder`; the label of one of them does not count."""
    generator = np.random.default_rng(0)
    segments = np.zeros((ROWS, TIME), np.int32)
    segments[1, 5:], segments[3, 2:] = -1, -1
    labels = np.array([2, 0, -1, 1], np.int32)
    if task == "regression":
        labels = np.array([0.5, -2.0, np.nan, 3.0], np.float32)
    inputs = generator.integers(0, 32, (ROWS, TIME)).astype(np.int32)
    return {"inputs": inputs, "segment_ids": segments, "labels": labels}


def update(settings: config.Config, rows) -> tuple[training.TrainState, dict[str, float]]:
    made = program(settings)
    state, metrics = made.update(made.init_state(), sharding.place_batch(rows, made.mesh))
    return state, {name: float(value) for name, value in metrics.items()}


def lines(folder: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def save(folder: pathlib.Path, settings: config.Config, state: training.TrainState, step: int = 7) -> None:
    """Makes the workdir of a run with a checkpoint of this step."""
    workdir.open_workdir(folder, settings)
    with checkpoint.Checkpoints(folder, settings) as checkpoints:
        checkpoints.save(step, state, None)


def losses(folder: pathlib.Path) -> dict[int, float]:
    """Returns the losses of a run by step, each of which is there once."""
    found = lines(folder)
    assert len({line["step"] for line in found}) == len(found)
    return {line["step"]: line["loss"] for line in found}


def arrays(settings: config.Config, folder: pathlib.Path) -> tuple[dict, int]:
    return restore.restore_arrays(program(settings), folder)


def assert_same(found, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_close(found, expected, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected)
