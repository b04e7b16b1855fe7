"""Runs all measurements on one Hopper GPU, most important first, and writes a summary.

    python -m benchmarks.hopper --out=DIR [--parts=NAME,...] [--minutes=N] [--jobs=N]

It needs no network, and no grain. Each part is a program of its own, which prints as it goes, writes DIR/<part>.json as
rows come, and is ended at its time limit:

    check     every kernel against plain JAX in float32: sympow check --brief
    kernels   both forms against flash attention, plain JAX and other packages: benchmarks.kernels --part=brief
    hardware  rates that the cost model assumes: benchmarks.hopper.hardware
    chunks    chunk sizes: benchmarks.kernels --part=chunks
    counters  hardware counters of the kernels, from ncu: benchmarks.hopper.counters
    training  steps of the 124M model, conformal and softmax: benchmarks.training
    text      the 124M model trained on text at hand, evaluated beyond its context: benchmarks.hopper.text

The same command again, on the same kind of GPU, resumes: it repeats no finished part and no finished row.
DIR/parts.json says how each part ended. DIR/summary.md is written after each part, from the JSON files only, and names
the parts that have not started. `--parts=` (empty) only rewrites the summary. Programs that were compiled are kept in
--cache, outside DIR.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import _rows
from benchmarks.hopper import summary

__all__ = ["PARTS", "Part", "main"]

# From the time at which a program begins no more rows to the one at which it is ended.
ROW_MARGIN = 40.0
# `sympow` has no `__main__` module.
_CHECK = "import sys; from sympow_jax import commands; sys.exit(commands.main(sys.argv[1:]))"


class Part(NamedTuple):
    """A program and its time limit.

    Attributes:
        arguments: arguments of Python.
        seconds: time limit.
        jobs: largest number of rows at once. Counters and the text need the whole device, and a training step half of
            its memory.
        resumes: whether the program takes --resume, --minutes and --smoke.
        least_seconds: the part does not start with less time. The default suffices for no more than one row.
    """

    arguments: tuple[str, ...]
    seconds: float
    jobs: int = 16
    resumes: bool = True
    least_seconds: float = 45.0


_TRAINING = [f"--context={context}" for context in (65_536, 16_384, 4096)]
_TRAINING += [f"--preset={preset}" for preset in ("conformal", "softmax")]
# All but the text take 26 minutes. A part that needs more continues in another call.
PARTS = {
    # It ends itself after 450 seconds, and writes its verdict only then: with less time all its work would be lost.
    "check": Part(("-c", _CHECK, "check", "--brief"), 480, resumes=False, least_seconds=480),
    "kernels": Part(("-m", "benchmarks.kernels", "--part=brief"), 420),
    "hardware": Part(("-m", "benchmarks.hopper.hardware"), 90, jobs=4),
    "chunks": Part(("-m", "benchmarks.kernels", "--part=chunks"), 150),
    "counters": Part(("-m", "benchmarks.hopper.counters"), 180, jobs=1),
    "training": Part(("-m", "benchmarks.training", *_TRAINING), 240, jobs=3),
    "text": Part(("-m", "benchmarks.hopper.text"), 900, jobs=1),
}
# What a smoke run gives in place of the shapes of a GPU.
_SMOKE = {
    "text": (
        "--seconds=1",
        "--preset=conformal",
        f"--text={pathlib.Path(__file__).parents[2] / 'sympow_jax'}",
    )
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the parts that are not finished and writes the summary; exits with status 1 if one failed."""
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * options.minutes
    for name in options.parts:
        part = PARTS[name]
        if _ended(options.out).get(name, {}).get("finished"):
            print(f"== {name}: finished before", flush=True)
            continue
        left = end - time.monotonic()
        if left < part.least_seconds:
            print(
                f"== {name}: not started, {left:.0f} s are left of {part.least_seconds:.0f} needed",
                flush=True,
            )
            continue
        seconds = min(part.seconds, left)
        print(f"== {name}: at most {seconds:.0f} s", flush=True)
        status, elapsed = _run(_command(name, seconds, options), seconds, options)
        ended = {
            "status": status,
            "seconds": round(elapsed, 1),
            "finished": _is_finished(name, status, options.out),
        }
        _rows.write(options.out / "parts.json", _ended(options.out) | {name: ended})
        print(f"== {name}: {summary.words(ended)}", flush=True)
        _write_summary(options.out)
    _write_summary(options.out)
    failed = [name for name in options.parts if _ended(options.out).get(name, {}).get("status", 0) != 0]
    if failed:
        sys.exit(f"not every part ended well: {', '.join(failed)}; see {options.out / 'summary.md'}")


def _options(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hopper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the results")
    parser.add_argument(
        "--parts", type=_part_names, default=tuple(PARTS), help="parts to run, with commas; all without it"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="time for all parts")
    parser.add_argument("--jobs", type=int, default=8, help="rows that compile at once")
    parser.add_argument(
        "--cache",
        type=pathlib.Path,
        default=pathlib.Path(tempfile.gettempdir(), "sympow-jax-compiled"),
        help="folder of compiled programs",
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on any device")
    return parser.parse_args(arguments)


def _part_names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no part; the parts are {', '.join(PARTS)}")
    return tuple(name for name in PARTS if name in names)


def _command(name: str, seconds: float, options: argparse.Namespace) -> list[str]:
    part = PARTS[name]
    command = [sys.executable, *part.arguments, f"--out={options.out / name}.json"]
    command.append(f"--jobs={min(options.jobs, part.jobs)}")
    if part.resumes:
        command += ["--resume", f"--minutes={max(seconds - ROW_MARGIN, 0) / 60:.2f}"]
        if options.smoke:
            # Their shapes are those of a GPU, and a smoke run has its own.
            command = [word for word in command if not word.startswith(("--context", "--preset", "--part"))]
            command += ["--smoke", *_SMOKE.get(name, ())]
    return command


def _run(command: Sequence[str], seconds: float, options: argparse.Namespace) -> tuple[int | None, float]:
    """Runs a program, which prints where this one does, until its end or time limit.

    Returns:
        Its exit status, or None if the time limit ended it.
        The seconds that it ran.
    """
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "JAX_COMPILATION_CACHE_DIR": str(options.cache),
        # The verdict of the check, without which training does not use the kernels, moves with the results.
        "XDG_CACHE_HOME": str(options.out.resolve() / "verdict"),
    }
    begin = time.monotonic()
    # Start a new session, so that processes of rows are ended too.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end(process)
    return status, time.monotonic() - begin


def _end(process: subprocess.Popen) -> None:
    """Interrupts a program, which then ends the processes of its rows, and kills what still runs."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_finished(name: str, status: int | None, folder: pathlib.Path) -> bool:
    """Returns whether a part with this exit status has a report in which no row lacked time.

    The check also exits with status 1 if a kernel is wrong. That is a result, and it is not repeated.
    """
    report = _read(folder / f"{name}.json")
    ended = status == 0 if PARTS[name].resumes else status is not None
    return ended and bool(report) and all(row.get("note") != _rows.NO_TIME for row in report.get("rows", ()))


def _ended(folder: pathlib.Path) -> dict[str, Any]:
    return _read(folder / "parts.json")


def _read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _write_summary(folder: pathlib.Path) -> None:
    (folder / "summary.md").write_text(
        summary.markdown({name: _read(folder / f"{name}.json") for name in (*PARTS, "parts")})
    )


if __name__ == "__main__":
    main()
