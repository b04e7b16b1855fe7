"""State files: an `.npz` of the arrays, the model's settings and a checksum of its parameters."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any

import jax
import numpy as np
from flax import nnx

from sympow_jax import config, layers, models, ops, spelling
from sympow_jax.config import fields, serialize
from sympow_jax.generation import decoding
from sympow_jax.process import atomic

__all__ = ["restore_state", "save_state"]

_HEADER = "header"
# Format 1 had KV caches in order of time, without `next`, with slots before heads and tokens of earlier documents.
_FORMAT = 2
_SLOTS_BEFORE_HEADS = (".memory.key", ".memory.value", ".memory.log_decay")
# Ending of the members of an archive of `np.savez`.
_SUFFIX = ".npy"
# Bytes of the header, which has about 10,000.
_HEADER_BYTES = 1 << 20
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

    The file may come from a stranger: only arrays of the model's sizes are read, and no more bytes than the file has.

    Raises:
        ValueError: the file is not a saved state, or is one of a model with other settings or parameters.
        OSError: the file cannot be read.
    """
    path = pathlib.Path(path)
    serialize.require_file(path)
    with contextlib.ExitStack() as stack:
        with _readable(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            members = _members(archive, path.stat().st_size)
            header = _read_header(archive, members, path.stat().st_size, num_layers=len(model.blocks))
        _require_same_model(path, header, model)
        abstract = jax.eval_shape(
            lambda: model.init_state(
                header["rows"], max_length=header["capacity"], kv_cache=header["kv_cache"]
            )
        )
        leaves, structure = jax.tree_util.tree_flatten_with_path(abstract)
        restored = []
        for name, leaf in leaves:
            dtype, field = _bits(np.empty(0, leaf.dtype)).dtype, jax.tree_util.keystr(name)
            with _readable(path):
                if header["format"] == 1 and field.endswith(".memory.next"):
                    array = np.zeros(leaf.shape, dtype)
                elif header["format"] == 1 and field.endswith(_SLOTS_BEFORE_HEADS):
                    rows, heads, slots, *vector = leaf.shape
                    array = _read(archive, members[field], (rows, slots, heads, *vector), dtype)
                    array = np.ascontiguousarray(np.swapaxes(array, 1, 2))
                else:
                    array = _read(archive, members[field], leaf.shape, dtype)
            restored.append(jax.device_put(array.view(leaf.dtype)))
    state = jax.tree.unflatten(structure, restored)
    if header["format"] == 1:
        state = dataclasses.replace(state, layers=tuple(map(_appended, state.layers)))
    return state


def _appended(layer: layers.AttentionState) -> layers.AttentionState:
    """Returns the state of a layer with the tokens of its KV cache appended to an empty one.

    This drops tokens of earlier documents, and marks those that are not finite.
    """
    cache = layer.memory
    if not isinstance(cache, ops.KVCache):
        return layer
    (rows, heads, capacity, head_dim), value_dim = cache.key.shape, cache.value.shape[-1]
    empty = ops.KVCache.zeros(rows, capacity, heads, head_dim, value_dim, dtype=cache.key.dtype)
    joined, _ = empty.append(**cache.tokens())
    memory = dataclasses.replace(joined.newest(capacity), segment=cache.segment, complete=cache.complete)
    return dataclasses.replace(layer, memory=memory)


def _require_same_model(path: pathlib.Path, header: dict[str, Any], model: models.DecoderLM) -> None:
    own = _settings(model)
    saved = _as_json({name: _DEFAULTS[name] for name in own if name in _DEFAULTS}) | header["model"]
    if saved != own:
        same = {name for name in own.keys() & saved.keys() if own[name] == saved[name]}
        first, *others = sorted({*own, *saved} - same)
        here, there = (spelling.shown(values.get(first, "absent")) for values in (own, saved))
        raise ValueError(
            f"{path} is a state of another model: {spelling.cut(first, 100)} is {there} there and {here} here "
            f"({1 + len(others)} settings differ)"
        )
    if header["parameters"] != _checksum(model):
        raise ValueError(
            f"{path} is a state of another model: its settings are those of this one, its parameters are not"
        )


# Errors of zipfile, of NumPy, of Python's parser for the header of an array, and of this module about the content of a
# file. A RuntimeError is of an archive with a password, or a RecursionError of that parser.
_MALFORMED = (
    ValueError,
    LookupError,
    EOFError,
    RuntimeError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
)


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    """Turns errors about the content of a state file into a ValueError that names it."""
    try:
        yield
    except _MALFORMED as error:
        raise ValueError(f"{path} is not a saved state, or is damaged") from error


def _members(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    """Returns the members of an archive of `size` bytes by the names of their arrays.

    Raises:
        ValueError: they are compressed or share bytes, so that reading them could take more memory than the file has.
    """
    members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("it has compressed arrays")
    if sum(member.file_size for member in members) > size:
        raise ValueError("its arrays have more bytes than the file")
    return {member.filename.removesuffix(_SUFFIX): member for member in members}


def _read_header(
    archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], size: int, *, num_layers: int
) -> dict[str, Any]:
    """Returns the header of a state file of `size` bytes.

    Raises:
        ValueError: it is of another form, or has sizes that no array of the file has.
        KeyError: a part of it is missing.
    """
    if members[_HEADER].file_size > _HEADER_BYTES:
        raise ValueError("its header is too long")
    with archive.open(members[_HEADER]) as stream:
        shape, _, dtype = _npy_header(stream)
        if shape != () or dtype.kind != "U":
            raise ValueError("its header is no text")
        text = stream.read()
    header = serialize.parse_object(str(np.frombuffer(text, dtype)[0]))
    if header.setdefault("format", 1) not in (1, _FORMAT):
        raise ValueError("its format is of a later version")
    # Earlier versions wrote one bool for all layers, and no capacity without a cache.
    header["capacity"] = header["capacity"] or 1
    if not isinstance(header["model"], dict) or "parameters" not in header:
        raise ValueError("a part of its header is missing")
    caches = header["kv_cache"]
    if not isinstance(caches, bool) and not (
        isinstance(caches, list) and len(caches) == num_layers and all(isinstance(x, bool) for x in caches)
    ):
        raise ValueError("its header is of other layers")
    # Every array has an axis of rows; those of a KV cache have one of its capacity too.
    for name in ("rows", "capacity"):
        if type(header[name]) is not int or not 0 < header[name] <= size:
            raise ValueError("sizes that no array of the file has")
    return header


def _read(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Returns the array of a member; raises ValueError if it has another shape or dtype, or is cut."""
    with archive.open(member) as stream:
        if _npy_header(stream) != (shape, False, dtype):
            raise ValueError("an array is not what was saved")
        content = stream.read()
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError("an array is cut")
    return np.frombuffer(content, dtype).reshape(shape)


def _npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Reads shape, order and dtype of an array; `np.savez` writes version 1.0 for all arrays of a state."""
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array is of another version of the format")
    return np.lib.format.read_array_header_1_0(stream)


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
