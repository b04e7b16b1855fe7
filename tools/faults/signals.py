"""Faults of processes: they are killed, told to stop, or started twice."""

import functools
import pathlib
import signal
import time
from collections.abc import Callable, Iterator

from sympow_jax.process import signals
from tools import launching
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


def _kills(
    stage: Stage, tries: int, name: str, moment: Callable[[pathlib.Path, list[launching.Started]], None]
) -> Iterator[Reason]:
    """Sends SIGKILL when `moment` returns, several times to a run, which is then resumed to its end."""
    options: dict = {"training__steps": 150, "training__checkpoint_every": 5}
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
            # An end by itself is no try, unless something is wrong.
            if wrong or not ended:
                reasons.append("; ".join(wrong) or None)
        tries -= len(reasons)

        def resume(run: pathlib.Path = run) -> None:
            stage.finish(run, resumes_at=max(steps(run), default=0), **options)
            check_same(run, expected)

        end = tried(resume)
        yield from (reason or end for reason in reasons)


def kills_anywhere(stage: Stage, tries: int) -> Iterator[Reason]:
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

    return _kills(stage, tries, "killed", moment)


def kills_in_saves(stage: Stage, tries: int) -> Iterator[Reason]:
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

    return _kills(stage, tries, "killed-saving", moment)


def terminations(stage: Stage, tries: int) -> Iterator[Reason]:
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

    return (tried(attempt) for _ in range(tries))


def _one_of(processes: int, stage: Stage, tries: int) -> Iterator[Reason]:
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

    return (tried(attempt, number) for number in range(tries))


one_of_two = functools.partial(_one_of, 2)
one_of_four = functools.partial(_one_of, 4)


def two_runs(stage: Stage, tries: int) -> Iterator[Reason]:
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

    return (tried(attempt, number) for number in range(tries))
