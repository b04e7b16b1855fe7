"""Checks every kernel on the GPU of this machine, each case in a process of its own.

Small shapes come first, beginning with a copy that tells a broken toolchain apart. Shapes of real models follow; they
are timed. A case is right if its results match plain float32 JAX within their rounding error. Three runs on the same
arrays must also agree bit for bit. The verdict is kept in the user's cache directory: `implementation=None` uses the
kernels of a family only after all its cases that ran were right. Exits with status 0 if every case was right.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

from pallas_kernels.check import supervisor, verdict

# Compilation, nearly all of a case's time, takes longer with more cases at once: with 15 on 16 cores, up to 54 s for
# one of a pass's kernels, of which there are up to four.
CASE_SECONDS = 300.0
# Each process has a few GB of the GPU's memory.
MOST_JOBS = 16
BRIEF_SECONDS = 450.0
# Prints the kind of the first device and, for a GPU, its compute capability.
_DEVICE = """
import jax
device = jax.devices()[0]
print(device.device_kind, getattr(device, "compute_capability", "") if device.platform == "gpu" else "", sep="|")
"""


def run_check(
    *, brief: bool = False, only: Sequence[str] = (), jobs: int = 1, out: pathlib.Path | None = None
) -> int:
    """Prints a line for every case, stores the verdict, and returns the exit status.

    Args:
        brief: end within 8 minutes, with fewer real shapes.
        only: texts that the name of every case must contain. If there are any, no verdict is stored.
        jobs: number of cases that run at once. They take turns on the GPU.
        out: file for the outcomes as JSON, or None.

    Raises:
        ValueError: JAX sees no NVIDIA Hopper GPU.
    """
    begin = time.monotonic()
    device_kind, problem = _gpu()
    if problem:
        raise ValueError(f"{verdict.COMMAND} needs an NVIDIA Hopper GPU that JAX sees; {problem}")
    # Imported late, since the cases import Pallas.
    from pallas_kernels.check import cases

    chosen = [
        case for case in cases.CASES if (case.brief or not brief) and all(text in case.name for text in only)
    ]
    print(f"{device_kind}, driver {verdict.driver_version()}: {len(chosen)} cases", flush=True)
    deadline = begin + (BRIEF_SECONDS if brief else float("inf"))
    outcomes = []
    names, module = [case.name for case in chosen], "pallas_kernels.check.case_process"
    for outcome in supervisor.run_all(
        names,
        lambda name: [sys.executable, "-m", module, name],
        seconds=CASE_SECONDS,
        deadline=deadline,
        jobs=jobs,
    ):
        outcomes.append(outcome)
        print(outcome.line(), flush=True)
    details = {"brief": brief, "cases": [vars(outcome) for outcome in outcomes]}
    if not only:
        families = _families(outcomes, {case.name: case.family for case in chosen})
        for family in verdict.FAMILIES:
            print(f"{family}: {_WORDS[families.get(family)]}")
        print(f"the verdict is in {verdict.store(device_kind, families, details)}")
    if out:  # after the verdict, which does not need it
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(verdict.machine(device_kind) | details, indent=1) + "\n")
    return 0 if all(outcome.status is supervisor.Status.OK for outcome in outcomes) and outcomes else 1


_WORDS = {True: "right", False: "not to be trusted", None: "not decided, its cases did not all run"}


def _families(outcomes, family_of) -> dict[str, bool]:
    """Returns whether each family of kernels can be trusted.

    Families whose cases were right but did not all run are left out.
    """

    def right(family):
        found = {outcome.status for outcome in outcomes if family_of[outcome.case] == family}
        if found <= {supervisor.Status.OK, supervisor.Status.SKIPPED}:
            return None if supervisor.Status.SKIPPED in found or not found else True
        return False

    toolchain = right("toolchain")
    verdicts = {family: right(family) if toolchain else toolchain for family in verdict.FAMILIES}
    return {family: found for family, found in verdicts.items() if found is not None}


def _gpu() -> tuple[str, str]:
    """Returns the kind of the first GPU and, if it cannot be used, the reason.

    The query runs in another process, so that this one holds no GPU memory.
    """
    done = subprocess.run(
        [sys.executable, "-c", _DEVICE],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return "", f"JAX could not look: {(done.stderr.strip().splitlines() or ['no message'])[-1][:300]}"
    kind, capability = lines[-1].split("|")
    if not capability:
        return "", "there is none here"
    if not capability.startswith("9."):
        return "", f"{kind} has compute capability {capability}, not 9.x"
    return kind, ""
