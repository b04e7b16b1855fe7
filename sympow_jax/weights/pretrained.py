"""Published models as folders of Hugging Face's layout: `config.json` and safetensors files."""

import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import config, hub, models
from sympow_jax.config import checks, serialize
from sympow_jax.process import atomic, workdir
from sympow_jax.weights import families, files, tensors

# Files of a published model other than its weights and `config.json`.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def from_pretrained(
    path: str | os.PathLike[str], *, param_dtype: str = "float32", mesh: jax.sharding.Mesh | None = None
) -> tuple[config.Config, models.Model]:
    """Returns the settings and the model of a published transformer, or of a file that `save` wrote.

    A GGUF file needs the package `gguf`, which is an extra. Its tensors are dequantized one after the other. Matrix
    products are in the dtype of the settings, which is float32 for published models. To change settings, call
    `read_settings` and `load` instead.

    Args:
        path: a folder with `config.json` and safetensors files, a safetensors file, a GGUF file, or
            `hf://ORG/NAME[@REVISION]`, which is downloaded.
        param_dtype: dtype of the parameters, `float32` or `bfloat16`.
        mesh: mesh that the parameters are sharded over, as in training (`models.parameter_specs`). If None, they are on
            the default device.

    Raises:
        ValueError: the download fails, or as `read_settings` and `load`.
    """
    path = hub.local_path(path, hub.WEIGHTS)
    settings = files.read_settings(files.settings_path(path))
    return settings, files.load(path, settings, param_dtype=param_dtype, mesh=mesh)


def save_pretrained(
    folder: str | os.PathLike[str],
    settings: config.Config,
    model: models.Model,
    *,
    dtype: str = "float32",
    max_file_bytes: int = 5_000_000_000,
    original: str | os.PathLike[str] | None = None,
) -> int:
    """Writes a model as a folder that `transformers` opens; returns the number of elements.

    The family is the first of `families.FAMILIES` that describes the model. All files are written to a hidden folder
    and then moved, `config.json` last, so that a call that was stopped can be repeated.

    Args:
        folder: folder to write to. It may exist, but without `config.json` and safetensors files.
        settings: settings of the run.
        model: the model.
        dtype: dtype of the files: `float32`, from which `load` restores the model bit for bit, or `bfloat16`, which
            rounds.
        max_file_bytes: size above which there are several files and an index. A larger tensor has its own file.
        original: folder of the published model that this one comes from. Its tokenizer's files are copied, and so are
            values of its `config.json` that do not describe the model. None if there is none.

    Raises:
        ValueError: no family describes the model, the settings are of another model, the folder has such files or those
            to copy, or `dtype` or `max_file_bytes` is not supported.
        OSError: a file cannot be written.
    """
    folder = pathlib.Path(folder)
    checks.require_choice("dtype", dtype, files.DTYPES)
    if not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise ValueError(f"max_file_bytes is {max_file_bytes!r}; it must be a number of bytes, at least 1")
    copied = [] if original is None else companions(original)
    before = {} if original is None else serialize.read_object(pathlib.Path(original, "config.json"))
    family, values = families.values(settings, before)
    if families.function(model.config) != families.function(settings.model):
        raise ValueError(
            "settings.model is not the config of the model; pass the settings that it was made with"
        )
    outputs = [folder / "config.json", folder / tensors.INDEX, *sorted(folder.glob(f"*{tensors.SUFFIX}"))]
    outputs += [folder / path.name for path in copied]
    if existing := [path for path in outputs if os.path.lexists(path)]:
        raise ValueError(f"{existing[0]} exists; remove it or choose another folder")
    arrays = files.named_arrays(model)
    table = family.layout.tensors(arrays)
    itemsize = jnp.dtype(dtype).itemsize
    sizes = {name: itemsize * sum(arrays[part].size for part in row.parts) for name, row in table.items()}
    # Each file has as many tensors as fit, in order.
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = max_file_bytes
        shards[-1].append(name)
        room -= size
    names = [
        tensors.WHOLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}{tensors.SUFFIX}"
        for number in range(1, len(shards) + 1)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with atomic.draft_folder(folder / "config.json") as drafts:
        for name, shard in zip(names, shards):
            contents = {}
            for key in shard:
                joined = np.concatenate([np.asarray(arrays[part]) for part in table[key].parts], axis=-1)
                joined = joined.T if table[key].transposed else joined
                contents[key] = joined.astype(jnp.dtype(dtype), order="C")
            tensors.save(drafts / name, contents, format="pt")
        if len(shards) > 1:
            places = {key: name for name, shard in zip(names, shards) for key in shard}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
            names.append(tensors.INDEX)
            (drafts / tensors.INDEX).write_text(workdir.json_text(index))
        (drafts / "config.json").write_text(workdir.json_text(values | {"torch_dtype": dtype}))
        for path in copied:
            names.append(path.name)
            shutil.copyfile(path, drafts / path.name)
        for name in (*names, "config.json"):
            os.replace(drafts / name, folder / name)
    return sum(array.size for array in arrays.values())


def companions(folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Returns the files of a published model in a folder, except its weights and `config.json`."""
    return [path for name in _COMPANIONS if (path := pathlib.Path(folder, name)).is_file()]
