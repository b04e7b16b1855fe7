"""Exports weights from workdirs, and imports weights into new workdirs."""

import os
import pathlib

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config, training
from sympow_jax.training import checkpoint, optimizer, sharding, workdir
from sympow_jax.weights import files, pretrained

__all__ = ["FORMATS", "export_run", "import_run"]

FORMATS = ("sympow", "huggingface")


def export_run(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: str = "sympow",
    dtype: str = "float32",
) -> tuple[int, int]:
    """Writes a run's newest checkpoint; returns its step and the number of elements.

    Args:
        folder: workdir of the run.
        path: file or folder to write.
        format: `sympow` for a file as of `files.save`, or `huggingface` for a folder as of
            `pretrained.save_pretrained`.
        dtype: dtype of the weights, as there.

    Raises:
        ValueError: as these functions, or the folder holds no run or no good checkpoint.
        OSError: a file cannot be written.
    """
    settings = workdir.read_config(pathlib.Path(folder))
    program = training.Program(settings, sharding.whole_mesh(jax.local_devices()[:1]))
    arrays, number = program.restore_arrays(pathlib.Path(folder))
    write = files.save if format == "sympow" else pretrained.save_pretrained
    return number, write(path, settings, program.merge(**arrays), dtype=dtype)


def import_run(path: str | os.PathLike[str], settings: config.Config, folder: str | os.PathLike[str]) -> int:
    """Creates a workdir with a run at step 0 from weights; returns the number of elements.

    Raises:
        ValueError: as `files.load`, or the folder holds a run or cannot be written.
    """
    folder = pathlib.Path(folder)
    if workdir.holds_run(folder):
        raise ValueError(f"{folder} holds a run; import into another workdir")
    model = files.load(path, settings)
    params, statistics = (nnx.to_pure_dict(tree) for tree in nnx.split(model, nnx.Param, nnx.BatchStat)[1:])
    optimizer.parameter_options(settings.optimizer, params)  # raises its errors before there is a workdir
    workdir.open_workdir(folder, settings)
    state = training.TrainState(step=jnp.int32(0), params=params, opt_state=(), statistics=statistics)
    with checkpoint.Checkpoints(folder, settings) as checkpoints:
        checkpoints.save(0, state, None)
    return sum(leaf.size for leaf in jax.tree.leaves((params, statistics)))
