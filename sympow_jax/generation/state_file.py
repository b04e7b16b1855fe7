"""State files: safetensors of the arrays, with the model's settings and a checksum of its parameters as metadata."""

import contextlib
import json
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from sympow_jax import models, ops, spelling
from sympow_jax.config import fields, serialize
from sympow_jax.process import atomic


def save_state(path: str | os.PathLike[str], model: models.DecoderLM, state: models.DecoderState) -> None:
    """Writes all rows of a state to a file, atomically.

    Raises:
        ValueError: the state is of another model.
        OSError: the file cannot be written.
    """
    model.check_state(state)
    memories = [layer.memory for layer in state.layers]
    capacities = [memory.capacity if isinstance(memory, ops.KVCache) else None for memory in memories]
    header = {"rows": len(jax.tree.leaves(memories)[0]), "capacities": capacities, **_identity(model)}
    arrays = {
        jax.tree_util.keystr(name): np.ascontiguousarray(leaf)
        for name, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    content = safetensors.numpy.save(arrays, {name: json.dumps(value) for name, value in header.items()})
    with atomic.replace(pathlib.Path(path)) as draft:
        draft.write_bytes(content)


def restore_state(path: str | os.PathLike[str], model: models.DecoderLM) -> models.DecoderState:
    """Returns the state that `save_state` wrote for the same model.

    The file may come from a stranger: only arrays of the model's sizes are read, and no more bytes than the file has.

    Raises:
        ValueError: the file is not a saved state, or is one of a model with other settings or parameters.
        OSError: the file cannot be read.
    """
    path = pathlib.Path(path)
    serialize.require_file(path)
    path.open("rb").close()  # the library calls a file that may not be read missing
    with _readable(path):
        with safetensors.safe_open(path, framework="np") as file:
            header = {name: json.loads(value) for name, value in (file.metadata() or {}).items()}
        rows, capacities = header["rows"], header["capacities"]
        saved = {**header["model"]}
    identity = _identity(model)
    own = identity["model"]
    differing = sorted(x for x in {*own, *saved} if own.get(x, "absent") != saved.get(x, "absent"))
    if differing:
        here, there = (spelling.shown(x.get(differing[0], "absent")) for x in (own, saved))
        raise ValueError(
            f"{path} is a state of another model: {spelling.cut(differing[0], 100)} is {there} there and {here} here "
            f"({len(differing)} settings differ)"
        )
    if header.get("parameters") != identity["parameters"]:
        raise ValueError(
            f"{path} is a state of another model: its settings are those of this one, its parameters are not"
        )
    with _readable(path), safetensors.safe_open(path, framework="np") as file:
        # Abstract, so that damaged sizes take no memory.
        abstract = jax.eval_shape(
            lambda: models.DecoderState(
                layers=tuple(
                    block.attention.init_state(rows, max_length=capacity, kv_cache=capacity is not None)
                    for block, capacity in zip(model.blocks, capacities, strict=True)
                ),
                position=model.init_position(rows),
            )
        )
        leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
        arrays = []
        for name, leaf in leaves:
            stored = file.get_slice(jax.tree_util.keystr(name))
            if tuple(stored.get_shape()) != leaf.shape:
                raise ValueError("an array of another shape")
            arrays.append(stored[...])
            if arrays[-1].dtype != leaf.dtype:
                raise ValueError("an array of another dtype")
    return jax.tree.unflatten(structure, map(jax.device_put, arrays))


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    """Turns errors about the content of a state file into a ValueError that names it."""
    try:
        yield
    except (
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
        RecursionError,
        safetensors.SafetensorError,
    ) as error:
        raise ValueError(f"{path} is not a saved state, or is damaged") from error


def _identity(model: models.DecoderLM) -> dict[str, Any]:
    """Returns the settings of a model as JSON has them, and a checksum of its parameters."""
    settings = serialize.flatten(model.config, fields.Occasion.SAVED_STATE)
    checksum = 0
    for leaf in jax.tree.leaves(nnx.state(model)):
        checksum = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8), checksum)
    return {"model": json.loads(json.dumps(settings)), "parameters": checksum}
