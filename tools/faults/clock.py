"""A system clock that can be stepped, for the processes of runs alone.

A library that is loaded before others (`clock.c`) adds an offset to what the system says. The server that forks the
runs loads it, so `install` comes before the first of them.
"""

import contextlib
import mmap
import os
import pathlib
import shutil
import struct
import subprocess
from collections.abc import Iterator

_FILE = "CLOCK_OFFSET_FILE"
_SIZE = 8


class Clock:
    """The offset of the clock of all runs."""

    def __init__(self, offset: mmap.mmap):
        self._offset = offset

    def step(self, seconds: float) -> None:
        """Sets the clock to the true time plus `seconds`."""
        self._offset[:_SIZE] = struct.pack("=q", round(seconds * 1e6))


def permitted() -> bool:
    """Returns whether there is a C compiler."""
    return shutil.which("cc") is not None


def install(folder: pathlib.Path) -> None:
    """Compiles the library into a folder and has later processes load it."""
    library, offset = folder / "clock.so", folder / "clock_offset"
    source = pathlib.Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    offset.write_bytes(bytes(_SIZE))
    os.environ |= {_FILE: str(offset), "LD_PRELOAD": str(library)}


@contextlib.contextmanager
def stepped() -> Iterator[Clock]:
    """Yields the clock, which is true again at the end."""
    with open(os.environ[_FILE], "r+b") as file, mmap.mmap(file.fileno(), _SIZE) as offset:
        clock = Clock(offset)
        try:
            yield clock
        finally:
            clock.step(0)
