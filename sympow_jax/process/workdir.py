"""Folder of a run: `config.json`, `environment.json` and `data.json` next to metrics and checkpoints."""

import dataclasses
import datetime
import errno
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

import jax

import sympow_jax
from sympow_jax import config
from sympow_jax.config import fields, loading, serialize
from sympow_jax.process import atomic, hosts, streams

CHECKPOINTS = "checkpoints"
# Name of the folder of a step. `str.isdigit` would also accept digits that `int` does not.
_STEP = re.compile("0|[1-9][0-9]*")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

# File that the training process holds a lock on until it ends.
_LOCK = "lock"
_held: dict[pathlib.Path, IO[str]] = {}
# Seconds until files of process 0 must be visible on other hosts; network file systems cache that a file was missing.
_VISIBLE_SECONDS = 60


def open_workdir(
    workdir: pathlib.Path, settings: config.Config, data: Mapping[str, Any] | None = None
) -> None:
    """Creates the folder, or checks that it belongs to these settings, and writes settings, environment and data.

    As long as the folder has no checkpoint, settings and data may change. The folder is locked, so that only this run
    can train in it until it ends. All processes must call this; the first writes.

    Args:
        workdir: folder of the run.
        settings: config of the run.
        data: description of its data; None for imported weights.

    Raises:
        ValueError: the folder cannot be written, another process trains in it, its `config.json` is not a run's, or it
            holds a run with other settings or data, which the error lists; or settings, data or packages differ between
            processes, or they do not share the folder.
    """
    packages = {"sympow-jax": sympow_jax.__version__}
    packages |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    hosts.check_same("settings or packages", packages | serialize.flatten(settings))
    hosts.check_same("data", data or {})
    with hosts.all_or_none():
        if hosts.is_first():
            _open(workdir, settings, data, packages)
    lock = workdir / _LOCK
    written = hosts.gather(lock.read_text() if hosts.is_first() else "")[0]
    with hosts.all_or_none():
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while not (lock.is_file() and lock.read_text() == written):
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{workdir} on {socket.gethostname()} is not the folder that process 0 writes to; "
                    f"--workdir must be one that all hosts share"
                )
            time.sleep(1)


def _open(
    workdir: pathlib.Path, settings: config.Config, data: Mapping[str, Any] | None, packages: dict[str, str]
) -> None:
    path = workdir / "config.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        resumes = bool(checkpoint_steps(workdir))
        if resumes:
            before = serialize.flatten(read_config(workdir), fields.Occasion.RESUME)
            if changed := serialize.differences(before, serialize.flatten(settings, fields.Occasion.RESUME)):
                raise ValueError(
                    f"{workdir} holds a run with other settings: {changed}; use those it has or another --workdir"
                )
        elif path.exists() and not path.is_symlink():
            try:
                loading.read(path)
            except ValueError as error:  # other programs name their settings `config.json` too
                raise ValueError(
                    f"{path} is not the settings of a run and would be overwritten; use another --workdir"
                ) from error
        _hold(workdir)
        write_json(path, dataclasses.asdict(settings))
        devices = jax.devices()
        environment = {
            "started": _now(),
            "command": shlex.join(sys.argv),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "packages": packages,
            **revision(),
            "backend": devices[0].platform,
            "devices": [device.device_kind for device in devices],
        }
        write_json(workdir / "environment.json", environment)
        if data is None:
            return
        path, data = workdir / "data.json", json.loads(json.dumps(data))
        if resumes and path.exists():
            began = serialize.flatten(serialize.read_object(path))
            if changed := serialize.differences(began, serialize.flatten(data)):
                raise ValueError(
                    f"the data is no longer what the run in {workdir} began with: {changed}; "
                    f"restore it or use another --workdir"
                )
        write_json(path, data)
    except OSError as error:
        raise ValueError(f"cannot write to --workdir {workdir}: {error.strerror or error}") from error


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def read_description(workdir: pathlib.Path) -> dict[str, Any]:
    """Reads the description of the data that a run was trained on; an empty one for imported weights."""
    path = workdir / "data.json"
    return serialize.read_object(path) if path.is_file() else {}


def record_plan(workdir: pathlib.Path, lines: Sequence[str]) -> None:
    """Adds the lines that a run printed at its start to `environment.json`, in the first process."""
    if hosts.is_first():
        path = workdir / "environment.json"
        write_json(path, serialize.read_object(path) | {"plan": list(lines)})


def read_config(workdir: pathlib.Path) -> config.Config:
    """Returns the settings of the run in a folder.

    Raises:
        ValueError: there is no run, or this version does not support its settings.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise ValueError(f"{workdir} is not the workdir of a run: it has no config.json")
    return loading.read(path)


def _hold(workdir: pathlib.Path) -> None:
    path = pathlib.Path(os.path.realpath(workdir), _LOCK)
    if path in _held:
        return
    # Not through a link, whose target would be emptied below. The lock cannot be replaced as other files are, because
    # the process that holds it would not notice.
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "a+")
    try:
        # The operating system releases the lock however the process ends.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(
            f"{workdir} is in use by {file.read().strip() or 'another process'}; wait until it ends, stop it, or use "
            f"another --workdir"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        streams.say(
            f"warning: {workdir} is on a file system without locks; nothing keeps a second run out of it",
            error=True,
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, started {_now()}\n")
    file.flush()
    _held[path] = file


def checkpoint_steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in the folder, good or damaged, in increasing order.

    Ignores files, and folders that a run does not make, such as `007` or `²`.

    Raises:
        OSError: the folder of checkpoints cannot be listed.
        ValueError: as `require_path`.
    """
    require_path("the workdir", workdir)
    try:
        # Not `glob`, for which a folder that must not be read is empty, as if the run had yet to begin.
        paths = list((workdir / CHECKPOINTS).iterdir())
    except FileNotFoundError:
        return []
    # Orbax gives a step its final name only after writing all of it. A link to nowhere counts, because the checkpoint
    # may be on a disk that is not mounted.
    return sorted(int(path.name) for path in paths if _STEP.fullmatch(path.name) and not path.is_file())


def require_path(
    name: str, folder: str | os.PathLike[str], contents: str = "checkpoints", refused: str = "*?[\\"
) -> None:
    """Raises ValueError for a folder whose contents could not be written, or not be found again.

    Orbax takes the path of a checkpoint for a glob, and would save without an error what it does not find later.
    TensorStore needs UTF-8 and takes a backslash for a separator.

    Args:
        name: name of the folder in errors.
        folder: the folder.
        contents: noun for the contents in errors.
        refused: characters that the absolute path must not have.
    """
    path = os.path.abspath(folder)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} is {path!r}, which is not UTF-8; {contents} need a path that is") from None
    if found := sorted(set(path) & set(refused)):
        raise ValueError(
            f"{name} is {path!r}; {contents} need a path without {' and '.join(found)}: rename the folder, or use a "
            f"symbolic link to it"
        )


def revision() -> dict[str, Any]:
    """Returns the commit of the package's own source, and whether its tracked files differ from that."""

    def git(*arguments: str) -> str | None:
        """Returns git's output; None if the source is not a checkout or git is missing."""
        folder = pathlib.Path(__file__).parent
        try:
            done = subprocess.run(
                ["git", "-C", folder, *arguments], capture_output=True, text=True, check=True, timeout=10
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    return {
        "git_revision": git("rev-parse", "HEAD"),
        "git_changed": bool(git("status", "--porcelain", "--untracked-files=no")),
    }


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes the value as JSON, atomically: a run killed here leaves the old file unchanged."""
    with atomic.replace(path) as draft:
        draft.write_text(json_text(value))


def json_text(value: Any) -> str:
    """Returns the text that `write_json` writes."""
    return json.dumps(value, indent=2) + "\n"
