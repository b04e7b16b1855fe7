"""Checks the GPU kernels on this machine: `sympow check --brief`."""

import os
import pathlib
from collections.abc import Sequence

from pallas_kernels.check import run
from sympow_jax.commands import command_line
from sympow_jax.process import signals


def main(arguments: Sequence[str], program: str = "sympow check") -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    parser = command_line.Parser(prog=program, description=run.__doc__)
    parser.add_argument("--brief", action="store_true", help="End within 8 minutes, with fewer real shapes.")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="Run only cases whose name contains TEXT, and store no verdict. Repeat it to require several texts.",
    )
    parser.add_options(
        ("jobs", int, "N", min(run.MOST_JOBS, os.cpu_count() or 1), "Number of cases that run at once."),
        ("out", str, "FILE", None, "JSON file to write the outcomes to."),
    )
    with signals.user_errors():
        flags = parser.parse_args(arguments)
        return run.run_check(
            brief=flags.brief, only=flags.only, jobs=flags.jobs, out=flags.out and pathlib.Path(flags.out)
        )
