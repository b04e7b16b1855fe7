"""What a training run survives: `python -m tests.faults [--brief] [--out=FILE.md|FILE.json]`.

Disturbs runs of a tiny model in every way of `FAULTS` and lets the same command go on. A try is survived if the run
ends with the losses and parameters of an undisturbed one, to the bit unless the table says otherwise, went on from the
newest checkpoint there was, and said what went wrong in one line. Exit code 1 if any try was not.
"""

import argparse
import contextlib
import dataclasses
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
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from sympow_jax.training import checkpoint
from tests import small_disk
from tests.data import builders
from tests.training import launching

# Losses of runs on other numbers of devices: sums in another order.
_CLOSE = 1e-5
_SETTINGS = {
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


class NotSurvived(Exception):
    """Why a try was not survived."""


@dataclasses.dataclass
class Row:
    """A line of the table."""

    fault: str
    tries: int
    survived: int
    seconds: float


class Stage:
    """Where runs take place: a corpus, a cache of compiled programs and a folder for each run."""

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
        """A workdir that no run has used."""
        return pathlib.Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))

    def start(self, run: pathlib.Path, *, processes=1, devices=1, prepare=None, **changes):
        """Starts the run in a workdir; `changes` are settings, `__` for a dot."""
        changed = {name.replace("__", "."): value for name, value in changes.items()}
        arguments = [f"--config.{name}={value}" for name, value in (_SETTINGS | changed).items()]
        return launching.start(
            [self._config, f"--workdir={run}", *arguments],
            self.folder / "says",
            processes=processes,
            devices=devices,
            cache=self.folder / "cache",
            prepare=prepare,
        )

    def finish(self, run: pathlib.Path, **options) -> list[launching.Started]:
        """Starts the run and waits for its end, which must be a good one."""
        started = self.start(run, **options)
        codes = [one.wait() for one in started]
        if any(codes):
            raise NotSurvived(f"going on ended with {codes}: {[one.errors()[-3:] for one in started]}")
        return started

    def undisturbed(self, **options) -> pathlib.Path:
        """The workdir of such a run that nothing disturbed."""
        key = tuple(sorted(options.items()))
        if key not in self._undisturbed:
            self._undisturbed[key] = self.new("undisturbed")
            self.finish(self._undisturbed[key], **options)
        return self._undisturbed[key]


def _losses(run: pathlib.Path) -> list[tuple[int, float]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def _steps(run: pathlib.Path) -> list[int]:
    return sorted(int(path.name) for path in run.glob("checkpoints/*") if path.name.isdigit())


def _began(started: Sequence[launching.Started]) -> int:
    """The step from which a run went on."""
    (line,) = [line for line in started[0].said() if line.startswith(("training: step", "trained: step"))]
    return int(line.split()[2])


def _check_same(run: pathlib.Path, expected: pathlib.Path) -> None:
    if _losses(run) != _losses(expected):
        raise NotSurvived("the losses are not those of the undisturbed run")
    (_, model, step), (_, other, at) = map(checkpoint.restore_model, (run, expected))
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), jax.tree.leaves(model), jax.tree.leaves(other))
    if step != at or not all(same):
        raise NotSurvived("the parameters are not those of the undisturbed run")


def _check_close(run: pathlib.Path, expected: pathlib.Path) -> None:
    steps, losses = zip(*_losses(run))
    if steps != next(zip(*_losses(expected))):
        raise NotSurvived("the steps are not those of the undisturbed run")
    np.testing.assert_allclose(losses, [loss for _, loss in _losses(expected)], rtol=_CLOSE)


def _check_error(one: launching.Started, code: int, words: str) -> None:
    lines = one.errors()
    if code != 1 or len(lines) != 1 or words not in lines[0]:
        raise NotSurvived(f"it ended with {code} and said {lines[-3:]}")


# Faults: each is tried so often, and yields None for a try survived, else the reason.
Outcome = Iterator[str | None]


def _tried(attempt: Callable[[], None]) -> str | None:
    try:
        attempt()
    except Exception as error:  # whatever it is, the try did not end as it should
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def kills(stage: Stage, tries: int, name: str, moment: Callable[[pathlib.Path, list], None]) -> Outcome:
    """SIGKILL at the moment that `moment` waits for, again and again until the run has ended."""
    options = {"training__steps": 150, "training__checkpoint_every": 5}
    expected = stage.undisturbed(**options)
    while tries:
        run, reasons = stage.new(name), []
        while tries:
            started = stage.start(run, **options)
            with contextlib.suppress(TimeoutError):  # it may end before its moment comes
                moment(run, started)
            before = _steps(run)
            started[0].process.kill()
            code = started[0].wait()
            if code == 0:
                break
            tries -= 1
            stage.half_written += any(run.glob("checkpoints/*tmp*"))
            kept = _steps(run)
            lost = [step for step in before if step not in kept]
            # The newest are kept; the one before them may be gone, as it would be without a kill.
            wrong = code != -signal.SIGKILL or (before and kept[-1] < before[-1]) or len(lost) > 1
            reasons.append(f"{code}, {started[0].errors()}, had {before}, kept {kept}" if wrong else None)

        def go_on(run=run) -> None:
            newest = (_steps(run) or [0])[-1]
            if _began(stage.finish(run, **options)) != newest:
                raise NotSurvived(f"it did not go on from step {newest}")
            _check_same(run, expected)

        end = _tried(go_on)
        yield from (reason or end for reason in reasons)


def kills_anywhere(stage: Stage, tries: int) -> Outcome:
    """SIGKILL at a random instant, from the start of the process on."""
    return kills(stage, tries, "killed", lambda run, started: time.sleep(stage.random.uniform(0.2, 4)))


def kills_in_saves(stage: Stage, tries: int) -> Outcome:
    """SIGKILL while a checkpoint is being written."""

    def moment(run: pathlib.Path, started: list) -> None:
        # After so many saves of this start, within so many seconds of the next one's beginning.
        saves, seen = stage.random.randint(1, 8), set()

        def saving() -> bool:
            seen.update(path.name for path in run.glob("checkpoints/*tmp*"))
            return len(seen) >= saves

        launching.wait_until(saving, started)
        time.sleep(stage.random.uniform(0, 0.1))

    return kills(stage, tries, "killed-saving", moment)


def signals(stage: Stage, tries: int) -> Outcome:
    """SIGTERM: the step under way is saved, and the code is 143."""
    options = {"training__steps": 400, "training__checkpoint_every": 100}
    expected = stage.undisturbed(**options)

    def attempt() -> None:
        run = stage.new("terminated")
        started = stage.start(run, **options)
        launching.wait_until(lambda: (run / "metrics.jsonl").exists() and bool(_losses(run)), started)
        time.sleep(stage.random.uniform(0, 0.5))
        started[0].send(signal.SIGTERM)
        code = started[0].wait()
        if code != 128 + signal.SIGTERM or _steps(run)[-1] != _losses(run)[-1][0] or started[0].errors():
            raise NotSurvived(f"it ended with {code}, {started[0].errors()}, checkpoints {_steps(run)}")
        stage.finish(run, **options)
        _check_same(run, expected)

    return (_tried(attempt) for _ in range(tries))


def damages(stage: Stage, tries: int, damage: Callable[[pathlib.Path], None]) -> Outcome:
    """Damage to a file of the newest checkpoint; each try another file."""
    options = {"training__steps": 20, "training__checkpoint_every": 5}
    expected = stage.undisturbed(**options)
    files = sorted(path for path in (expected / "checkpoints" / "20").rglob("*") if path.is_file())
    stage.random.shuffle(files)

    def attempt(number: int) -> None:
        run = stage.new("damaged")
        shutil.copytree(expected, run, dirs_exist_ok=True)
        damage(run / files[number % len(files)].relative_to(expected))
        stage.finish(run, **options)
        _check_same(run, expected)

    return (_tried(lambda number=number: attempt(number)) for number in range(tries))


def truncated(stage: Stage, tries: int) -> Outcome:
    """A file of the newest checkpoint is cut at a random byte."""
    return damages(stage, tries, lambda path: os.truncate(path, stage.random.randrange(path.stat().st_size)))


def flipped(stage: Stage, tries: int) -> Outcome:
    """One random bit of a file of the newest checkpoint is another."""

    def flip(path: pathlib.Path) -> None:
        content = bytearray(path.read_bytes())
        content[stage.random.randrange(len(content))] ^= 1 << stage.random.randrange(8)
        path.write_bytes(content)

    return damages(stage, tries, flip)


def shards(stage: Stage, tries: int) -> Outcome:
    """Chunks of a Zarr array vanish while a run reads it, and come back."""
    array = stage.folder / "array"
    values = np.random.default_rng(0).integers(1, 256, (2048, 64)).astype(np.uint16)
    builders.write_zarr(array, values, chunks=(8, 64))
    options = {"training__steps": 100, "training__checkpoint_every": 10, "data__source": "longcrawl64"}
    options |= {"data__paths": array, "data__document_separator": 0, "data__packing": "windows"}
    expected = stage.undisturbed(**options)

    def attempt() -> None:
        run, away = stage.new("vanished"), stage.new("away")
        started = stage.start(run, **options)
        launching.wait_until(lambda: bool(_steps(run)), started)
        for chunk in array.glob("[0-9]*"):
            chunk.rename(away / chunk.name)
        code = started[0].wait()
        for chunk in away.iterdir():
            chunk.rename(array / chunk.name)
        _check_error(started[0], code, "cannot be read")
        stage.finish(run, **options)
        _check_same(run, expected)

    return (_tried(attempt) for _ in range(tries))


def one_of_two(stage: Stage, tries: int) -> Outcome:
    """SIGKILL to one of two processes; the other ends by itself, and both are started again."""
    options = {"training__steps": 60, "training__checkpoint_every": 10, "processes": 2}
    expected = stage.undisturbed(**options)

    def attempt(number: int) -> None:
        run = stage.new("pair")
        started = stage.start(run, **options)
        launching.wait_until(lambda: bool(_steps(run)), started)
        time.sleep(stage.random.uniform(0, 1))
        started[number % 2].process.kill()
        codes = [one.wait() for one in started]
        if 0 in codes:
            raise NotSurvived(f"they ended with {codes}")
        newest = _steps(run)[-1]
        if _began(stage.finish(run, **options)) != newest:
            raise NotSurvived(f"it did not go on from step {newest}")
        _check_same(run, expected)

    return (_tried(lambda number=number: attempt(number)) for number in range(tries))


def _elsewhere(stage: Stage, tries: int, parts: Sequence[dict[str, int]]) -> Outcome:
    expected = stage.undisturbed(training__steps=10 * len(parts), training__checkpoint_every=5)

    def attempt() -> None:
        run = stage.new("elsewhere")
        for number, part in enumerate(parts, 1):
            began = stage.finish(run, training__steps=10 * number, training__checkpoint_every=5, **part)
            if _began(began) != 10 * (number - 1):
                raise NotSurvived(f"it went on from step {_began(began)}")
        _check_close(run, expected)

    return (_tried(attempt) for _ in range(tries))


def fewer_devices(stage: Stage, tries: int) -> Outcome:
    """A run begun on 8 devices goes on on 4, 2 and 1."""
    divided = {"devices": 8, "sharding__fsdp": 4, "sharding__tensor": 2}
    return _elsewhere(stage, tries, [divided, {"devices": 4, "sharding__fsdp": 2}, {"devices": 2}, {}])


def other_processes(stage: Stage, tries: int) -> Outcome:
    """A run begun by 2 processes goes on as 1, and as 2 again."""
    return _elsewhere(stage, tries, [{"processes": 2}, {"processes": 1}, {"processes": 2}])


def full_disk(stage: Stage, tries: int) -> Outcome:
    """The disk is full during a save; then there is room again.

    A disk of its own where the system permits one, else a limit on the size of files.
    """
    options = {"training__steps": 60, "training__checkpoint_every": 10}
    expected = stage.undisturbed(**options)

    def attempt() -> None:
        with small_disk.mounted(stage.new("disk"), mebibytes=4) as disk:
            run = disk.seen / "run"
            started = stage.start(disk.path / "run", prepare=disk.enter, **options)
            launching.wait_until(lambda: bool(_steps(run)), started)
            disk.fill()
            code = started[0].wait()
            _check_error(started[0], code, "could not be saved")
            newest = _steps(run)[-1]
            disk.free()
            again = stage.finish(disk.path / "run", prepare=disk.enter, **options)
            if _began(again) != newest:
                raise NotSurvived(f"it did not go on from step {newest}")
            _check_same(run, expected)

    def attempt_by_limit() -> None:
        run = stage.new("full")
        stage.finish(run, **(options | {"training__steps": 20}))
        (limited,) = stage.start(run, prepare=_limit_files, **options)
        _check_error(limited, limited.wait(), "could not be saved")
        if _began(stage.finish(run, **options)) != 20:
            raise NotSurvived("it did not go on from step 20")
        _check_same(run, expected)

    chosen = attempt if small_disk.permitted() else attempt_by_limit
    return (_tried(chosen) for _ in range(tries))


def _limit_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


FAULTS: dict[str, tuple[Callable[[Stage, int], Outcome], int, int]] = {
    # fault: tries in the long form, and in brief
    "SIGKILL at a random instant": (kills_anywhere, 30, 4),
    "SIGKILL while a checkpoint is written": (kills_in_saves, 30, 4),
    "SIGTERM": (signals, 6, 1),
    "disk full during a save": (full_disk, 3, 1),
    "checkpoint file truncated": (truncated, 12, 2),
    "one bit of a checkpoint flipped": (flipped, 12, 2),
    "one of two processes killed": (one_of_two, 4, 1),
    "data shard vanishes and comes back": (shards, 3, 1),
    "8 devices, then 4, 2 and 1 (losses within 1e-5)": (fewer_devices, 2, 1),
    "2 processes, then 1 and 2 (losses within 1e-5)": (other_processes, 2, 1),
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
        stage = Stage(pathlib.Path(folder), options.seed)
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
