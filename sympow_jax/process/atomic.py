"""Atomic replacement of files, which never writes through a symbolic link."""

import contextlib
import fcntl
import glob
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

# File in a draft folder, on which the process that writes there holds a lock.
_LOCK = ".writing"


@contextlib.contextmanager
def replace(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path of the same name to write to; the file written there replaces `path` at the end.

    After an error, or in a process that is killed, `path` is unchanged. If `path` is a symbolic link, the link is
    replaced, and its target is unchanged.
    """
    with draft_folder(path) as folder:
        draft = folder / path.name
        yield draft
        os.replace(draft, path)


@contextlib.contextmanager
def draft_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new hidden folder next to `path`, to write files that are then moved, and removes it at the end.

    Folders that killed processes left for the same `path` are removed first.
    """
    prefix = f".{path.name}-"
    for lock in path.parent.glob(f"{glob.escape(prefix)}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
    # A new folder instead of a fixed name, because a user's file or link may have that name. It is next to `path`, and
    # so on the same file system.
    with (
        tempfile.TemporaryDirectory(dir=path.parent, prefix=prefix) as folder,
        pathlib.Path(folder, "locked").open("w") as file,
    ):
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Only now does it get its name: without a lock, other processes would take it for that of a killed one.
        os.rename(file.name, pathlib.Path(folder, _LOCK))
        yield pathlib.Path(folder)
