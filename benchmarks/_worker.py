"""Runs comparisons in a separate process, so that a kernel that crashes or hangs loses only its own rows.

    python -m benchmarks._worker jax|torch    # comparisons on standard input, events on standard output

A worker reports what it starts and what it has measured. If it ends or stops reporting, the supervisor starts another
worker that skips the contender that was running.
"""

import dataclasses
import json
import pathlib
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from benchmarks import _timing
from benchmarks._shapes import CONTENDERS, Comparison, Shape

__all__ = ["NoDevice", "events", "one_line", "row", "say", "serve", "supervise"]

Emit = Callable[[dict], None]

# A call that is predicted to take longer is not timed.
LONGEST_CALL = 5.0
# Events are the lines of standard output with this prefix; libraries print there too.
_EVENT = "benchmark-event "
# The key of a "begin" event while kernels are timed one by one; the profiler is at work then, not a contender.
_KERNELS = "kernel times"
# The key of a "begin" event while a worker waits for others that hold the device.
_WAITING = "waiting for the device"
_NO_MEMORY = "out of memory"
# Errors after which the process can continue; other errors may leave the device unusable.
_HARMLESS = (NotImplementedError, ImportError, ValueError, TypeError)


class NoDevice(Exception):
    """Raised when there is no device to measure on."""


def serve(
    side: str,
    comparisons: Sequence[Comparison],
    skip: dict[str, str],
    emit: Emit,
    *,
    ceilings: bool,
    smoke: bool = False,
) -> None:
    """Measures comparisons in this process; raises NoDevice if there is no device to measure on.

    Emits {"machine": ...} and, if `ceilings` is set, {"ceilings": ...}. Then emits {"begin": [number, key]} before a
    contender runs and {"done": number, "rows": [...]} after each comparison. `skip` maps keys of contenders that must
    not run to the notes that replace their results.
    """
    if side == "jax":
        from benchmarks import _contenders as contenders
    else:
        from benchmarks import _peers as contenders  # type: ignore[no-redef]
    try:
        found = contenders.machine()
    except (RuntimeError, AssertionError) as error:
        raise NoDevice(one_line(error)) from error
    if side == "jax" and found["platform"] != "gpu" and not smoke:
        raise NoDevice(f"JAX sees no GPU here, only {found['device']}")
    emit({"machine": found})
    if ceilings:
        emit({"ceilings": contenders.ceilings(smoke)})
    # Length and seconds of the last call of a contender, by key; the seconds are infinite if it ran out of memory.
    history: dict[str, tuple[int, float]] = {}
    for number, comparison in enumerate(comparisons):
        rows = _compare(contenders, comparison, number, skip, history, emit)
        emit({"done": number, "rows": rows})


def _compare(contenders, comparison, number, skip, history, emit):
    shape, prepared, notes = comparison.shape, {}, {}
    for name in comparison.contenders:
        key = _key(name, shape)
        note = skip.get(key) or _too_long(name, shape, history.get(key))
        if note is None:
            emit({"begin": [number, key]})
            try:
                prepared[name] = contenders.prepare(name, shape)
            except Exception as error:
                note = _note(error)
                if note.startswith(_NO_MEMORY):
                    history[key] = shape.time, float("inf")
        if note is not None:
            notes[name] = note
    samplers = {name: contender.sample for name, contender in prepared.items()}
    emit({"begin": [number, _WAITING]})
    with _timing.exclusive():
        taken = _timing.in_turn(samplers, announce=lambda name: emit({"begin": [number, _key(name, shape)]}))
    rows = []
    for name in comparison.contenders:
        measured = row(comparison, name)
        if name in notes:
            measured["note"] = notes[name]
        else:
            measured |= _measured(prepared[name], taken[name])
            if _KERNELS not in skip:
                emit({"begin": [number, _KERNELS]})
                with _timing.exclusive():
                    measured |= _by_kernel(prepared[name], measured["host_bound"])
            if measured["host_bound"]:
                measured["note"] = "the host was slower: " + (
                    "kernels' sum" if "kernels" in measured else "with its time"
                )
            history[_key(name, shape)] = shape.time, measured["queued_seconds"] * prepared[name].steps
        rows.append(measured)
    return rows


def _measured(prepared, samples):
    taken = [sample.seconds / prepared.steps for sample in samples]
    queued = statistics.median(taken)
    return {
        "queued_seconds": queued,
        "seconds": queued,
        "spread": _timing.spread(taken),
        "host_bound": sum(sample.host_bound for sample in samples) * 2 > len(samples),
        "error": prepared.error,
        "memory": prepared.memory,
    }


def _by_kernel(prepared, host_bound):
    """Returns the seconds of each kernel; if the device waited for the host, their sum replaces the measured time."""
    try:
        kernels = prepared.kernels()
    except Exception as error:
        return {"kernels_note": one_line(error)}
    if not kernels:
        return {}
    kernels = {name: seconds / prepared.steps for name, seconds in kernels.items()}
    total = sum(kernels.values())
    return {"kernels": kernels, "kernel_seconds": total} | ({"seconds": total} if host_bound else {})


def _key(name: str, shape: Shape) -> str:
    """Returns a key that identifies a contender and a shape except for its length."""
    sizes = dataclasses.asdict(shape)
    return " ".join([name, *(str(size) for field, size in sizes.items() if field != "time")])


def _too_long(name, shape, before):
    if before is None or shape.mode == "step":
        return None
    time_before, seconds = before
    if shape.time <= time_before:
        return None
    if seconds == float("inf"):
        return f"{_NO_MEMORY} at T = {time_before:,} already"
    growth = shape.time / time_before
    predicted = seconds * (growth**2 if CONTENDERS[name] == "attention" else growth)
    if predicted <= LONGEST_CALL:
        return None
    return f"not timed: {predicted:.0f} s a call predicted from T = {time_before:,}"


def _note(error: Exception) -> str:
    """Returns the note that replaces a time; raises the error if the process must not continue."""
    text = one_line(error)
    if "RESOURCE_EXHAUSTED" in text or _NO_MEMORY in text:
        return f"{_NO_MEMORY}: {text}"
    if isinstance(error, _HARMLESS) or type(error).__name__ == "WrongResult":
        return text
    raise error


def one_line(error: Exception) -> str:
    """Returns an error as one line."""
    text = (str(error).strip().splitlines() or [""])[0][:200]
    # These two kinds of errors have messages that explain themselves; others need their type's name.
    told = isinstance(error, NotImplementedError) or type(error).__name__ == "WrongResult"
    return text if told and text else f"{type(error).__name__}: {text}"


def supervise(
    command: Sequence[str],
    comparisons: Sequence[Comparison],
    emit: Emit,
    *,
    silence: float,
    deadline: float,
    ceilings: bool = True,
) -> None:
    """Measures comparisons in workers started by `command`; emits the events of `serve` except `begin`.

    If `ceilings` is set, only the first worker measures the device's ceilings, because that takes gigabytes which the
    process does not release. A worker that emits nothing for `silence` seconds is killed. Comparisons that are not
    measured by `deadline`, a value of `time.monotonic`, get rows with a note. Raises NoDevice if the worker does.
    """
    pending = list(comparisons)
    skip: dict[str, str] = {}
    while pending:
        working, ended, finished = None, None, 0
        task = {
            "comparisons": [dataclasses.asdict(comparison) for comparison in pending],
            "skip": skip,
            "ceilings": ceilings,
        }
        ceilings = False
        for event in events(command, task, silence=silence, deadline=deadline):
            if "begin" in event:
                working = event["begin"][1]
            elif "done" in event:
                finished, working = event["done"] + 1, None
                emit(event)
            elif "ended" in event or "failed" in event:
                ended = ended or event.get("failed") or event.get("ended")
            elif "no_device" in event:
                raise NoDevice(event["no_device"])
            else:
                emit(event)
        pending = pending[finished:]
        if not pending:
            return
        if time.monotonic() > deadline or working is None or working in skip:
            # No contender caused this: a worker that cannot start would not start the next time either.
            for number, comparison in enumerate(pending):
                emit({"done": number, "rows": _without_times(comparison, f"not measured: {ended}")})
            return
        skip[working] = f"its process ended: {ended}"


def row(comparison: Comparison, name: str) -> dict:
    """Returns the row of a contender without results."""
    return {"part": comparison.part, "contender": name, **dataclasses.asdict(comparison.shape)}


def _without_times(comparison, note):
    return [row(comparison, name) | {"note": note} for name in comparison.contenders]


def events(command: Sequence[str], task: dict, *, silence: float, deadline: float) -> Iterator[dict]:
    """Starts a worker with a task on standard input and yields the events it sends, then {"ended": why}.

    The worker is killed when it sends nothing for `silence` seconds, and at `deadline`, a value of `time.monotonic`.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=pathlib.Path(__file__).parents[1],
        )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(process, json.dumps(task), lines), daemon=True).start()
        try:
            while (line := lines.get(timeout=max(min(silence, deadline - time.monotonic()), 0))) is not None:
                if line.startswith(_EVENT):
                    yield json.loads(line.removeprefix(_EVENT))
            code = process.wait()
            errors.seek(0)
            written = [line for line in errors.read().splitlines() if line.strip()]
            why = f"status {code}: {written[-1][:300] if written else 'no message'}"
        except queue.Empty:
            over = time.monotonic() >= deadline
            why = "the time was over" if over else f"no sign of life for {silence:.0f} s"
        finally:
            process.kill()
            process.wait()
        yield {"ended": why}


def _read(process, task, lines):
    try:
        process.stdin.write(task)
        process.stdin.close()
        for line in process.stdout:
            lines.put(line)
    except (BrokenPipeError, ValueError):  # the worker has ended
        pass
    lines.put(None)


def say(event: dict) -> None:
    """Sends an event to the supervisor."""
    print(_EVENT + json.dumps(event), flush=True)


def main() -> None:
    """Reads a task from standard input and serves it."""
    task = json.load(sys.stdin)
    comparisons = [
        Comparison(**(given | {"shape": Shape(**given["shape"]), "contenders": tuple(given["contenders"])}))
        for given in task["comparisons"]
    ]

    try:
        serve(sys.argv[1], comparisons, task["skip"], say, ceilings=task["ceilings"])
    except NoDevice as error:
        say({"no_device": str(error)})
    except Exception as error:
        say({"failed": one_line(error)})
        raise


if __name__ == "__main__":
    main()
