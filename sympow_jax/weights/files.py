"""Reads and writes models as safetensors files, and their settings as JSON files."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from sympow_jax import atomic, config, models
from sympow_jax.array_types import Array, Float
from sympow_jax.config import serialize
from sympow_jax.training import workdir
from sympow_jax.weights import gpt2

__all__ = ["DTYPES", "load", "read_settings", "save", "settings_path"]

DTYPES = ("float32", "bfloat16")
_SUFFIX = ".safetensors"
# Dtypes of safetensors that float32 represents exactly.
_READ = ("F32", "F16", "BF16")


def save(
    path: str | os.PathLike[str], settings: config.Config, model: models.Model, *, dtype: str = "float32"
) -> int:
    """Writes the parameters and the running statistics of a model; returns the number of elements.

    A tensor has the shape of the parameter and its name by `models.parameter_name`. The `kernel` of a projection is
    [size_in, size_out]. Each file is written atomically, the weights last.

    Args:
        path: a `.safetensors` file, which must not exist. The settings are written to the `.json` file of that name.
        settings: settings of the run.
        model: the model.
        dtype: dtype of the file: `float32`, from which `load` restores the model bit for bit, or `bfloat16`, which
            rounds.

    Raises:
        ValueError: a file of that name exists, the suffix is wrong, or `dtype` is not supported.
        OSError: a file cannot be written.
    """
    path = pathlib.Path(path)
    settings_file = path.with_suffix(".json")
    if path.suffix != _SUFFIX:
        raise ValueError(f"{path} does not end in {_SUFFIX}, as files of weights do")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    for output in (path, settings_file):
        if os.path.lexists(output):
            raise ValueError(f"{output} exists; remove it or choose another name")
    tensors = {
        # Contiguous, because the library writes the raw buffer.
        name: np.asarray(leaf).astype(jnp.dtype(dtype), order="C", copy=False)
        for tree in nnx.split(model, nnx.Param, nnx.BatchStat)[1:]
        for name, leaf in _named(nnx.to_pure_dict(tree)).items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic.replace(path) as draft:
            safetensors.numpy.save_file(tensors, draft, metadata={"format": "sympow_jax"})
            workdir.write_json(settings_file, dataclasses.asdict(settings))
    except safetensors.SafetensorError as error:  # such as a full disk
        raise OSError(f"cannot write {path}: {error}") from error
    return sum(tensor.size for tensor in tensors.values())


def load(path: str | os.PathLike[str], settings: config.Config) -> models.Model:
    """Returns a model with the weights of a safetensors file, in float32 on the default device.

    The file was written by `save`, or has GPT-2's published weights (`gpt2.layout`), recognized by their names. In
    addition to the model, only one tensor at a time is in memory.

    Raises:
        ValueError: the file does not exist, is damaged or is not a safetensors file, or does not fit the model. In the
            last case, the error lists every name and shape that differs.
    """
    path = pathlib.Path(path)
    abstract = nnx.eval_shape(lambda: models.make(settings.model, settings.task, rngs=nnx.Rngs(0)))
    graph, *variables = nnx.split(abstract, nnx.Param, nnx.BatchStat)
    trees = [nnx.to_pure_dict(tree) for tree in variables]
    parameters = {name: leaf.shape for tree in trees for name, leaf in _named(tree).items()}
    with _opened(path) as file:
        arrays = _read(file, parameters, path)
    filled = (
        jax.tree_util.tree_map_with_path(lambda where, _: arrays[models.parameter_name(where)], tree)
        for tree in trees
    )
    return nnx.merge(graph, *filled)


def settings_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the JSON file of a weights file: of the same name, or `config.json` if only that exists."""
    path = pathlib.Path(path)
    settings_file, published = path.with_suffix(".json"), path.with_name("config.json")
    return published if published.is_file() and not settings_file.exists() else settings_file


def read_settings(path: str | os.PathLike[str]) -> config.Config:
    """Returns the settings in a JSON file that `save` wrote, or in GPT-2's `config.json` (`gpt2.settings`).

    Raises:
        ValueError: the file does not exist, is not JSON or is of another kind, or the settings are not supported.
    """
    path = pathlib.Path(path)
    try:
        values = serialize.read_object(path)
    except OSError as error:
        raise ValueError(f"cannot read the settings {path}: {error.strerror}") from error
    try:
        return gpt2.settings(values) if gpt2.is_config(values) else serialize.from_dict(config.Config, values)
    except (TypeError, ValueError) as error:  # a TypeError if GPT-2's has text in place of a number
        raise ValueError(f"{path}: {error}") from error


def _named(tree: Mapping[Any, Any]) -> dict[str, Any]:
    return {models.parameter_name(where): leaf for where, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[Any]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {error}") from error


def _read(
    file: Any, parameters: Mapping[str, tuple[int, ...]], path: pathlib.Path
) -> dict[str, Float[Array, "..."]]:
    """Returns the parameters by name, with the shapes in `wanted`."""
    names = stored = set(file.keys())
    layout: gpt2.Layout = {name: (name,) for name in parameters}
    if gpt2.is_layout(stored):
        layout = gpt2.layout(stored, parameters)
        names = {name for name in stored if not gpt2.is_ignored(name)}
    if problems := _mismatches(file, names, layout, parameters):
        raise ValueError(f"{path} does not fit the model of these settings: {'; '.join(problems)}")
    arrays = {}
    for name, parts in layout.items():
        tensor, start = file.get_tensor(name), 0
        for part in parts:
            size = parameters[part][-1]
            arrays[part] = jnp.asarray(tensor[..., start : start + size], jnp.float32)
            start += size
    if gpt2.OUTPUT in stored and not np.array_equal(file.get_tensor(gpt2.OUTPUT), arrays["embedding"]):
        raise ValueError(
            f"{gpt2.OUTPUT} of {path} is not the embedding; the output of this model is the embedding's transpose"
        )
    return arrays


def _mismatches(
    file: Any, names: set[str], layout: gpt2.Layout, parameters: Mapping[str, tuple[int, ...]]
) -> list[str]:
    problems = []
    if lacking := sorted(layout.keys() - names):
        problems.append(f"it lacks {', '.join(lacking)}")
    if extra := sorted(names - layout.keys()):
        problems.append(f"the model has no {', '.join(extra)}")
    for name in sorted(layout.keys() & names):
        tensor = file.get_slice(name)
        shapes = [parameters[part] for part in layout[name]]
        shape = [*shapes[0][:-1], sum(shape[-1] for shape in shapes)]
        if list(tensor.get_shape()) != shape:
            problems.append(f"{name} is {list(tensor.get_shape())} and not {shape}")
        elif tensor.get_dtype() not in _READ:
            problems.append(f"{name} is of dtype {tensor.get_dtype()} and not {', '.join(_READ)}")
    return problems
