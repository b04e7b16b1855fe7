"""Faults of processes: they are killed, told to stop, started twice, or their clock is wrong."""

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sympow_jax.process import signals
from tools import launching
from tools.faults import clock
from tools.faults.stage import (
    PATIENCE,
    NotSurvived,
    Reason,
    Stage,
    check_error,
    check_same,
    check_success,
    losses,
    resumed_at,
    steps,
    tried,
)

# SIGKILLs of one run, which is then resumed to its end and compared.
_KILLS = 8
# JAX's words when it aborts a process because another has died.
_ABORTS = "another task died"
# Seconds for the moment of a SIGKILL to come.
_PROGRESS = 120
# Largest offset of the clock from the true time, in seconds. A wait until a time of day may take this much longer.
_OFFSET = 60.0


def _kills(
    stage: Stage, tries: int, name: str, moment: Callable[[pathlib.Path, list[launching.Started]], None]
) -> Iterator[Reason]:
    """Sends SIGKILL when `moment` returns, several times to a run, which is then resumed to its end."""
    options = {"training__steps": 150, "training__checkpoint_every": 5}
    expected = stage.undisturbed(**options)
    while tries:
        run = stage.new(name)
        reasons: list[Reason] = []
        ended = False
        while not ended and len(reasons) < min(tries, _KILLS):
            # Before the start, because a checkpoint that it takes for damaged is moved away.
            newest = max(steps(run), default=0)
            (one,) = started = stage.start(run, **options)
            wrong = []
            try:
                moment(run, started)
            except TimeoutError:  # it was killed, unless it had ended before its moment
                if one.wait() == -signal.SIGKILL:
                    wrong.append(f"no progress within {_PROGRESS} s")
            before = steps(run)
            one.process.kill()
            code, kept, began = one.wait(), steps(run), resumed_at(one)
            ended = code == 0
            if began not in (None, newest):
                wrong.append(f"it resumed from step {began} instead of {newest}")
            # The newest checkpoints are kept; one older checkpoint may be deleted, as it would be without a kill.
            if max(kept, default=0) < max([newest, *before]) or len(set(before) - set(kept)) > 1:
                wrong.append(f"it had {before}, and before its start {newest}, kept {kept}")
            if code not in (0, -signal.SIGKILL) or one.errors():
                wrong.append(f"it ended with {code} and said {one.errors()[-3:]}")
            if ended and not reasons:
                wrong.append("it ended before it was killed")
            # A leftover of an earlier SIGKILL is removed before the plan is printed.
            if not ended and began is not None and any(run.glob("checkpoints/*tmp*")):
                stage.half_written += 1
            # An end by itself is no try, unless something is wrong.
            if wrong or not ended:
                reasons.append("; ".join(wrong) or None)
        tries -= len(reasons)

        end = tried(_resume, stage, run, expected, options)
        yield from (reason or end for reason in reasons)


def _resume(stage: Stage, run: pathlib.Path, expected: pathlib.Path, options: Mapping[str, Any]) -> None:
    stage.finish(run, resumes_at=max(steps(run), default=0), **options)
    check_same(run, expected)


def kills_anywhere(stage: Stage, numbers: range) -> Iterator[Reason]:
    """Sends SIGKILL at a random time: 3 in 10 soon after the start of the process, the others after its first step."""

    def moment(run: pathlib.Path, started: list[launching.Started]) -> None:
        if stage.random.random() < 0.3:
            time.sleep(stage.random.uniform(0.2, 4))
            return

        def has_stepped() -> bool:
            # Before this line, which follows the plan, the metrics after the restored step are deleted.
            ready = any(line.startswith("memory of a device: ") for line in started[0].said())
            newest = max((step for step, _ in losses(run)), default=0)
            return ready and newest > (resumed_at(started[0]) or 0)

        launching.wait_until(has_stepped, started, timeout=_PROGRESS)
        time.sleep(stage.random.uniform(0, 1.5))

    return _kills(stage, len(numbers), "killed", moment)


def kills_in_saves(stage: Stage, numbers: range) -> Iterator[Reason]:
    """Sends SIGKILL while a checkpoint is being written."""

    def moment(run: pathlib.Path, started: list[launching.Started]) -> None:
        # A leftover may have the name of a save since this start, but is removed before the plan is printed.
        launching.wait_until(lambda: resumed_at(started[0]) is not None, started, timeout=_PROGRESS)
        # Wait for a random one of the saves since this start, then a random time from its beginning.
        saves = stage.random.randint(1, 8)
        seen: set[str] = set()

        def saving() -> bool:
            seen.update(path.name for path in run.glob("checkpoints/*tmp*"))
            return len(seen) >= saves

        launching.wait_until(saving, started, timeout=_PROGRESS)
        time.sleep(stage.random.uniform(0, 0.1))

    return _kills(stage, len(numbers), "killed-saving", moment)


def terminations(stage: Stage, numbers: range) -> Iterator[Reason]:
    """Sends SIGTERM: the current step is saved, and the exit code is 143."""
    options = {"training__steps": 400, "training__checkpoint_every": 100}
    expected = stage.undisturbed(**options)

    def attempt() -> None:
        run = stage.new("terminated")
        (one,) = started = stage.start(run, **options)
        launching.wait_until(lambda: bool(losses(run)), started)
        time.sleep(stage.random.uniform(0, 0.5))
        one.send(signal.SIGTERM)
        code, saved = one.wait(PATIENCE), steps(run)
        last = losses(run)[-1][0]
        if code != 128 + signal.SIGTERM or last not in saved or one.errors() != [signals.SAVING]:
            raise NotSurvived(f"it ended after step {last} with {code}, {one.errors()}, checkpoints {saved}")
        stage.finish(run, resumes_at=last, **options)
        check_same(run, expected)

    return (tried(attempt) for _ in numbers)


def one_of_two(stage: Stage, numbers: range) -> Iterator[Reason]:
    """Sends SIGKILL to one of two processes; the other fails or is aborted by JAX, and both are restarted."""
    return _one_of(2, stage, numbers)


def one_of_four(stage: Stage, numbers: range) -> Iterator[Reason]:
    """Sends SIGKILL to one of four processes; the others fail or are aborted by JAX, and all are restarted."""
    return _one_of(4, stage, numbers)


def _one_of(processes: int, stage: Stage, numbers: range) -> Iterator[Reason]:
    options = {"training__steps": 60, "training__checkpoint_every": 10, "processes": processes}
    expected = stage.undisturbed(**options)

    def attempt(number: int) -> None:
        run = stage.new("several")
        started = stage.start(run, **options)
        launching.wait_until(lambda: bool(steps(run)), started, timeout=PATIENCE)
        time.sleep(stage.random.uniform(0, 1))
        killed = number % processes
        started[killed].process.kill()
        if (code := started.pop(killed).wait(PATIENCE)) != -signal.SIGKILL:
            raise NotSurvived(f"process {killed} ended with {code} before it was killed")
        for one in started:
            code, lines = one.wait(PATIENCE), one.errors()
            fails = code > 0 and any(line.startswith("error: ") for line in lines)
            aborted = code == -signal.SIGABRT and any(_ABORTS in line for line in lines)
            if not (fails or aborted):
                raise NotSurvived(
                    f"process {killed} was killed; another ended with {code} and said {lines[-3:]}"
                )
        stage.finish(run, resumes_at=steps(run)[-1], **options)
        check_same(run, expected)

    return (tried(attempt, number) for number in numbers)


def two_runs(stage: Stage, numbers: range) -> Iterator[Reason]:
    """Starts a second run in the same workdir: one of the two trains, the other ends with one line."""
    options = {"training__steps": 100, "training__checkpoint_every": 10}
    expected = stage.undisturbed(**options)

    def attempt(number: int) -> None:
        run = stage.new("twice")
        first = stage.start(run, **options)
        if number % 2:
            launching.wait_until(lambda: bool(losses(run)), first)
            time.sleep(stage.random.uniform(0, 0.5))
        second = stage.start(run, **options)
        # Of two that are started together, either may be the one that trains.
        if number % 2 == 0 and second[0].wait(PATIENCE) == 0:
            first, second = second, first
        check_error(second[0], "is in use by")
        check_success(first)
        check_same(run, expected)

    return (tried(attempt, number) for number in numbers)


def wrong_clock(stage: Stage, numbers: range) -> Iterator[Reason]:
    """Steps the system clock forward and back during a run, to at most a minute from the true time, until it ends.

    The time of each of its files is set to its own offset from the true time, within the same limit.
    """
    options = {"training__steps": 100, "training__checkpoint_every": 5}
    expected = stage.undisturbed(**options)

    def attempt() -> None:
        run = stage.new("clock")
        with clock.stepped() as stepped:
            (one,) = stage.start(run, **options)
            deadline = time.monotonic() + PATIENCE
            while one.process.exitcode is None and time.monotonic() < deadline:
                stepped.step(stage.random.uniform(-_OFFSET, _OFFSET))
                for path in run.rglob("*"):
                    then = time.time() + stage.random.uniform(-_OFFSET, _OFFSET)
                    with contextlib.suppress(FileNotFoundError):  # a checkpoint that is being written
                        os.utime(path, (then, then))
                time.sleep(stage.random.uniform(0, 0.5))
            check_success([one])
        check_same(run, expected)

    return (tried(attempt) for _ in numbers)
