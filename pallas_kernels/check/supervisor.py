"""Runs each case of a check in a process of its own, and continues after a failure, a hang or a crash."""

import concurrent.futures
import contextlib
import dataclasses
import enum
import fcntl
import json
import math
import os
import pathlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

RESULT = "check-result "
_OUT_OF_TIME = "not finished: the check ran out of time"
# Maximum number of characters of a process's output in an outcome.
_KEPT_CHARACTERS = 1500
# Environment variable that names the lock file with which processes take turns on the device; unset for one process.
_LOCK = "SYMPOW_DEVICE_LOCK"


# Processes of running cases.
_running: set[subprocess.Popen] = set()


class Status(enum.StrEnum):
    """Status of a finished case."""

    OK = "ok"
    WRONG = "wrong"
    HANG = "hang"
    CRASH = "crash"
    SKIPPED = "skipped"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a case.

    Attributes:
        case: name of the case.
        status: how it ended.
        detail: what went wrong; empty if nothing did.
        seconds: duration of its process.
        result: what the process measured.
    """

    case: str
    status: Status
    detail: str = ""
    seconds: float = 0.0
    result: dict = dataclasses.field(default_factory=dict)

    def line(self) -> str:
        """Returns one line for the terminal."""
        words = [f"{self.status.value:<8}{self.case}"]
        if errors := self.result.get("errors"):
            bounds = self.result["bounds"]
            words.append(
                ", ".join(f"{name} {error:.1e}/{bounds[name]:.1e}" for name, error in errors.items())
            )
        if "call_milliseconds" in self.result:
            kernels = self.result.get("kernels", {})
            named = {name: ms for name, ms in kernels.items() if "power_" in name}
            of_kernels = "".join(f", {name} {ms:.3f}" for name, ms in named.items())
            words.append(f"{self.result['call_milliseconds']:.3f} ms{of_kernels}")
        if self.detail:
            words.append(self.detail.strip().splitlines()[-1][:200])
        return "  ".join(words)


def run_all(
    cases: Sequence[str],
    command: Callable[[str], Sequence[str]],
    *,
    seconds: float,
    deadline: float,
    jobs: int = 1,
) -> Iterator[Outcome]:
    """Runs every case, `jobs` of them at once, and yields outcomes in the order of the cases.

    Args:
        cases: names.
        command: maps a name to the command of its process.
        seconds: time limit of a process.
        deadline: value of `time.monotonic` at which running processes are ended and after which none begins.
        jobs: number of processes at once. They compile at the same time; in `exclusive` they take turns.
    """

    def one(case: str) -> Outcome:
        left = deadline - time.monotonic()
        if left <= 0:
            return Outcome(case=case, status=Status.SKIPPED, detail=_OUT_OF_TIME)
        outcome = run(case, command(case), seconds=min(seconds, left))
        if outcome.status is Status.HANG and left < seconds:
            # The case had less than the full time limit.
            return dataclasses.replace(
                outcome, status=Status.SKIPPED, detail=f"{outcome.detail}\n{_OUT_OF_TIME}"
            )
        return outcome

    with _shared(jobs), concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, case) for case in cases]
        try:
            for future in futures:
                yield future.result()
        except BaseException:
            # Ctrl-C does not reach processes in other sessions, and some may just be starting.
            for future in futures:
                future.cancel()
            while not all(future.done() for future in futures):
                for process in list(_running):
                    _end(process)
                time.sleep(0.05)
            raise


@contextlib.contextmanager
def _shared(jobs: int) -> Iterator[None]:
    """Lets processes started inside share compiled programs and, if `jobs` is above 1, the device.

    Variables that are set already are kept: two programs share the device with the same file in `_LOCK`.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {"JAX_COMPILATION_CACHE_DIR": folder}
        if jobs > 1:
            variables |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", _LOCK: str(pathlib.Path(folder, "lock"))}
        added = {name: value for name, value in variables.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            # Only these: the caller runs between cases, and may set others.
            for name in added:
                os.environ.pop(name, None)


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Holds the device lock, if `run_all` set one. Meanwhile its other processes neither measure nor tune."""
    with _locked(fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def tuning() -> Iterator[None]:
    """Keeps other processes of `run_all` from measuring: XLA tries programs on the device while it compiles."""
    with _locked(fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def _locked(operation: int) -> Iterator[None]:
    if (path := os.environ.get(_LOCK)) is None:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, operation)
        yield


def run(case: str, command: Sequence[str], *, seconds: float) -> Outcome:
    """Runs the process of a case and returns its outcome, judged by what it printed."""
    begin = time.monotonic()
    # The output of a process may not be valid text.
    as_text: dict[str, Any] = {"mode": "w+", "errors": "replace"}
    with tempfile.TemporaryFile(**as_text) as output, tempfile.TemporaryFile(**as_text) as errors:
        # Start a new session, so that `_end` kills the children of the process too.
        process = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        _running.add(process)
        hung = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            hung = True
        finally:
            _end(process)
            _running.discard(process)
        common: dict[str, Any] = {"case": case, "seconds": round(time.monotonic() - begin, 1)}
        output.seek(0)
        errors.seek(0)
        stdout, stderr = output.read(), errors.read()
    if hung:
        detail = f"{stderr[-_KEPT_CHARACTERS:]}\nno result within {seconds:.0f} s"
        return Outcome(status=Status.HANG, detail=detail, **common)
    lines = [line for line in stdout.splitlines() if line.startswith(RESULT)]
    if process.returncode or not lines:
        said = [line for line in stderr.splitlines() if line.strip()] or ["no message"]
        detail = f"{stderr[-_KEPT_CHARACTERS:]}\nexit status {process.returncode}: {said[-1][:300]}"
        return Outcome(status=Status.CRASH, detail=detail, **common)
    return _judged(lines[-1].removeprefix(RESULT), common)


def _judged(line: str, common: dict) -> Outcome:
    try:
        result = json.loads(line)
        errors, bounds, different = result["errors"], result["bounds"], result["different"]
        wrong = [
            f"{name} is off by {error:.1e}, more than {bounds[name]:.1e}"
            for name, error in errors.items()
            if not (math.isfinite(error) and error <= bounds[name])
        ]
        wrong += [f"{name} differs between runs on the same arrays" for name in different]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Outcome(status=Status.CRASH, detail=f"its result cannot be read: {error}", **common)
    if not errors:
        wrong.append("it compared nothing")
    status = Status.WRONG if wrong else Status.OK
    return Outcome(status=status, detail="; ".join(wrong), result=result, **common)


def _end(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
