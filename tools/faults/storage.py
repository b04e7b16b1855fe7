"""Faults of files: damage, absence and a full disk."""

import functools
import os
import pathlib
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorstore

from sympow_jax.data import prepare
from sympow_jax.data.sources import zarr
from tools import launching
from tools.faults.stage import (
    PATIENCE,
    Reason,
    Stage,
    check_error,
    check_same,
    check_success,
    steps,
    tried,
)

# Words of the errors of a run whose disk is full, of which each has one.
_FULL = ("could not be saved", "cannot write", "No space left", "File too large")


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files below a folder that have a byte to damage."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def _truncate(stage: Stage, path: pathlib.Path) -> None:
    os.truncate(path, stage.random.randrange(path.stat().st_size))


def _flip(stage: Stage, path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[stage.random.randrange(len(content))] ^= 1 << stage.random.randrange(8)
    path.write_bytes(content)


Damage = Callable[[Stage, pathlib.Path], None]


def _damaged_checkpoints(damage: Damage, stage: Stage, tries: int) -> Iterator[Reason]:
    """Damages one file of the newest checkpoint; the run must end like an undisturbed one.

    If it notices the damage, it quarantines the checkpoint and resumes from the one before. Otherwise, the damage was
    not in the state, and it resumes from the newest.
    """
    before = stage.undisturbed(training__steps=20, training__checkpoint_every=5)
    # More steps, so that damage to the state of the optimizer changes the parameters.
    options = {"training__steps": 25, "training__checkpoint_every": 5}
    expected = stage.undisturbed(**options)
    files = _files(before / "checkpoints" / "20")

    def attempt(number: int) -> None:
        file = files[number % len(files)].relative_to(before)
        run = stage.new("damaged")
        shutil.copytree(before, run, dirs_exist_ok=True)
        damage(stage, run / file)
        started = stage.start(run, **options)
        started[0].wait(PATIENCE)
        noticed = (run / "damaged_checkpoints" / "20").is_dir()
        check_success(started, resumes_at=15 if noticed else 20)
        check_same(run, expected, after=f"{file}, {'noticed' if noticed else 'not noticed'}")

    return (tried(attempt, number) for number in range(tries))


truncated_checkpoints = functools.partial(_damaged_checkpoints, _truncate)
flipped_checkpoints = functools.partial(_damaged_checkpoints, _flip)


def _damaged_data(damage: Damage, stage: Stage, tries: int) -> Iterator[Reason]:
    """Damages a file of prepared data, each in turn.

    The run is not affected, or ends with one line and resumes once the file is good again.
    """
    # The corpus in both formats: the files' folders, with the settings that read them.
    flat, rows = stage.new("bin") / "train.bin", stage.new("zarr") / "train.zarr"
    prepare.write_bin(str(flat), [str(stage.corpus)])
    prepare.write_longcrawl64(str(rows), [str(stage.corpus)], row_tokens=64)
    common: dict[str, Any] = {"data__document_separator": 0, "training__checkpoint_every": 5}
    sources = {
        flat: {"data__source": "tokens"},
        rows: {"data__source": "longcrawl64", "data__packing": "windows"},
    }
    cases = []
    for folder, source in sources.items():
        options = common | source | {"data__paths": folder}
        half = stage.undisturbed(training__steps=10, **options)
        expected = stage.undisturbed(training__steps=20, **options)
        cases += [(path, half, expected, options) for path in _files(folder)]

    def attempt(number: int) -> None:
        path, half, expected, options = cases[number % len(cases)]
        run, good = stage.new("damaged"), path.read_bytes()
        shutil.copytree(half, run, dirs_exist_ok=True)
        try:
            damage(stage, path)
            (one,) = stage.start(run, training__steps=20, **options)
            code = one.wait(PATIENCE)
        finally:
            path.write_bytes(good)
        if code != 0:
            check_error(one, str(options["data__paths"]), "the data is no longer what the run")
            stage.finish(run, training__steps=20, resumes_at=steps(run)[-1], **options)
        check_same(run, expected, after=f"{path.name}, not noticed")

    return (tried(attempt, number) for number in range(tries))


truncated_data = functools.partial(_damaged_data, _truncate)
flipped_data = functools.partial(_damaged_data, _flip)


def vanishing_chunks(stage: Stage, tries: int) -> Iterator[Reason]:
    """Removes chunks of a Zarr array while a run reads it, and restores them."""
    array = stage.folder / "array"
    values = np.random.default_rng(0).integers(1, 256, (2048, 64)).astype(np.uint16)
    metadata = zarr.metadata(2048, 64, values.dtype) | {"chunks": [8, 64]}
    spec = {**zarr.spec(str(array)), "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(values).result()
    options: dict[str, Any] = {
        "training__steps": 100,
        "training__checkpoint_every": 10,
        "data__source": "longcrawl64",
        "data__paths": array,
        "data__document_separator": 0,
        "data__packing": "windows",
    }
    expected = stage.undisturbed(**options)

    def attempt() -> None:
        run, away = stage.new("vanished"), stage.new("away")
        started = stage.start(run, **options)
        launching.wait_until(lambda: bool(steps(run)), started)
        try:
            for chunk in array.glob("[0-9]*"):
                chunk.rename(away / chunk.name)
            started[0].wait(PATIENCE)
        finally:
            # The next try reads the same array.
            for chunk in away.iterdir():
                chunk.rename(array / chunk.name)
        check_error(started[0], "cannot be read")
        stage.finish(run, **options)
        check_same(run, expected)

    return (tried(attempt) for _ in range(tries))


def full_disk(stage: Stage, tries: int) -> Iterator[Reason]:
    """Limits the size of the files that a resumed run writes, as a full disk does, and then resumes without a limit."""
    options = {"training__steps": 60, "training__checkpoint_every": 10}
    expected = stage.undisturbed(**options)

    def attempt() -> None:
        run = stage.new("full")
        stage.finish(run, **(options | {"training__steps": 20}))
        limit = functools.partial(_limit_files, stage.random.randrange(1 << 12, 1 << 16))
        (limited,) = stage.start(run, before_start=limit, **options)
        check_error(limited, *_FULL)
        stage.finish(run, resumes_at=steps(run)[-1], **options)
        check_same(run, expected)

    return (tried(attempt) for _ in range(tries))


def _limit_files(size: int) -> None:
    """Limits each file that this process writes to `size` bytes."""
    # Ignored, so that a write fails with EFBIG instead of ending the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
