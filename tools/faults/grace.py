"""Time from SIGTERM to the end of a run with a large state: `python -m tools.faults.grace [--layers=14]`.

A notice before a machine is taken away is SIGTERM on Kubernetes and Google Cloud, and SIGTERM or SIGUSR1 on SLURM. A
run then finishes its step, saves it and ends. This measures how long that takes, at each moment of a run. With 14
layers of width 1,024, parameters and Adam's two means are 2.1 GB.
"""

import argparse
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from tests.training import launching
from tools.faults.stage import PATIENCE, Stage, has_reported, steps

Moment = Callable[[pathlib.Path, launching.Started], bool]


def _is_restoring(run: pathlib.Path, one: launching.Started) -> bool:
    # The lock is taken before the state is initialized or restored, and the plan is printed after it.
    return f"process {one.process.pid} " in (run / "lock").read_text() if (run / "lock").exists() else False


def _says(words: str) -> Moment:
    return lambda run, one: any(line.startswith(words) for line in one.said())


MOMENTS: Mapping[str, Moment] = {
    "compiling": _says("training: step"),
    "an update": lambda run, one: has_reported(run),
    "a save": lambda run, one: any(run.glob("checkpoints/*tmp*")),
    "restoring": _is_restoring,
}


def measure(stage: Stage, run: pathlib.Path, moment: Moment, **options) -> tuple[float, int, int | None]:
    """Starts a run, sends SIGTERM at a moment; returns the seconds to its end, the exit code and its newest step."""
    started = stage.start(run, **options)
    launching.wait_until(lambda: moment(run, started[0]), started, timeout=PATIENCE)
    time.sleep(0.2)
    began = time.monotonic()
    started[0].send(signal.SIGTERM)
    code = started[0].wait(PATIENCE)
    return time.monotonic() - began, code, max(steps(run), default=None)


def main(arguments: Sequence[str]) -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args(arguments)
    print(
        "| SIGTERM during | seconds to the end | exit code | newest step saved |\n|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="grace-") as place:
        folder = pathlib.Path(place)
        (folder / "cache").mkdir()
        stage = Stage(folder, folder / "cache", "0")
        run = stage.new("run")
        for name, moment in MOMENTS.items():
            seconds, code, newest = measure(
                stage,
                run,
                moment,
                model__layers=options.layers,
                model__width=options.width,
                model__heads=8,
                training__scan_layers=True,
                training__steps=1000,
                training__checkpoint_every=4 if name == "a save" else 1000,
            )
            print(f"| {name} | {seconds:.1f} | {code} | {newest} |", flush=True)
        last = run / "checkpoints" / str(steps(run)[-1])
        size = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
        print(f"A checkpoint has {size / 1e9:.2f} GB.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
