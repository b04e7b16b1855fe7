"""Exports weights of runs and imports weights as runs.

    sympow weights export --workdir=runs/quickstart --out=quickstart.safetensors
    sympow weights import --weights=gpt2/model.safetensors --workdir=runs/gpt2

An import is a run at step 0. `sympow eval` and `sympow generate` can read it, `sympow train` can resume it, and other
runs can start from it with task.initial_run.
"""

import argparse
import pathlib
from collections.abc import Sequence

from sympow_jax import config
from sympow_jax.commands import command_line
from sympow_jax.training import cli
from sympow_jax.weights import files, runs

__all__ = ["main"]


def _parser(program: str) -> command_line.Parser:
    parser = command_line.Parser(prog=program, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="export|import")
    exporting = commands.add_parser("export", help="Write a run's newest checkpoint as safetensors.")
    exporting.add_argument("--workdir", required=True, metavar="DIR", help="Workdir of a training run.")
    exporting.add_argument(
        "--out",
        required=True,
        metavar="FILE.safetensors",
        help="File to write. The settings go to FILE.json.",
    )
    exporting.add_argument(
        "--dtype",
        default=files.DTYPES[0],
        choices=files.DTYPES,
        help="Dtype of the file; float32 loses nothing.",
    )
    importing = commands.add_parser(
        "import",
        help="Make a new workdir from safetensors.",
        epilog="Settings are changed with --config.GROUP.NAME=VALUE, as in training. `sympow train --help` lists them.",
    )
    importing.add_argument(
        "--weights",
        required=True,
        metavar="FILE.safetensors",
        help="File that `export` wrote, or GPT-2's model.safetensors.",
    )
    importing.add_argument("--workdir", required=True, metavar="DIR", help="Workdir to make.")
    importing.add_argument(
        "--config",
        metavar="FILE.json|CONFIG[:ARGUMENTS]",
        help="Settings of the run: the JSON that `export` wrote, GPT-2's config.json, or a config as for training, "
        "NAME or FILE.py. Default: the JSON beside the weights.",
    )
    importing.add_settings(hidden=True)
    return parser


def _read_settings(known: argparse.Namespace) -> config.Config:
    given = known.config
    # A JSON file has a suffix, which the names of configs do not have.
    if given is not None and pathlib.Path(given.partition(":")[0]).suffix in ("", ".py"):
        settings = config.load(given)
    else:
        settings = files.read_settings(files.settings_path(known.weights) if given is None else given)
    return command_line.read_settings(known, settings)


def main(arguments: Sequence[str], program: str = "sympow weights") -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    with cli.user_errors():
        known = _parser(program).parse_args(arguments)
        if known.command == "export":
            number, count = runs.export_run(known.workdir, known.out, dtype=known.dtype)
            print(f"{known.out} has the {count:,} numbers of step {number} of {known.workdir}")
        else:
            settings = _read_settings(known)
            count = runs.import_run(known.weights, settings, known.workdir)
            print(f"{known.workdir} is a run at step 0 with the {count:,} numbers of {known.weights}")
    return 0
