"""Time from SIGTERM to the end of a run with a large state: `python -m tools.faults.grace [--layers=14]`.

A notice before a machine is taken away is SIGTERM on Kubernetes and Google Cloud, and SIGTERM or SIGUSR1 on SLURM. A
run then finishes its step, saves it and ends. Before its first step there is nothing to save, and it ends at once. This
measures how long that takes, at each moment of a run. With 14 layers of width 1,024, parameters and Adam's two means
are 2.1 GB.
"""

import argparse
import functools
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from tools import launching
from tools.faults.stage import PATIENCE, Stage, losses, resumed_at, steps

# Seconds from the beginning of a moment to the signal.
_DELAY = 0.2


def _is_restoring(run: pathlib.Path, one: launching.Started, before: int) -> bool:
    # The lock is taken before the state is initialized or restored.
    lock = run / "lock"
    locked = lock.exists() and f"process {one.process.pid} " in lock.read_text()
    return locked and resumed_at(one) is None


# Each moment with whether a process is in it, from the workdir, the process and the number of losses before its start,
# and the number of steps between checkpoints. They share a workdir, in this order: the last needs a checkpoint.
MOMENTS: Mapping[str, tuple[Callable[[pathlib.Path, launching.Started, int], bool], int]] = {
    "compiling": (lambda run, one, before: resumed_at(one) is not None and len(losses(run)) == before, 1000),
    "an update": (lambda run, one, before: len(losses(run)) > before, 1000),
    "a save": (lambda run, one, before: any(run.glob("checkpoints/*tmp*")), 4),
    "restoring": (_is_restoring, 1000),
}


def main(arguments: Sequence[str]) -> int:
    """Runs the program with the arguments after its name; returns the exit code.

    Exits with one line if a moment is over before the signal.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--width", type=int, default=1024)
    flags = parser.parse_args(arguments)
    options = {"model__layers": flags.layers, "model__width": flags.width, "model__heads": 8}
    options |= {"training__scan_layers": True, "training__steps": 1000}
    print(
        "| SIGTERM during | seconds to the end | exit code | newest step saved |\n|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="grace-") as temporary:
        folder = pathlib.Path(temporary)
        (folder / "cache").mkdir()
        stage = Stage(folder, folder / "cache", "0")
        run = stage.new("run")
        for name, (is_now, every) in MOMENTS.items():
            before = len(losses(run))
            (one,) = stage.start(run, training__checkpoint_every=every, **options)
            launching.wait_until(functools.partial(is_now, run, one, before), [one], timeout=PATIENCE)
            time.sleep(_DELAY)
            if not is_now(run, one, before):
                one.process.kill()
                one.process.join()
                sys.exit(
                    f"{name} takes less than {_DELAY} s; measure a larger model with --layers or --width"
                )
            began = time.monotonic()
            one.send(signal.SIGTERM)
            code = one.wait(PATIENCE)
            newest = max(steps(run), default=None)
            print(f"| {name} | {time.monotonic() - began:.1f} | {code} | {newest} |", flush=True)
        last = run / "checkpoints" / str(steps(run)[-1])
        size = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
        print(f"A checkpoint has {size / 1e9:.2f} GB.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
