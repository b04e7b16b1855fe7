"""Checks every kernel on the GPU of this machine, each case in a process of its own.

    python -m pallas_kernels.check [--brief] [--only TEXT ...] [--jobs N] [--out FILE]

Small shapes come first, beginning with a copy that tells a broken toolchain apart. Shapes of real models follow; they
are timed. A case is right if its results are as close to plain JAX in float32 as their rounding allows and three runs
on the same arrays are equal to the bit. The verdict is kept in the user's cache directory: `implementation=None` uses
the kernels of a family only after all its cases were right here. Exits with status 0 if all were.
"""

import argparse
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

from pallas_kernels.check import supervisor, verdict

CASE_SECONDS = 75.0
# Small cases run side by side, since most of their time is compilation. Real ones are timed, one by one.
SMALL_JOBS = 4
BRIEF_SECONDS = 450.0
_DEVICE = "import jax; device = jax.devices()[0]; print(device.platform, device.device_kind, sep='|')"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for every case, keeps the verdict, and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--brief", action="store_true", help="end within 8 minutes, with fewer real shapes")
    parser.add_argument(
        "--only", action="append", help="only cases whose name contains this; gives no verdict"
    )
    parser.add_argument(
        "--jobs", type=int, default=min(SMALL_JOBS, os.cpu_count() or 1), help="small cases at once"
    )
    parser.add_argument("--out", type=pathlib.Path, help="write the outcomes as JSON to this file too")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    if (device_kind := _gpu()) is None:
        print("pallas_kernels.check needs an NVIDIA GPU that JAX sees; there is none here", file=sys.stderr)
        return 1
    # Only here: the cases import Pallas, which a machine without a GPU need not do to be told so.
    from pallas_kernels.check import cases

    chosen = [
        case
        for case in cases.CASES
        if (case.brief or not options.brief) and all(text in case.name for text in options.only or ())
    ]
    print(f"{device_kind}, driver {verdict.driver_version()}: {len(chosen)} cases", flush=True)
    deadline = begin + (BRIEF_SECONDS if options.brief else float("inf"))
    outcomes = []
    for real, jobs in ((False, options.jobs), (True, 1)):
        names = [case.name for case in chosen if case.real == real]
        command = functools.partial(_command, options=() if real else ("--untuned",))
        for outcome in supervisor.run_all(names, command, seconds=CASE_SECONDS, deadline=deadline, jobs=jobs):
            outcomes.append(outcome)
            print(outcome.line(), flush=True)
    family_of = {case.name: case.family for case in chosen}
    families = _families(outcomes, family_of)
    content = {"families": families, "cases": [vars(outcome) for outcome in outcomes]}
    if options.out:
        options.out.write_text(json.dumps(verdict.machine(device_kind) | content, indent=1) + "\n")
    for family, right in families.items():
        print(f"{family}: {'right' if right else 'not trusted'}")
    if not options.only:
        print(f"the verdict is in {verdict.store(device_kind, families, {'cases': content['cases']})}")
    return 0 if all(outcome.status is supervisor.Status.OK for outcome in outcomes) and outcomes else 1


def _families(outcomes, family_of) -> dict[str, bool]:
    """Whether each family of kernels can be trusted: the toolchain works and all its cases were right."""

    def right(family):
        found = [outcome.status for outcome in outcomes if family_of[outcome.case] == family]
        return bool(found) and all(status is supervisor.Status.OK for status in found)

    return {family: right("toolchain") and right(family) for family in verdict.FAMILIES}


def _command(case: str, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "pallas_kernels.check.case_process", case, *options]


def _gpu() -> str | None:
    """Kind of the first GPU, asked of another process so that this one holds no memory of it."""
    done = subprocess.run(
        [sys.executable, "-c", _DEVICE],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    platform, _, kind = done.stdout.strip().rpartition("\n")[2].partition("|")
    return kind if platform == "gpu" else None


if __name__ == "__main__":
    sys.exit(main())
