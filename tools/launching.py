"""Training runs in separate processes that start within a second.

A server that has imported the program forks them.
"""

import dataclasses
import multiprocessing
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Sequence

import jax

from sympow_jax import loop
from sympow_jax.commands import launch

# Leftovers of a killed process are removed at the end, and need no warning.
sys.warnoptions.append("ignore:resource_tracker:UserWarning")
_SERVER = multiprocessing.get_context("forkserver")
# Imported here too, but not by the server: it preloads by name, in the folder of the repository.
_SERVER.set_forkserver_preload([loop.__name__])
# The smallest run of configs/text.py: a layer of width 16 on 4 rows of 16 bytes.
SMALLEST = (
    "--config.model.layers=1",
    "--config.model.width=16",
    "--config.model.heads=2",
    "--config.model.attention.kernel=softmax",
    "--config.model.attention.decay=none",
    "--config.model.attention.position=rope",
    "--config.data.context_length=16",
    "--config.data.batch_tokens=64",
    "--config.data.heldout_fraction=0.3",
    "--config.evaluation.context_lengths=()",
)


@dataclasses.dataclass(frozen=True)
class Started:
    """A process of a run and the files of its output."""

    process: multiprocessing.process.BaseProcess
    out: pathlib.Path
    err: pathlib.Path

    def send(self, number: int) -> None:
        """Sends a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self, timeout: float = 120) -> int:
        """Returns the exit code, or minus the signal that ended it; raises TimeoutError if it keeps running."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(f"still running after {timeout} s; it said {self.errors()} {self.said()}")
        return self.process.exitcode

    def said(self) -> list[str]:
        """Returns the lines on stdout so far, except those of XLA's Gloo."""
        return [line for line in self.out.read_text().splitlines() if "[Gloo]" not in line]

    def errors(self) -> list[str]:
        """Returns the lines on stderr so far."""
        return self.err.read_text().splitlines()


def start(
    arguments: Sequence[str],
    folder: pathlib.Path,
    *,
    processes: int = 1,
    devices: int = 1,
    flags: bool = True,
    cache: pathlib.Path | None = None,
    more: Sequence[Sequence[str]] | None = None,
    before_start: Callable[[], None] | Sequence[Callable[[], None] | None] | None = None,
) -> list[Started]:
    """Starts the processes of one run, each with the given number of devices; their output goes to `folder`.

    Compiled programs are kept in the folder `cache`, if any. `flags` tell several processes of each other. `more` has
    arguments for each process. `before_start` is called in each process before it begins; it may also be a list with
    one function per process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    begun = len(list(folder.glob("*.out")))
    launch = [f"--coordinator_address=localhost:{free_port()}", f"--process_count={processes}"]
    started = []
    for index in range(processes):
        out, err = (folder / f"{begun + index}.{kind}" for kind in ("out", "err"))
        out.touch()
        err.touch()
        mine = [*arguments, *(more[index] if more else ())]
        if processes > 1 and flags:
            mine += [*launch, f"--process_id={index}"]
        before = before_start[index] if isinstance(before_start, Sequence) else before_start
        process = _SERVER.Process(target=_run, args=(mine, out, err, devices, cache, before), daemon=True)
        process.start()
        started.append(Started(process, out, err))
    return started


def free_port() -> int:
    """Returns a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], bool], started: Sequence[Started], *, timeout: float = 120) -> None:
    """Waits for the condition while the processes run.

    Raises TimeoutError with their output if it does not become true.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        ended = [one for one in started if one.process.exitcode is not None]
        if ended or time.monotonic() > deadline:
            words = [line for one in ended or started for line in one.errors()[-5:]]
            for one in started:
                one.process.kill()
            raise TimeoutError(f"it did not come to that; the processes said: {' '.join(words)}")
        time.sleep(0.01)


def _run(
    arguments: Sequence[str],
    out: pathlib.Path,
    err: pathlib.Path,
    devices: int,
    cache: pathlib.Path | None,
    before_start: Callable[[], None] | None,
) -> None:
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_compilation_cache", cache is not None)
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if before_start is not None:
        before_start()
    sys.exit(launch.main(arguments))
