"""A disk of a few MiB that can be filled: a tmpfs in a user namespace, which needs no privileges."""

import contextlib
import dataclasses
import errno
import functools
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator

_BALLAST = "ballast"


@dataclasses.dataclass(frozen=True)
class SmallDisk:
    """Mounted disk: `path` for processes that called `enter`, `seen` for all others."""

    path: pathlib.Path
    seen: pathlib.Path
    enter: Callable[[], None]

    def fill(self, *, left: int) -> None:
        """Fills the disk except for `left` bytes, rounded down to pages, or entirely if others write meanwhile."""
        with (self.seen / _BALLAST).open("wb", buffering=0) as file:
            try:
                stats = os.statvfs(self.seen)
                file.write(bytes(max(0, stats.f_bavail * stats.f_frsize - left)))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free(self) -> None:
        """Frees the space again."""
        (self.seen / _BALLAST).unlink()


def permitted() -> bool:
    """Returns whether this system lets users mount in a namespace of their own."""
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/tmp"]
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(mount, capture_output=True, check=False).returncode == 0
    return False


@contextlib.contextmanager
def mounted(path: pathlib.Path, *, mebibytes: int) -> Iterator[SmallDisk]:
    """Mounts a disk at the folder `path`."""
    mount = 'mount -t tmpfs -o size="$2" none "$1" && echo && exec sleep infinity'
    with subprocess.Popen(
        ["unshare", "-rm", "sh", "-c", mount, "sh", path, f"{mebibytes}m"], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"\n"
            seen = pathlib.Path(f"/proc/{holder.pid}/root{path}")
            yield SmallDisk(path, seen, functools.partial(_enter, holder.pid))
        finally:
            holder.kill()


def _enter(pid: int) -> None:
    folder = os.getcwd()
    kinds = (("user", os.CLONE_NEWUSER), ("mnt", os.CLONE_NEWNS))
    files = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name, _ in kinds]
    for file, (_, kind) in zip(files, kinds):
        os.setns(file, kind)
    os.chdir(folder)
