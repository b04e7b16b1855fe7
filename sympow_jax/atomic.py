"""Atomic replacement of files, which never writes through a symbolic link."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator

__all__ = ["replace"]


@contextlib.contextmanager
def replace(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a path of the same name to write to; the file written there replaces `path` at the end.

    After an error, or in a process that is killed, `path` is unchanged. If `path` is a symbolic link, the link is
    replaced, and its target is unchanged.
    """
    # A new folder instead of a fixed name next to `path`, because a user's file or link may have that name. It is in
    # the same folder, and so on the same file system, as `path`.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
        draft = pathlib.Path(folder, path.name)
        yield draft
        os.replace(draft, path)
