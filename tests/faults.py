"""What a training run survives: `python -m tests.faults [--brief] [--out=FILE.md|FILE.json]`.

Disturbs runs of a tiny model in every way of `FAULTS` and lets the same command go on. A try is survived if the run
ends with the losses and parameters of an undisturbed one, to the bit unless the table says otherwise, went on from the
newest checkpoint there was, and said what went wrong in one line.

Exit code 1 if any try was not.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from tests import small_disk, stages
from tests.data import builders
from tests.training import launching


@dataclasses.dataclass
class Row:
    """Row of the table."""

    fault: str
    tries: int
    survived: int
    seconds: float


# Faults: each is tried a number of times, and yields None for a survived try, else the reason.
Outcome = Iterator[str | None]


def _tried(attempt: Callable[[], None]) -> str | None:
    try:
        attempt()
    except Exception as error:  # any exception means that the try failed
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def kills(
    stage: stages.Stage, tries: int, name: str, moment: Callable[[pathlib.Path, list], None]
) -> Outcome:
    """Sends SIGKILL when `moment` returns, repeatedly until the run has ended."""
    options = {"training__steps": 150, "training__checkpoint_every": 5}
    expected = stage.undisturbed(**options)
    while tries:
        run, reasons = stage.new(name), []
        while tries:
            started = stage.start(run, **options)
            with contextlib.suppress(TimeoutError):  # it may end before its moment comes
                moment(run, started)
            before = stages.steps(run)
            started[0].process.kill()
            code = started[0].wait()
            if code == 0:
                break
            tries -= 1
            stage.half_written += any(run.glob("checkpoints/*tmp*"))
            kept = stages.steps(run)
            lost = [step for step in before if step not in kept]
            # The newest checkpoints are kept; one older checkpoint may be deleted, as it would be without a kill.
            wrong = code != -signal.SIGKILL or (before and kept[-1] < before[-1]) or len(lost) > 1
            reasons.append(f"{code}, {started[0].errors()}, had {before}, kept {kept}" if wrong else None)

        def go_on(run=run) -> None:
            newest = (stages.steps(run) or [0])[-1]
            if stages.began(stage.finish(run, **options)) != newest:
                raise stages.NotSurvived(f"it did not go on from step {newest}")
            stages.check_same(run, expected)

        end = _tried(go_on)
        yield from (reason or end for reason in reasons)


def kills_anywhere(stage: stages.Stage, tries: int) -> Outcome:
    """Sends SIGKILL at a random time after the start of the process."""
    return kills(stage, tries, "killed", lambda run, started: time.sleep(stage.random.uniform(0.2, 4)))


def kills_in_saves(stage: stages.Stage, tries: int) -> Outcome:
    """Sends SIGKILL while a checkpoint is being written."""

    def moment(run: pathlib.Path, started: list) -> None:
        # Wait for a random one of the saves since this start, then a random time from its beginning.
        saves, seen = stage.random.randint(1, 8), set()

        def saving() -> bool:
            seen.update(path.name for path in run.glob("checkpoints/*tmp*"))
            return len(seen) >= saves

        launching.wait_until(saving, started)
        time.sleep(stage.random.uniform(0, 0.1))

    return kills(stage, tries, "killed-saving", moment)


def signals(stage: stages.Stage, tries: int) -> Outcome:
    """Sends SIGTERM: the current step is saved, and the exit code is 143."""
    options = {"training__steps": 400, "training__checkpoint_every": 100}
    expected = stage.undisturbed(**options)

    def attempt() -> None:
        run = stage.new("terminated")
        started = stage.start(run, **options)
        launching.wait_until(lambda: (run / "metrics.jsonl").exists() and bool(stages.losses(run)), started)
        time.sleep(stage.random.uniform(0, 0.5))
        started[0].send(signal.SIGTERM)
        code = started[0].wait()
        if (
            code != 128 + signal.SIGTERM
            or stages.steps(run)[-1] != stages.losses(run)[-1][0]
            or started[0].errors()
        ):
            raise stages.NotSurvived(
                f"it ended with {code}, {started[0].errors()}, checkpoints {stages.steps(run)}"
            )
        stage.finish(run, **options)
        stages.check_same(run, expected)

    return (_tried(attempt) for _ in range(tries))


def damages(stage: stages.Stage, tries: int, damage: Callable[[pathlib.Path], None]) -> Outcome:
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
        stages.check_same(run, expected)

    return (_tried(lambda number=number: attempt(number)) for number in range(tries))


def truncated(stage: stages.Stage, tries: int) -> Outcome:
    """Truncates a file of the newest checkpoint at a random byte."""
    return damages(stage, tries, lambda path: os.truncate(path, stage.random.randrange(path.stat().st_size)))


def flipped(stage: stages.Stage, tries: int) -> Outcome:
    """Flips one random bit of a file of the newest checkpoint."""

    def flip(path: pathlib.Path) -> None:
        content = bytearray(path.read_bytes())
        content[stage.random.randrange(len(content))] ^= 1 << stage.random.randrange(8)
        path.write_bytes(content)

    return damages(stage, tries, flip)


def shards(stage: stages.Stage, tries: int) -> Outcome:
    """Removes chunks of a Zarr array while a run reads it, and restores them."""
    array = stage.folder / "array"
    values = np.random.default_rng(0).integers(1, 256, (2048, 64)).astype(np.uint16)
    builders.write_zarr(array, values, chunks=(8, 64))
    options = {"training__steps": 100, "training__checkpoint_every": 10, "data__source": "longcrawl64"}
    options |= {"data__paths": array, "data__document_separator": 0, "data__packing": "windows"}
    expected = stage.undisturbed(**options)

    def attempt() -> None:
        run, away = stage.new("vanished"), stage.new("away")
        started = stage.start(run, **options)
        launching.wait_until(lambda: bool(stages.steps(run)), started)
        for chunk in array.glob("[0-9]*"):
            chunk.rename(away / chunk.name)
        code = started[0].wait()
        for chunk in away.iterdir():
            chunk.rename(array / chunk.name)
        stages.check_error(started[0], code, "cannot be read")
        stage.finish(run, **options)
        stages.check_same(run, expected)

    return (_tried(attempt) for _ in range(tries))


def one_of_two(stage: stages.Stage, tries: int) -> Outcome:
    """Sends SIGKILL to one of two processes; the other ends by itself, and both are restarted."""
    options = {"training__steps": 60, "training__checkpoint_every": 10, "processes": 2}
    expected = stage.undisturbed(**options)

    def attempt(number: int) -> None:
        run = stage.new("pair")
        started = stage.start(run, **options)
        launching.wait_until(lambda: bool(stages.steps(run)), started)
        time.sleep(stage.random.uniform(0, 1))
        started[number % 2].process.kill()
        codes = [one.wait() for one in started]
        if 0 in codes:
            raise stages.NotSurvived(f"they ended with {codes}")
        newest = stages.steps(run)[-1]
        if stages.began(stage.finish(run, **options)) != newest:
            raise stages.NotSurvived(f"it did not go on from step {newest}")
        stages.check_same(run, expected)

    return (_tried(lambda number=number: attempt(number)) for number in range(tries))


def _elsewhere(stage: stages.Stage, tries: int, parts: Sequence[dict[str, int]]) -> Outcome:
    expected = stage.undisturbed(training__steps=10 * len(parts), training__checkpoint_every=5)

    def attempt() -> None:
        run = stage.new("elsewhere")
        for number, part in enumerate(parts, 1):
            began = stage.finish(run, training__steps=10 * number, training__checkpoint_every=5, **part)
            if stages.began(began) != 10 * (number - 1):
                raise stages.NotSurvived(f"it went on from step {stages.began(began)}")
        stages.check_close(run, expected)

    return (_tried(attempt) for _ in range(tries))


def fewer_devices(stage: stages.Stage, tries: int) -> Outcome:
    """Resumes a run begun on 8 devices on 4, 2 and 1."""
    divided = {"devices": 8, "sharding__fsdp": 4, "sharding__tensor": 2}
    return _elsewhere(stage, tries, [divided, {"devices": 4, "sharding__fsdp": 2}, {"devices": 2}, {}])


def other_processes(stage: stages.Stage, tries: int) -> Outcome:
    """Resumes a run begun by 2 processes with 1 process, and then with 2 again."""
    return _elsewhere(stage, tries, [{"processes": 2}, {"processes": 1}, {"processes": 2}])


def full_disk(stage: stages.Stage, tries: int) -> Outcome:
    """Fills the disk during a save, then frees space again.

    Uses a separate disk if the system permits one, else a limit on the size of files.
    """
    options = {"training__steps": 60, "training__checkpoint_every": 10}
    expected = stage.undisturbed(**options)

    def attempt() -> None:
        with small_disk.mounted(stage.new("disk"), mebibytes=4) as disk:
            run = disk.seen / "run"
            started = stage.start(disk.path / "run", prepare=disk.enter, **options)
            launching.wait_until(lambda: bool(stages.steps(run)), started)
            disk.fill()
            code = started[0].wait()
            stages.check_error(started[0], code, "could not be saved")
            newest = stages.steps(run)[-1]
            disk.free()
            again = stage.finish(disk.path / "run", prepare=disk.enter, **options)
            if stages.began(again) != newest:
                raise stages.NotSurvived(f"it did not go on from step {newest}")
            stages.check_same(run, expected)

    def attempt_by_limit() -> None:
        run = stage.new("full")
        stage.finish(run, **(options | {"training__steps": 20}))
        (limited,) = stage.start(run, prepare=_limit_files, **options)
        stages.check_error(limited, limited.wait(), "could not be saved")
        if stages.began(stage.finish(run, **options)) != 20:
            raise stages.NotSurvived("it did not go on from step 20")
        stages.check_same(run, expected)

    chosen = attempt if small_disk.permitted() else attempt_by_limit
    return (_tried(chosen) for _ in range(tries))


def _limit_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


FAULTS: dict[str, tuple[Callable[[stages.Stage, int], Outcome], int, int]] = {
    # fault: tries in the long form, and in brief
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


def _table(rows: Sequence[Row]) -> list[str]:
    lines = ["| fault | tries | survived | seconds |", "|---|---|---|---|"]
    return lines + [f"| {row.fault} | {row.tries} | {row.survived} | {row.seconds:.0f} |" for row in rows]


def _write(out: pathlib.Path, rows: Sequence[Row], note: str, arguments: Sequence[str]) -> None:
    environment = {
        "command": " ".join(["python -m tests.faults", *arguments]),
        "disk": "tmpfs" if small_disk.permitted() else "RLIMIT_FSIZE",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }
    if out.suffix == ".json":
        out.write_text(
            json.dumps(
                environment | {"note": note, "rows": [dataclasses.asdict(row) for row in rows]}, indent=2
            )
            + "\n"
        )
        return
    about = (__doc__ or "").split("\n\n")[1].replace("`FAULTS`", "the table").replace("\n", " ")
    made = ", ".join(f"{name} {value}" for name, value in environment.items() if name != "command")
    out.write_text(
        "\n".join(
            [
                "# Faults",
                "",
                about,
                "",
                f"Made by `{environment['command']}` ({made}).",
                "",
                *_table(rows),
                "",
            ]
        )
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--brief", action="store_true", help="a few tries of each, in three minutes")
    parser.add_argument("--out", type=pathlib.Path, help="also write the table to a .md or .json")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    options = parser.parse_args(arguments)

    rows = []
    print("\n".join(_table([])), flush=True)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        stage = stages.Stage(pathlib.Path(folder), options.seed)
        for fault, (run, tries, brief) in FAULTS.items():
            if options.only not in fault:
                continue
            began = time.monotonic()
            outcomes = list(run(stage, brief if options.brief else tries))
            failed = [reason for reason in outcomes if reason is not None]
            row = Row(fault, len(outcomes), len(outcomes) - len(failed), time.monotonic() - began)
            rows.append(row)
            print(_table([row])[-1], flush=True)
            for reason in failed:
                print(f"  not survived: {reason}", file=sys.stderr, flush=True)
    note = f"After {stage.half_written} of the SIGKILLs a checkpoint was half written."
    print(note)
    if options.out:
        _write(options.out, rows, note, arguments)
    return 0 if all(row.tries == row.survived for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
