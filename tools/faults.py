"""Fault injection for training runs: `python -m tools.faults [--brief] [--out=FILE.md]`.

Disturbs runs of a tiny model in every way of the table, then resumes them with the same command. A run survives if it
ends with the losses and parameters of an undisturbed run, bitwise unless the table states a tolerance. It must also
have resumed from the newest checkpoint, and have reported the fault in one line.

The exit code is 1 if any run does not survive.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from sympow_jax import training
from sympow_jax.training import cli
from tests.data import builders
from tests.training import launching
from tools import small_disk

# Tolerance of losses on another number of devices, where sums have another order.
CLOSE = 1e-5
SETTINGS = {
    "model.layers": 1,
    "model.width": 32,
    "model.heads": 2,
    "model.attention.kernel": "softmax",
    "model.attention.decay": "none",
    "model.attention.position": "rope",
    "data.context_length": 32,
    "data.batch_tokens": 256,
    "data.heldout_fraction": 0.3,
    "optimizer.learning_rate": 1e-2,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 0,
    "training.log_every": 1000,
}

# Why a try was not survived, or None if it was.
Reason = str | None


class NotSurvived(Exception):
    """Raised with the reason if a try was not survived."""


class Stage:
    """Environment of the runs: a corpus, a cache of compiled programs and a folder for each run."""

    def __init__(self, folder: pathlib.Path, seed: int):
        self.random = random.Random(seed)
        self.folder = folder
        self.half_written = 0  # checkpoints that a SIGKILL left so
        corpus = folder / "corpus"
        corpus.mkdir()
        for index in range(40):
            words = self.random.choices(("quick", "brown", "fox", "jumps", "over", "lazy", "dog"), k=60)
            (corpus / f"{index}.txt").write_text(" ".join(words))
        self._config = f"--config=configs/text.py:{corpus}/*.txt"
        self._undisturbed: dict[tuple[object, ...], pathlib.Path] = {}

    def new(self, name: str) -> pathlib.Path:
        """Returns a workdir that no run has used."""
        return pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))

    def start(self, run: pathlib.Path, *, processes=1, devices=1, prepare=None, **changes):
        """Starts the run in a workdir; `changes` are settings, with `__` for a dot."""
        changed = {name.replace("__", "."): value for name, value in changes.items()}
        arguments = [f"--config.{name}={value}" for name, value in (SETTINGS | changed).items()]
        return launching.start(
            [self._config, f"--workdir={run}", *arguments],
            self.folder / "says",
            processes=processes,
            devices=devices,
            cache=self.folder / "cache",
            prepare=prepare,
        )

    def finish(self, run: pathlib.Path, *, resumes_at: int | None = None, **options) -> None:
        """Starts the run and waits until it ends successfully; raises NotSurvived if it resumed at another step."""
        started = self.start(run, **options)
        codes = [one.wait() for one in started]
        if any(codes):
            raise NotSurvived(f"going on ended with {codes}: {[one.errors()[-3:] for one in started]}")
        said = (line for line in started[0].said() if line.startswith(("training: step", "trained: step")))
        began = int(next(said).split()[2])
        if resumes_at is not None and began != resumes_at:
            raise NotSurvived(f"it resumed from step {began} instead of {resumes_at}")

    def undisturbed(self, **options) -> pathlib.Path:
        """Returns the workdir of an undisturbed run with these settings."""
        key = tuple(sorted(options.items()))
        if key not in self._undisturbed:
            self._undisturbed[key] = self.new("undisturbed")
            self.finish(self._undisturbed[key], **options)
        return self._undisturbed[key]


def losses(run: pathlib.Path) -> list[tuple[int, float]]:
    """Returns the steps that a run has reported, with their losses."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def steps(run: pathlib.Path) -> list[int]:
    """Returns the steps that a run has checkpoints of."""
    return sorted(int(path.name) for path in run.glob("checkpoints/*") if path.name.isdigit())


def check_same(run: pathlib.Path, expected: pathlib.Path) -> None:
    """Raises NotSurvived unless losses and parameters are bitwise identical to those of the other run."""
    if losses(run) != losses(expected):
        raise NotSurvived("the losses are not those of the undisturbed run")
    (_, model, step), (_, other, at) = map(training.restore_model, (run, expected))
    if step != at or not all(map(np.array_equal, jax.tree.leaves(model), jax.tree.leaves(other))):
        raise NotSurvived("the parameters are not those of the undisturbed run")


def check_error(one: launching.Started, words: str) -> None:
    """Waits; raises NotSurvived unless the process ended with exit code 1 and one line that contains the words."""
    code, lines = one.wait(), one.errors()
    if code != 1 or len(lines) != 1 or words not in lines[0]:
        raise NotSurvived(f"it ended with {code} and said {lines[-3:]}")


def tried(attempt: Callable[[], None]) -> Reason:
    """Returns why an attempt failed; any exception means that it did."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def kills(
    stage: Stage, tries: int, name: str, moment: Callable[[pathlib.Path, list], None]
) -> Iterator[Reason]:
    """Sends SIGKILL when `moment` returns, repeatedly until the run has ended."""
    options = {"training__steps": 150, "training__checkpoint_every": 5}
    expected = stage.undisturbed(**options)
    while tries:
        run, reasons = stage.new(name), []
        while tries:
            started = stage.start(run, **options)
            with contextlib.suppress(TimeoutError):  # it may end before its moment comes
                moment(run, started)
            before = steps(run)
            started[0].process.kill()
            code = started[0].wait()
            if code == 0:
                break
            tries -= 1
            stage.half_written += any(run.glob("checkpoints/*tmp*"))
            kept = steps(run)
            lost = [step for step in before if step not in kept]
            # The newest checkpoints are kept; one older checkpoint may be deleted, as it would be without a kill.
            wrong = code != -signal.SIGKILL or (before and kept[-1] < before[-1]) or len(lost) > 1
            reasons.append(f"{code}, {started[0].errors()}, had {before}, kept {kept}" if wrong else None)

        def go_on(run=run) -> None:
            stage.finish(run, resumes_at=(steps(run) or [0])[-1], **options)
            check_same(run, expected)

        end = tried(go_on)
        yield from (reason or end for reason in reasons)


def kills_anywhere(stage: Stage, tries: int) -> Iterator[Reason]:
    """Sends SIGKILL at a random time after the start of the process."""
    return kills(stage, tries, "killed", lambda run, started: time.sleep(stage.random.uniform(0.2, 4)))


def kills_in_saves(stage: Stage, tries: int) -> Iterator[Reason]:
    """Sends SIGKILL while a checkpoint is being written."""

    def moment(run: pathlib.Path, started: list) -> None:
        # Wait for a random one of the saves since this start, then a random time from its beginning.
        saves = stage.random.randint(1, 8)
        seen: set[str] = set()

        def saving() -> bool:
            seen.update(path.name for path in run.glob("checkpoints/*tmp*"))
            return len(seen) >= saves

        launching.wait_until(saving, started)
        time.sleep(stage.random.uniform(0, 0.1))

    return kills(stage, tries, "killed-saving", moment)


def signals(stage: Stage, tries: int) -> Iterable[Reason]:
    """Sends SIGTERM: the current step is saved, and the exit code is 143."""
    options = {"training__steps": 400, "training__checkpoint_every": 100}
    expected = stage.undisturbed(**options)

    def attempt() -> None:
        run = stage.new("terminated")
        (one,) = started = stage.start(run, **options)
        launching.wait_until(lambda: (run / "metrics.jsonl").exists() and bool(losses(run)), started)
        time.sleep(stage.random.uniform(0, 0.5))
        one.send(signal.SIGTERM)
        code, saved = one.wait(), steps(run)
        if code != 128 + signal.SIGTERM or saved[-1] != losses(run)[-1][0] or one.errors() != [cli.SAVING]:
            raise NotSurvived(f"it ended with {code}, {one.errors()}, checkpoints {saved}")
        stage.finish(run, **options)
        check_same(run, expected)

    return (tried(attempt) for _ in range(tries))


def damages(stage: Stage, tries: int, damage: Callable[[pathlib.Path], None]) -> Iterable[Reason]:
    """Damages a file of the newest checkpoint, a different file in each try."""
    options = {"training__steps": 20, "training__checkpoint_every": 5}
    expected = stage.undisturbed(**options)
    files = sorted(path for path in (expected / "checkpoints" / "20").rglob("*") if path.is_file())
    stage.random.shuffle(files)

    def attempt(number: int) -> None:
        run = stage.new("damaged")
        shutil.copytree(expected, run, dirs_exist_ok=True)
        damage(run / files[number % len(files)].relative_to(expected))
        stage.finish(run, **options)
        check_same(run, expected)

    return (tried(functools.partial(attempt, number)) for number in range(tries))


def truncated(stage: Stage, tries: int) -> Iterable[Reason]:
    """Truncates a file of the newest checkpoint at a random byte."""
    return damages(stage, tries, lambda path: os.truncate(path, stage.random.randrange(path.stat().st_size)))


def flipped(stage: Stage, tries: int) -> Iterable[Reason]:
    """Flips one random bit of a file of the newest checkpoint."""

    def flip(path: pathlib.Path) -> None:
        content = bytearray(path.read_bytes())
        content[stage.random.randrange(len(content))] ^= 1 << stage.random.randrange(8)
        path.write_bytes(content)

    return damages(stage, tries, flip)


def shards(stage: Stage, tries: int) -> Iterable[Reason]:
    """Removes chunks of a Zarr array while a run reads it, and restores them."""
    array = stage.folder / "array"
    values = np.random.default_rng(0).integers(1, 256, (2048, 64)).astype(np.uint16)
    builders.write_zarr(array, values, chunks=(8, 64))
    options: dict[str, Any] = {"training__steps": 100, "training__checkpoint_every": 10}
    options |= {"data__source": "longcrawl64", "data__paths": array}
    options |= {"data__document_separator": 0, "data__packing": "windows"}
    expected = stage.undisturbed(**options)

    def attempt() -> None:
        run, away = stage.new("vanished"), stage.new("away")
        started = stage.start(run, **options)
        launching.wait_until(lambda: bool(steps(run)), started)
        for chunk in array.glob("[0-9]*"):
            chunk.rename(away / chunk.name)
        started[0].wait()
        for chunk in away.iterdir():
            chunk.rename(array / chunk.name)
        check_error(started[0], "cannot be read")
        stage.finish(run, **options)
        check_same(run, expected)

    return (tried(attempt) for _ in range(tries))


def one_of_two(stage: Stage, tries: int) -> Iterable[Reason]:
    """Sends SIGKILL to one of two processes; the other ends by itself, and both are restarted."""
    options = {"training__steps": 60, "training__checkpoint_every": 10, "processes": 2}
    expected = stage.undisturbed(**options)

    def attempt(number: int) -> None:
        run = stage.new("pair")
        started = stage.start(run, **options)
        launching.wait_until(lambda: bool(steps(run)), started)
        time.sleep(stage.random.uniform(0, 1))
        started[number % 2].process.kill()
        codes = [one.wait() for one in started]
        if 0 in codes:
            raise NotSurvived(f"they ended with {codes}")
        stage.finish(run, resumes_at=steps(run)[-1], **options)
        check_same(run, expected)

    return (tried(functools.partial(attempt, number)) for number in range(tries))


def elsewhere(stage: Stage, tries: int, parts: Sequence[dict[str, Any]]) -> Iterable[Reason]:
    """Ends and resumes a run, each time with other devices or processes."""
    expected = stage.undisturbed(training__steps=10 * len(parts), training__checkpoint_every=5)

    def attempt() -> None:
        run = stage.new("elsewhere")
        for number, part in enumerate(parts):
            last = 10 * (number + 1)
            stage.finish(
                run, resumes_at=10 * number, training__steps=last, training__checkpoint_every=5, **part
            )
        found, other = (np.array(losses(folder)) for folder in (run, expected))
        if found.shape != other.shape or not np.allclose(found, other, rtol=CLOSE, atol=0):
            raise NotSurvived("the losses are not those of the undisturbed run")

    return (tried(attempt) for _ in range(tries))


def fewer_devices(stage: Stage, tries: int) -> Iterable[Reason]:
    """Resumes a run begun on 8 devices on 4, 2 and 1."""
    divided = {"devices": 8, "sharding__fsdp": 4, "sharding__tensor": 2}
    return elsewhere(stage, tries, [divided, {"devices": 4, "sharding__fsdp": 2}, {"devices": 2}, {}])


def other_processes(stage: Stage, tries: int) -> Iterable[Reason]:
    """Resumes a run begun by 2 processes with 1 process, and then with 2 again."""
    return elsewhere(stage, tries, [{"processes": 2}, {"processes": 1}, {"processes": 2}])


def full_disk(stage: Stage, tries: int) -> Iterable[Reason]:
    """Fills the disk during a save, then frees space again.

    Uses a separate disk if the system permits one, else a limit on the size of files.
    """
    options = {"training__steps": 60, "training__checkpoint_every": 10}
    expected = stage.undisturbed(**options)

    def attempt() -> None:
        with small_disk.mounted(stage.new("disk"), mebibytes=4) as disk:
            run = disk.seen / "run"
            started = stage.start(disk.path / "run", prepare=disk.enter, **options)
            launching.wait_until(lambda: bool(steps(run)), started)
            disk.fill()
            check_error(started[0], "could not be saved")
            newest = steps(run)[-1]
            disk.free()
            stage.finish(disk.path / "run", prepare=disk.enter, resumes_at=newest, **options)
            check_same(run, expected)

    def attempt_by_limit() -> None:
        run = stage.new("full")
        stage.finish(run, **(options | {"training__steps": 20}))
        (limited,) = stage.start(run, prepare=_limit_files, **options)
        check_error(limited, "could not be saved")
        stage.finish(run, resumes_at=20, **options)
        check_same(run, expected)

    chosen = attempt if small_disk.permitted() else attempt_by_limit
    return (tried(chosen) for _ in range(tries))


def _limit_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


# Each yields a reason per try; with the tries in the long form, and in brief.
FAULTS: dict[str, tuple[Callable[[Stage, int], Iterable[Reason]], int, int]] = {
    "SIGKILL at a random instant": (kills_anywhere, 25, 4),
    "SIGKILL while a checkpoint is written": (kills_in_saves, 25, 4),
    "SIGTERM": (signals, 5, 1),
    "disk full during a save": (full_disk, 2, 1),
    "checkpoint file truncated": (truncated, 10, 2),
    "one bit of a checkpoint flipped": (flipped, 10, 2),
    "one of two processes killed": (one_of_two, 3, 1),
    "data shard vanishes and comes back": (shards, 2, 1),
    "8 devices, then 4, 2 and 1 (losses within 1e-5)": (fewer_devices, 1, 1),
    "2 processes, then 1 and 2 (losses within 1e-5)": (other_processes, 1, 1),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--brief", action="store_true", help="a few tries of each, in three minutes")
    parser.add_argument("--out", type=pathlib.Path, help="also write the table to this Markdown file")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    options = parser.parse_args(arguments)

    table, survived = ["| fault | tries | survived | seconds |", "|---|---|---|---|"], True
    print("\n".join(table), flush=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        stage = Stage(pathlib.Path(folder), options.seed)
        for fault, (run, tries, brief) in FAULTS.items():
            if options.only not in fault:
                continue
            began = time.monotonic()
            reasons = list(run(stage, brief if options.brief else tries))
            lasted, good = time.monotonic() - began, reasons.count(None)
            table.append(f"| {fault} | {len(reasons)} | {good} | {lasted:.0f} |")
            survived &= good == len(reasons)
            print(table[-1], flush=True)
            for reason in filter(None, reasons):
                print(f"  not survived: {reason}", file=sys.stderr, flush=True)
    print(f"After {stage.half_written} of the SIGKILLs a checkpoint was half written.")
    if options.out:
        disk = "tmpfs" if small_disk.permitted() else "RLIMIT_FSIZE"
        versions = f"disk {disk}, jax {jax.__version__}, python {platform.python_version()}"
        made = f"Made by `python -m tools.faults {' '.join(arguments)}` ({versions}, cpus {os.cpu_count()})."
        summary = (__doc__ or "").split("\n\n")[1].replace("\n", " ")
        options.out.write_text("\n".join(["# Faults", "", summary, "", made, "", *table, ""]))
    return 0 if survived else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
