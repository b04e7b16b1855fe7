"""Fault injection for training runs: `python -m tools.faults [--brief] [--results=DIR] [--out=FILE.md]`.

Disturbs runs of a tiny model in every way of the table, then resumes them with the same command. A run survives if it
ends with the losses and parameters of an undisturbed run, bitwise unless the table states a tolerance. It must also
have resumed from the newest checkpoint, and have reported the fault in one line.

All of it takes hours. With `--results`, each fault has a file of its tries there, and what is done is not repeated: the
same command resumes, several with a different `--only` may run at a time, and `--out` writes the table of all.

The exit code is 1 if any run does not survive.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax

from tools import small_disk
from tools.faults import clock, moves, signals, storage
from tools.faults.stage import Reason, Stage


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        inject: yields a reason for each of a range of tries.
        tries: number of tries.
        brief: number of tries of `--brief`.
        possible: returns whether this system permits the fault.
    """

    inject: Callable[[Stage, range], Iterator[Reason]]
    tries: int
    brief: int
    possible: Callable[[], bool] = lambda: True


FAULTS: Mapping[str, Fault] = {
    "SIGKILL at a random instant": Fault(signals.kills_anywhere, 400, 4),
    "SIGKILL while a checkpoint is written": Fault(signals.kills_in_saves, 100, 4),
    "SIGTERM": Fault(signals.terminations, 50, 1),
    "one of two processes killed": Fault(signals.one_of_two, 20, 1),
    "one of four processes killed": Fault(signals.one_of_four, 20, 0),
    "second run in the same workdir": Fault(signals.two_runs, 10, 1),
    "clock stepped, up to a minute from the true time": Fault(signals.wrong_clock, 10, 0, clock.permitted),
    "disk full at a random byte": Fault(storage.full_disk, 20, 1),
    "file system becomes read-only": Fault(storage.read_only, 10, 0, small_disk.permitted),
    "file system vanishes": Fault(storage.vanishing, 10, 0, small_disk.permitted),
    "checkpoint file truncated": Fault(storage.truncated_checkpoints, 50, 2),
    "one bit of a checkpoint flipped": Fault(storage.flipped_checkpoints, 50, 2),
    "file of prepared data truncated": Fault(storage.truncated_data, 50, 1),
    "one bit of prepared data flipped": Fault(storage.flipped_data, 50, 1),
    "data shard vanishes and comes back": Fault(storage.vanishing_chunks, 2, 1),
    "8 devices, then 4, 1, 2 and 8, by each axis (losses within 1e-5)": Fault(moves.devices, 4, 0),
    "8 processes, then 4, 1, 2 and 8, by each axis (losses within 1e-5)": Fault(moves.processes, 4, 0),
}


class Record:
    """Tries of a fault so far, in a file.

    Attributes:
        reasons: why each was not survived, or None.
        seconds: time that they took.
        half_written: number of them after which a checkpoint was half written.
    """

    def __init__(self, folder: pathlib.Path, fault: str):
        self._path = folder / f"{re.sub('[^a-z0-9]+', '_', fault.lower()).strip('_')}.json"
        values = json.loads(self._path.read_text()) if self._path.exists() else {}
        self.reasons: list[Reason] = values.get("reasons", [])
        self.seconds: float = values.get("seconds", 0.0)
        self.half_written: int = values.get("half_written", 0)

    def write(self) -> None:
        """Writes the file."""
        values = {"reasons": self.reasons, "seconds": self.seconds, "half_written": self.half_written}
        self._path.write_text(json.dumps(values, indent=1) + "\n")

    def row(self, fault: str) -> str:
        """Returns the row of the table."""
        tries, good = len(self.reasons), self.reasons.count(None)
        return f"| {fault} | {tries} | {good} | {self.seconds:.0f} |"


def _inject(fault: str, tries: int, folder: pathlib.Path, seed: int) -> Record:
    """Injects a fault until it has been tried so often; returns its record."""
    record = Record(folder, fault)
    done = len(record.reasons)
    if done >= tries:
        return record
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as place:
        stage = Stage(pathlib.Path(place), cache, f"{seed} {fault} {done}")
        before, began = record.seconds, time.monotonic()
        for reason in FAULTS[fault].inject(stage, range(done, tries)):
            record.reasons.append(reason)
            record.seconds = before + time.monotonic() - began
            record.half_written += stage.half_written
            stage.half_written = 0
            record.write()
            if reason:
                print(f"  not survived: {reason}", file=sys.stderr, flush=True)
    return record


_HEAD = ("| fault | tries | survived | seconds |", "|---|---|---|---|")


def _page(records: Mapping[str, Record], command: str) -> str:
    summary = (__doc__ or "").split("\n\n")[1].replace("\n", " ")
    disk = "tmpfs" if small_disk.permitted() else "RLIMIT_FSIZE"
    versions = f"disk {disk}, jax {jax.__version__}, python {platform.python_version()}"
    made = f"Made by `{command}` ({versions}, cpus {os.cpu_count()})."
    half = sum(record.half_written for record in records.values())
    written = f"After {half} of the SIGKILLs a checkpoint was half written."
    table = [*_HEAD, *(record.row(fault) for fault, record in records.items())]
    return "\n".join(["# Faults", "", summary, "", made, "", *table, "", written, ""])


def main(arguments: Sequence[str]) -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--brief", action="store_true", help="a few tries of each, in minutes")
    parser.add_argument("--tries", type=int, help="at most so many of each")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument(
        "--results", type=pathlib.Path, help="folder of the tries so far, which are not repeated"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="also write the table of all faults to this Markdown file"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    options = parser.parse_args(arguments)

    with contextlib.ExitStack() as stack:
        temporary = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        folder: pathlib.Path = options.results or temporary
        folder.mkdir(parents=True, exist_ok=True)
        if clock.permitted():
            clock.install(temporary)
        print("\n".join(_HEAD), flush=True)
        for name, fault in FAULTS.items():
            tries = fault.brief if options.brief else fault.tries
            tries = tries if options.tries is None else min(tries, options.tries)
            if options.only in name and tries and fault.possible():
                print(_inject(name, tries, folder, options.seed).row(name), flush=True)
        records = {name: Record(folder, name) for name in FAULTS}
    records = {name: record for name, record in records.items() if record.reasons}
    if options.out:
        options.out.write_text(_page(records, f"python -m tools.faults {' '.join(arguments)}"))
    return int(any(reason for record in records.values() for reason in record.reasons))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
