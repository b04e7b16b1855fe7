"""Exports weights from workdirs, and imports weights into new workdirs."""

import dataclasses
import os
import pathlib

import jax
import jax.numpy as jnp
from flax import nnx

from sympow_jax import config, models, training
from sympow_jax.config import serialize
from sympow_jax.process import atomic, workdir
from sympow_jax.training import checkpoint, optimizer, restore, sharding
from sympow_jax.weights import families, files, gguf, pretrained

FORMATS = ("sympow", "huggingface")
# Folder of an imported run with files of the published model.
_ORIGINAL = "original"


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
    arrays, number = restore.restore_arrays(program, pathlib.Path(folder))
    model = program.merge(**arrays)
    if format == "sympow":
        return number, files.save(path, settings, model, dtype=dtype)
    original = pathlib.Path(folder, _ORIGINAL)
    return number, pretrained.save_pretrained(
        path, settings, model, dtype=dtype, original=original if original.is_dir() else None
    )


def import_run(path: str | os.PathLike[str], settings: config.Config, folder: str | os.PathLike[str]) -> int:
    """Creates a workdir with a run at step 0 from weights; returns the number of elements.

    The `config.json` of a published model and its tokenizer's files are copied to the folder `original`, for exports.
    Those of a GGUF file are made from its metadata, and the run has that tokenizer unless the settings name another.

    Raises:
        ValueError: as `files.load` and `gguf.tokenizer`, or the folder holds a run or cannot be written.
    """
    folder = pathlib.Path(folder)
    if workdir.checkpoint_steps(folder):
        raise ValueError(f"{folder} holds a run; import into another workdir")
    published = files.settings_path(path)
    original: dict[str, bytes] = {}
    if gguf.is_file(path):
        if settings.data.tokenizer is None and (original := gguf.tokenizer(path)):
            data = dataclasses.replace(settings.data, tokenizer=os.path.abspath(folder / _ORIGINAL))
            settings = dataclasses.replace(settings, data=data)
        original["config.json"] = workdir.json_text(gguf.config(path)).encode()
    elif published.is_file() and families.is_config(serialize.read_object(published)):
        copied = [*pretrained.companions(published.parent), published]
        original = {file.name: file.read_bytes() for file in copied}
    model = files.load(path, settings)
    params, statistics = (nnx.to_pure_dict(tree) for tree in nnx.split(model, nnx.Param, nnx.BatchStat)[1:])
    params, statistics = (
        models.stack(tree, settings.model.attention_period) for tree in (params, statistics)
    )
    optimizer.parameter_options(settings.optimizer, params)  # raises its errors before there is a workdir
    workdir.open_workdir(folder, settings)
    if original:
        (folder / _ORIGINAL).mkdir(exist_ok=True)
    for name, content in original.items():
        with atomic.replace(folder / _ORIGINAL / name) as draft:
            draft.write_bytes(content)
    state = training.TrainState(step=jnp.int32(0), params=params, opt_state=(), statistics=statistics)
    with checkpoint.Checkpoints(folder, settings) as checkpoints:
        checkpoints.save(0, state, None)
    return sum(leaf.size for leaf in jax.tree.leaves((params, statistics)))
