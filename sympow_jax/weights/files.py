"""Reads weights as models, and writes models as safetensors files with their settings as JSON files."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Shaped

from sympow_jax import config, models, spelling
from sympow_jax.array_types import Array, Float
from sympow_jax.config import checks, serialize
from sympow_jax.config import model as model_lib
from sympow_jax.layers import partitioning
from sympow_jax.process import atomic, workdir
from sympow_jax.weights import families, gguf, layouts, tensors

DTYPES = model_lib.DTYPES
# Dtypes of safetensors that float32 represents exactly.
_READ = ("F32", "F16", "BF16")
# Rows of two matrices that are compared at a time.
_COMPARED = 4096


def save(
    path: str | os.PathLike[str], settings: config.Config, model: models.Model, *, dtype: str = "float32"
) -> int:
    """Writes the parameters and the running statistics of a model; returns the number of elements.

    A tensor has the shape of the parameter and its name by `models.parameter_name`. The `kernel` of a projection is
    [size_in, size_out]. Each file is written atomically, the weights last. A call that was stopped can be repeated.

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
    if path.suffix != tensors.SUFFIX:
        raise ValueError(f"{path} does not end in {tensors.SUFFIX}, as files of weights do")
    checks.require_choice("dtype", dtype, DTYPES)
    description = workdir.json_text(dataclasses.asdict(settings))
    # A stopped export may have left the same settings.
    is_same = settings_file.is_file() and settings_file.read_bytes() == description.encode()
    for output in (path, *([] if is_same else [settings_file])):
        if os.path.lexists(output):
            raise ValueError(f"{output} exists; remove it or choose another name")
    arrays = {
        # Contiguous, because the library writes the raw buffer.
        name: np.asarray(leaf).astype(jnp.dtype(dtype), order="C", copy=False)
        for name, leaf in named_arrays(model).items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replace(path) as draft:
        tensors.save(draft, arrays, format="sympow_jax")
        with atomic.replace(settings_file) as settings_draft:
            settings_draft.write_text(description)
    return sum(array.size for array in arrays.values())


def named_arrays(model: models.Model) -> dict[str, Float[Array, "..."]]:
    """Returns the parameters and the running statistics of a model by `models.parameter_name`."""
    trees = (nnx.to_pure_dict(tree) for tree in nnx.split(model, nnx.Param, nnx.BatchStat)[1:])
    return {name: leaf for tree in trees for name, leaf in _named(tree).items()}


def load(
    path: str | os.PathLike[str],
    settings: config.Config,
    *,
    param_dtype: str = "float32",
    mesh: jax.sharding.Mesh | None = None,
) -> models.Model:
    """Returns a model with the weights of a safetensors or GGUF file, or of a folder with safetensors files.

    The names of the tensors are those of `save` or of a published model (`layouts`), whichever fit best. A process
    reads only the slices that its devices need. In addition to the model, it needs memory for two copies of the largest
    parameter at most.

    Args:
        path: a file, or a folder with `model.safetensors` or with the files that `model.safetensors.index.json` names.
        settings: settings of the run.
        param_dtype: dtype of the parameters, `float32` or `bfloat16`. Running statistics are float32.
        mesh: mesh that the parameters are sharded over, as in training (`models.parameter_specs`). If None, they are on
            the default device.

    Raises:
        ValueError: a file does not exist, is damaged or is not a safetensors file, or the weights do not fit the model.
            In the last case, the error lists the first names and shapes that differ. Or a weight is NaN or infinite.
    """
    path = pathlib.Path(path)
    checks.require_choice("param_dtype", param_dtype, DTYPES)
    abstract = nnx.eval_shape(lambda: models.make(settings.model, settings.task, rngs=nnx.Rngs(0)))
    graph, *variables = nnx.split(abstract, nnx.Param, nnx.BatchStat)
    specs = {".".join(map(str, key)): spec for key, spec in models.parameter_specs(abstract).items()}
    trees = [nnx.to_pure_dict(tree) for tree in variables]
    shapes = {name: leaf.shape for tree in trees for name, leaf in _named(tree).items()}
    with tensors.opened(path) as stored:
        places = _places(stored, shapes, path)

        def read(name: str, bounds: tuple[tuple[int, int], ...], dtype: str) -> Shaped[np.ndarray, "..."]:
            tensor, start, transposed = places[name]
            *index, last = (slice(*part) for part in bounds)
            index.append(slice(last.start + start, last.stop + start))
            part = stored[tensor][tuple(index[::-1] if transposed else index)]
            part = (part.T if transposed else part).astype(jnp.dtype(dtype), order="C")
            if bad := part.size - np.count_nonzero(np.isfinite(part)):
                raise ValueError(
                    f"{spelling.cut(tensor, 100)} has {bad:,} of {part.size:,} numbers that are NaN or infinite in "
                    f"{dtype}; the file is damaged, or of a training that diverged"
                )
            return part

        def array(dtype: str, where: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Float[Array, "..."]:
            name, shape = models.parameter_name(where), leaf.shape
            if mesh is None:
                return jnp.asarray(read(name, tuple((0, length) for length in shape), dtype))
            # Devices with the same slice share one copy.
            block = functools.cache(lambda bounds: read(name, bounds, dtype))
            spec = partitioning.fit(specs.get(name, partitioning.REPLICATED), shape, mesh.shape)

            def part(index: Any) -> Shaped[np.ndarray, "..."]:
                return block(tuple(x.indices(length)[:2] for x, length in zip(index, shape)))

            return jax.make_array_from_callback(shape, jax.sharding.NamedSharding(mesh, spec), part)

        filled = [
            jax.tree_util.tree_map_with_path(functools.partial(array, dtype), tree)
            for dtype, tree in zip((param_dtype, "float32"), trees)
        ]
    return nnx.merge(graph, *filled)


def settings_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the JSON file with the settings of weights.

    It is `config.json` of a folder. For a file, it has the name of the file, or is `config.json` if only that exists.
    A GGUF file has its settings in itself.
    """
    path = pathlib.Path(path)
    if gguf.is_file(path):
        return path
    if path.is_dir():
        return path / "config.json"
    settings_file, published = path.with_suffix(".json"), path.with_name("config.json")
    return published if published.is_file() and not settings_file.exists() else settings_file


def read_settings(path: str | os.PathLike[str]) -> config.Config:
    """Returns the settings in a JSON file that `save` wrote, or in a published model's `config.json` or GGUF file.

    If a published model has a `tokenizer.json`, its folder is `data.tokenizer`.

    Raises:
        ValueError: the file does not exist, is not JSON or is of another kind, or the settings are not supported.
    """
    path = pathlib.Path(path)
    try:
        values = gguf.config(path) if gguf.is_file(path) else serialize.read_object(path)
    except OSError as error:
        raise ValueError(
            f"cannot read the settings {path}: {error.strerror}; a file or folder of weights needs them beside it"
        ) from error
    try:
        if families.is_config(values):
            settings = families.settings(values)
            if not path.with_name("tokenizer.json").is_file():
                return settings
            tokenizer = os.path.abspath(path.parent)
            return dataclasses.replace(settings, data=dataclasses.replace(settings.data, tokenizer=tokenizer))
        return serialize.from_dict(config.Config, values)
    except (TypeError, ValueError) as error:  # a TypeError if text is in place of a number
        raise ValueError(f"{path}: {error}") from error


def _named(tree: Mapping[Any, Any]) -> dict[str, Any]:
    return {models.parameter_name(where): leaf for where, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _places(
    stored: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: pathlib.Path
) -> dict[str, tuple[str, int, bool]]:
    """Returns the place of each parameter: its tensor, the start along its last axis, and whether it is transposed.

    Raises:
        ValueError: the weights do not fit the model.
    """
    layout, published = layouts.choose(stored, shapes)
    ignored = {name for name in stored if published is not None and published.is_ignored(name)}
    # The head of a model whose output is its embedding must be a copy of it.
    copied = published is not None and layouts.HEAD not in layout and layouts.HEAD in stored
    ignored |= {layouts.HEAD} if copied else set()
    names = stored.keys() - ignored
    problems, places = [], {}
    if lacking := sorted(layout.keys() - names):
        problems.append(f"it lacks {spelling.listed(lacking)}")
    if extra := sorted(names - layout.keys()):
        problems.append(f"the model has no {spelling.listed(extra)}")
    for name, tensor in sorted(layout.items()):
        size = 0
        for part in tensor.parts:
            places[part] = (name, size, tensor.transposed)
            size += shapes[part][-1]
        if name in names:
            shape = [*shapes[tensor.parts[0]][:-1], size][:: -1 if tensor.transposed else 1]
            if stored[name].get_shape() != shape:
                problems.append(f"{name} is {stored[name].get_shape()} and not {shape}")
    for name in sorted((layout.keys() & names) | ({layouts.HEAD} if copied else set())):
        if (dtype := stored[name].get_dtype()) not in _READ:
            problems.append(f"{name} is of dtype {dtype} and not {', '.join(_READ)}")
    if problems:
        found = spelling.listed(problems, "; ")
        raise ValueError(f"{path} does not fit the model of these settings: {found}")
    if copied:
        head, embedding = stored[layouts.HEAD], stored[places["embedding"][0]]
        size = shapes["embedding"][0]
        blocks = [slice(start, min(start + _COMPARED, size)) for start in range(0, size, _COMPARED)]
        if head.get_shape() != embedding.get_shape() or not all(
            np.array_equal(head[block], embedding[block]) for block in blocks
        ):
            raise ValueError(
                f"{layouts.HEAD} of {path} is not the embedding; the output of this model is the embedding's transpose"
            )
    return places
