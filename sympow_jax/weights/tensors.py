"""Tensors of a GGUF file, or of one or several safetensors files, read slice by slice."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Shaped

from sympow_jax import spelling
from sympow_jax.config import serialize
from sympow_jax.weights import gguf

SUFFIX = ".safetensors"
# Names of the files in a folder of Hugging Face's layout: one file, or the index of several.
WHOLE = f"model{SUFFIX}"
INDEX = f"{WHOLE}.index.json"
# Weights as pickles, which are not read, because unpickling runs code.
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_REMEDY = (
    "; its weights are pickles (.bin), which are not read: load them with transformers and save them with its "
    "save_pretrained"
)


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Opens a GGUF or safetensors file, or those of a folder: `model.safetensors`, or the files that its index names.

    Yields the tensors by name, with the library's methods `get_shape` and `get_dtype`. Only what is indexed is read.

    Raises:
        ValueError: as `gguf.tensors`; or a file does not exist, is damaged or is not a safetensors file, or the index
            names files outside the folder or tensors that its files do not have.
    """
    if gguf.is_file(path):
        yield gguf.tensors(path)
        return
    with contextlib.ExitStack() as stack:
        index = path / INDEX
        if not path.is_dir() or (path / WHOLE).is_file():
            file = stack.enter_context(_open(path / WHOLE if path.is_dir() else path))
            yield {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return
        if not index.is_file():
            pickles = any((path / name).is_file() for name in _PICKLES)
            raise ValueError(f"there is no {WHOLE} and no {INDEX} in {path}{_REMEDY if pickles else ''}")
        places = serialize.read_object(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ValueError(f"{index} has no weight_map with the file of each tensor")
        shards = sorted(set(places.values()))
        if outside := [x for x in shards if os.path.basename(x) != x or not x.endswith(SUFFIX)]:
            raise ValueError(
                f"{index} names files that are no {SUFFIX} files of its folder: {spelling.listed(outside)}"
            )
        if missing := [name for name in shards if not (path / name).is_file()]:
            raise ValueError(
                f"{path} lacks {spelling.listed(missing)}, which {INDEX} names; download it again"
            )
        files = {name: stack.enter_context(_open(path / name)) for name in shards}
        stored = {name: set(file.keys()) for name, file in files.items()}
        if lacking := sorted(name for name, shard in places.items() if name not in stored[shard]):
            raise ValueError(
                f"{INDEX} of {path} names tensors that its files do not have: {spelling.listed(lacking)}; download it "
                f"again"
            )
        yield {name: files[shard].get_slice(name) for name, shard in places.items()}


def _open(path: pathlib.Path) -> Any:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        # The library calls a file that may not be read missing.
        path.open("rb").close()
        return safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file, or is damaged: {spelling.cut(str(error), 200)}"
        ) from error


def save(path: pathlib.Path, arrays: dict[str, Shaped[np.ndarray, "..."]], *, format: str) -> None:
    """Writes a safetensors file with the permissions of other new files; raises OSError if that fails."""
    try:
        safetensors.numpy.save_file(arrays, path, metadata={"format": format})
    except safetensors.SafetensorError as error:  # such as a full disk
        raise OSError(f"cannot write {path.name} in {path.parent.parent}: {error}") from error
    # The library leaves it to its owner alone.
    os.umask(umask := os.umask(0))
    path.chmod(0o666 & ~umask)
