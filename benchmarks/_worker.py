"""Runs comparisons in a process of its own, so that a kernel that crashes or hangs costs its rows and no others.

    python -m benchmarks._worker jax|torch    # comparisons on standard input, events on standard output

A worker reports what it begins and what it has measured. Where it ends or falls silent, the supervisor starts another
without the contender that was at work.
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
# Events are lines of standard output that begin so; libraries print too.
_EVENT = "benchmark-event "
# What begins when the kernels of a call are timed one by one, which is the profiler's work and not a contender's.
_KERNELS = "kernel times"
# What begins when a worker waits for others that time something.
_WAITING = "waiting for the device"
_NO_MEMORY = "out of memory"
# Contenders' errors after which a process can go on; others may leave the device unusable.
_HARMLESS = (NotImplementedError, ImportError, ValueError, TypeError)


class NoDevice(Exception):
    """There is nothing to measure on."""


def serve(
    side: str,
    comparisons: Sequence[Comparison],
    skip: dict[str, str],
    emit: Emit,
    *,
    ceilings: bool,
    smoke: bool = False,
) -> None:
    """Measures comparisons in this process; raises NoDevice where there is nothing to measure on.

    Emits {"machine": ...} and, if asked to measure them, {"ceilings": ...}. Then {"begin": [number, key]} whenever a
    contender is about to run and {"done": number, "rows": [...]} after each comparison. `skip` maps keys to the notes
    that stand in.
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
    # Length and seconds of the last call of a contender, by key; infinite where memory was short.
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
    """Seconds of each kernel; where the device waited for the host, their sum is the time that counts."""
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
    """A contender at all lengths of a shape."""
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
    """The note in place of a time; raises where the process should not go on."""
    text = one_line(error)
    if "RESOURCE_EXHAUSTED" in text or _NO_MEMORY in text:
        return f"{_NO_MEMORY}: {text}"
    if isinstance(error, _HARMLESS) or type(error).__name__ == "WrongResult":
        return text
    raise error


def one_line(error: Exception) -> str:
    """What an error says in a line."""
    text = (str(error).strip().splitlines() or [""])[0][:200]
    # What is missing and what is wrong says its message; of other errors the kind says more.
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
    """Measures comparisons in workers started by `command`; emits the events of `serve` but for `begin`.

    The first worker measures the device's ceilings if `ceilings` says so: it needs gigabytes, which it keeps. A worker
    that emits nothing for `silence` seconds is ended. Comparisons that are not measured at `deadline`, a value of
    `time.monotonic`, get rows that say so. Raises NoDevice where the worker does.
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
            # Nobody to blame: a worker that cannot start will not start the next time either.
            for number, comparison in enumerate(pending):
                emit({"done": number, "rows": _without_times(comparison, f"not measured: {ended}")})
            return
        skip[working] = f"its process ended: {ended}"


def row(comparison: Comparison, name: str) -> dict:
    """The row of a contender, without results."""
    return {"part": comparison.part, "contender": name, **dataclasses.asdict(comparison.shape)}


def _without_times(comparison, note):
    return [row(comparison, name) | {"note": note} for name in comparison.contenders]


def events(command: Sequence[str], task: dict, *, silence: float, deadline: float) -> Iterator[dict]:
    """What a worker that is given a task on standard input says by `say`, and {"ended": why} behind it.

    It is ended when it says nothing for `silence` seconds, and at `deadline`, a value of `time.monotonic`.
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
    """Tells the supervisor."""
    print(_EVENT + json.dumps(event), flush=True)


def main() -> None:
    """Serves what standard input asks for."""
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
