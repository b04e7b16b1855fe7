"""State files: an `.npz` of the arrays, the model's settings and a checksum of its parameters."""

import dataclasses
import json
import os
import pathlib
import zipfile
import zlib
from typing import Any

import jax
import numpy as np
from flax import nnx

from sympow_jax import atomic, config, layers, models, ops
from sympow_jax.config import fields, serialize
from sympow_jax.generation import decoding

__all__ = ["restore_state", "save_state"]

_HEADER = "header"
# Format 1 had KV caches [B, S, K, ...] in order of time, with tokens of earlier documents and without `next`.
_FORMAT = 2
# Values of settings that are missing in files of earlier versions.
_DEFAULTS = {
    setting.path: setting.default
    for group in fields.groups(config.ModelConfig)
    for setting in group.settings
    if setting.default is not dataclasses.MISSING
}


def save_state(path: str | os.PathLike[str], model: models.DecoderLM, state: models.DecoderState) -> None:
    """Writes all rows of a state to a file, atomically.

    Raises:
        ValueError: the state is of another model.
        OSError: the file cannot be written.
    """
    decoding.require_state(model, state)
    capacity, kv_cache = decoding.cache_sizes(state)
    header = {
        "format": _FORMAT,
        "model": _settings(model),
        "parameters": _checksum(model),
        "rows": jax.tree.leaves(state.layers[0].memory)[0].shape[0],
        "capacity": capacity,
        "kv_cache": kv_cache,
    }
    arrays: dict[str, Any] = {
        jax.tree_util.keystr(name): _bits(np.asarray(leaf))
        for name, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    arrays[_HEADER] = np.array(json.dumps(header))
    with atomic.replace(pathlib.Path(path)) as draft, draft.open("wb") as file:
        np.savez(file, **arrays)


def restore_state(path: str | os.PathLike[str], model: models.DecoderLM) -> models.DecoderState:
    """Returns the state that `save_state` wrote for the same model.

    Raises:
        ValueError: the file is not a saved state, or is one of a model with other settings or parameters.
        OSError: the file cannot be read.
    """
    header, arrays = _read(pathlib.Path(path))
    own = _settings(model)
    saved = _as_json({name: _DEFAULTS[name] for name in own if name in _DEFAULTS}) | header["model"]
    if saved != own:
        names = sorted(name for name in {*own, *saved} if own.get(name) != saved.get(name))
        first = names[0]
        raise ValueError(
            f"{path} is a state of another model: {first} is {saved.get(first)!r} there and "
            f"{own.get(first)!r} here ({len(names)} settings differ)"
        )
    if header["parameters"] != _checksum(model):
        raise ValueError(
            f"{path} is a state of another model: its settings are those of this one, its parameters are not"
        )
    abstract = jax.eval_shape(
        lambda: model.init_state(header["rows"], max_length=header["capacity"], kv_cache=header["kv_cache"])
    )
    if header["format"] == 1:
        arrays = _with_rings(arrays, header["rows"])
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
    restored = []
    for name, leaf in leaves:
        array = arrays.get(jax.tree_util.keystr(name))
        if array is None or array.shape != leaf.shape or array.dtype != _bits(np.empty(0, leaf.dtype)).dtype:
            raise ValueError(f"{path} is damaged: {jax.tree_util.keystr(name)} is not what was saved")
        restored.append(jax.device_put(array.view(leaf.dtype)))
    state = jax.tree.unflatten(structure, restored)
    if header["format"] == 1:
        state = dataclasses.replace(state, layers=tuple(map(_appended, state.layers)))
    return state


def _with_rings(arrays: dict[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a file of format 1 with heads of KV caches before slots, and slot 0 as the next."""
    arrays = dict(arrays)
    for cache in [name.removesuffix(".key") for name in arrays if name.endswith(".memory.key")]:
        for name in (f"{cache}.key", f"{cache}.value", f"{cache}.log_decay"):
            if (array := arrays.get(name)) is not None and array.ndim > 2:
                arrays[name] = np.swapaxes(array, 1, 2)
        arrays[f"{cache}.next"] = np.zeros(rows, np.int32)
    return arrays


def _appended(layer: layers.AttentionState) -> layers.AttentionState:
    """Returns the state of a layer with the tokens of its KV cache appended to an empty one.

    This drops tokens of earlier documents, and marks those that are not finite.
    """
    cache = layer.memory
    if not isinstance(cache, ops.KVCache):
        return layer
    shape = cache.key.shape
    empty = ops.KVCache.zeros(
        shape[0], cache.capacity, shape[1], shape[3], cache.value.shape[3], dtype=cache.key.dtype
    )
    joined, _ = empty.append(**cache.tokens())
    memory = dataclasses.replace(
        joined.newest(cache.capacity), segment=cache.segment, complete=cache.complete
    )
    return dataclasses.replace(layer, memory=memory)


def _read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file.items())
        header = serialize.parse_object(str(arrays.pop(_HEADER)))
        if not isinstance(header["model"], dict) or not {"parameters", "kv_cache"} <= header.keys():
            raise KeyError("a part of the header")
        header.setdefault("format", 1)
        if header["format"] not in (1, _FORMAT):
            raise ValueError("a format of a later version")
        # Earlier versions wrote one bool for all layers, and no capacity without a cache.
        header["capacity"] = header["capacity"] or 1
        # Every array has an axis of rows; those of a KV cache have one of its capacity too.
        if any(not 0 < header[size] < 2**31 for size in ("rows", "capacity")):
            raise ValueError("sizes that no array has")
        return header, arrays
    except (
        ValueError,
        KeyError,
        EOFError,
        AttributeError,
        TypeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ValueError(f"{path} is not a saved state, or is damaged") from error


def _bits(array: np.ndarray) -> np.ndarray:
    """Returns bfloat16, which NumPy files do not support, as uint16 of the same bits; other dtypes unchanged."""
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def _settings(model: models.DecoderLM) -> dict[str, Any]:
    return _as_json(serialize.flatten(model.config, fields.Occasion.SAVED_STATE))


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """Returns settings as they are read from JSON, which has lists instead of tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _checksum(model: models.DecoderLM) -> int:
    total = 0
    for leaf in jax.tree.leaves(nnx.state(model)):
        total = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8), total)
    return total
