"""Time from SIGTERM to the end of a run with a large state: `python -m tools.faults.grace [--layers=14]`.

A notice before a machine is taken away is SIGTERM on Kubernetes and Google Cloud, and SIGTERM or SIGUSR1 on SLURM. A
run then finishes its step, saves it and ends. Before its first step there is nothing to save, and it ends at once. This
measures how long that takes, at each moment of a run. With 14 layers of width 1,024, parameters and Adam's two means
are 2.1 GB.
"""

import argparse
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tools import launching
from tools.faults.stage import PATIENCE, Stage, losses, resumed_at, steps

# Seconds from the beginning of a moment to the signal.
_DELAY = 0.2


class Moment(NamedTuple):
    """Moment of a run.

    Attributes:
        is_now: returns whether a process is in it, from the workdir, the process, and the number of losses that were
            in the workdir before it started.
        checkpoint_every: number of steps between the checkpoints.
    """

    is_now: Callable[[pathlib.Path, launching.Started, int], bool]
    checkpoint_every: int = 1000


def _is_restoring(run: pathlib.Path, one: launching.Started, before: int) -> bool:
    # The lock is taken before the state is initialized or restored.
    lock = run / "lock"
    locked = lock.exists() and f"process {one.process.pid} " in lock.read_text()
    return locked and resumed_at(one) is None


# They share a workdir, in this order: the last needs a checkpoint.
MOMENTS: Mapping[str, Moment] = {
    "compiling": Moment(lambda run, one, before: resumed_at(one) is not None and len(losses(run)) == before),
    "an update": Moment(lambda run, one, before: len(losses(run)) > before),
    "a save": Moment(lambda run, one, before: any(run.glob("checkpoints/*tmp*")), checkpoint_every=4),
    "restoring": Moment(_is_restoring),
}


def measure(stage: Stage, run: pathlib.Path, name: str, **options) -> tuple[float, int, int | None]:
    """Starts a run, sends SIGTERM at a moment; returns the seconds to its end, the exit code and its newest step.

    Exits with one line if the moment is over before the signal.
    """
    moment, before = MOMENTS[name], len(losses(run))
    (one,) = stage.start(run, training__checkpoint_every=moment.checkpoint_every, **options)
    launching.wait_until(lambda: moment.is_now(run, one, before), [one], timeout=PATIENCE)
    time.sleep(_DELAY)
    if not moment.is_now(run, one, before):
        one.process.kill()
        one.process.join()
        sys.exit(f"{name} takes less than {_DELAY} s; measure a larger model with --layers or --width")
    began = time.monotonic()
    one.send(signal.SIGTERM)
    code = one.wait(PATIENCE)
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
    with tempfile.TemporaryDirectory(prefix="grace-") as temporary:
        folder = pathlib.Path(temporary)
        (folder / "cache").mkdir()
        stage = Stage(folder, folder / "cache", "0")
        run = stage.new("run")
        for name in MOMENTS:
            seconds, code, newest = measure(
                stage,
                run,
                name,
                model__layers=options.layers,
                model__width=options.width,
                model__heads=8,
                training__scan_layers=True,
                training__steps=1000,
            )
            print(f"| {name} | {seconds:.1f} | {code} | {newest} |", flush=True)
        last = run / "checkpoints" / str(steps(run)[-1])
        size = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
        print(f"A checkpoint has {size / 1e9:.2f} GB.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
