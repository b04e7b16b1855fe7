"""Files as bytes, one document per file; by default the Python interpreter's standard library.

The end of a file that is the only one is held out, if no other files are.
"""

import sysconfig
from typing import Any

import numpy as np
from jaxtyping import Int64

from sympow_jax import config as config_lib
from sympow_jax.data import documents, files

__all__ = ["describe", "locations", "open_documents"]

# Documents that the end of an only file is cut into, if each has at least a training context of bytes.
_PIECES = 20
# Third-party packages differ between environments; the standard library of a Python release does not.
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")


def _find(setting: str, paths: tuple[str, ...]) -> list[files.File]:
    if paths:
        matches = files.find(setting, paths)
    else:
        root = sysconfig.get_paths()["stdlib"]
        matches = files.below(root, suffix=".py", skip=_PACKAGE_FOLDERS)
        if not matches:
            raise ValueError(f"the standard library has no .py files in {root}; name files in data.paths")
    if not any(file.size for file in matches):
        raise ValueError(f"{setting}: every file is empty ({len(matches)} found); name files that hold text")
    return matches


def locations(setting: str, paths: tuple[str, ...], config: config_lib.DataConfig) -> set[str]:
    """Returns the real path of each file that the setting names."""
    return {location for location, _ in files.located(_find(setting, paths))}


def _sides(config: config_lib.DataConfig) -> tuple[list[files.File], list[files.File]]:
    """Returns the training and the held-out files, in order, without empty files and those that are too short."""
    shortest = config.shortest_document
    matches = [file for file in _find("data.paths", config.paths) if file.size >= shortest]
    if config.heldout_paths:
        heldout = [
            file for file in _find("data.heldout_paths", config.heldout_paths) if file.size >= shortest
        ]
        return matches, heldout
    mask = files.held_out(files.key_hashes([file.key for file in matches]), config.heldout_fraction)
    return [f for f, out in zip(matches, mask) if not out], [f for f, out in zip(matches, mask) if out]


def _is_cut(config: config_lib.DataConfig, sides: tuple[list[files.File], list[files.File]]) -> bool:
    """Returns whether the end of the only file is held out."""
    return not config.heldout_paths and len(sides[0]) == 1 and not sides[1] and config.heldout_fraction > 0


def _cut(
    config: config_lib.DataConfig, size: int, *, heldout: bool
) -> tuple[Int64[np.ndarray, " documents"], Int64[np.ndarray, " documents"]]:
    """Returns starts and lengths of the documents on one side of a file of `size` bytes."""
    tail = int(size * config.heldout_fraction)
    pieces = min(_PIECES, max(1, tail // config.context_length)) if tail else 0
    bounds = (
        np.linspace(size - tail, size, pieces + 1).astype(np.int64) if heldout else np.array([0, size - tail])
    )
    return bounds[:-1], np.diff(bounds)


def _bytes(file: files.File) -> bytes:
    try:
        return file.path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file.path}: {error.strerror}") from error


def open_documents(config: config_lib.DataConfig, *, heldout: bool) -> documents.Spans:
    """Returns the training or the held-out files as documents of bytes.

    All bytes are held in memory. For a corpus larger than memory, prepare a `.bin` file.

    Raises:
        ValueError: nothing matches, everything is empty, or a file cannot be read.
    """
    sides = _sides(config)
    if _is_cut(config, sides):
        (file,) = sides[0]
        array = np.frombuffer(_bytes(file), np.uint8)
        starts, lengths = _cut(config, len(array), heldout=heldout)
        return documents.Spans(
            [array], [str(file.path)], array=np.zeros_like(starts), starts=starts, lengths=lengths
        )
    chosen = sides[heldout]
    arrays = [np.frombuffer(_bytes(file), np.uint8) for file in chosen]
    return documents.Spans(
        arrays,
        [str(file.path) for file in chosen],
        array=np.arange(len(chosen)),
        starts=np.zeros(len(chosen), np.int64),
        lengths=np.array([len(array) for array in arrays], np.int64),
    )


def describe(config: config_lib.DataConfig) -> dict[str, Any]:
    """Returns counts of files and bytes, and the SHA-256 of every file's key, size and bytes in order."""
    sides = _sides(config)
    counts = [(len(side), sum(file.size for file in side)) for side in sides]
    number, size = counts[0][0] + counts[1][0], counts[0][1] + counts[1][1]
    note = {}
    if _is_cut(config, sides):
        cuts = (_cut(config, size, heldout=heldout)[1] for heldout in (False, True))
        counts = [(len(lengths), int(lengths.sum())) for lengths in cuts]
        note = {"heldout_note": "the end of the only file"}
    return {
        "files": number,
        "bytes": size,
        "documents": counts[0][0],
        "tokens": counts[0][1],
        "heldout_documents": counts[1][0],
        "heldout_tokens": counts[1][1],
        **note,
        "digest": files.digest([*sides[0], *sides[1]], lambda file: [_bytes(file)]),
        "digest_of": "names, sizes and contents",
    }
