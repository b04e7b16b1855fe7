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
from sympow_jax.training import cli, flags
from sympow_jax.weights import files, runs

__all__ = ["main"]


def _parser(program: str) -> cli.Parser:
    parser = cli.Parser(prog=program, description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True, metavar="export|import")
    exporting = commands.add_parser(
        "export", help="a run's newest checkpoint as safetensors", allow_abbrev=False
    )
    exporting.add_argument("--workdir", required=True, metavar="DIR", help="the workdir of a training run")
    exporting.add_argument(
        "--out",
        required=True,
        metavar="FILE.safetensors",
        help="the file to write; the settings go to FILE.json",
    )
    exporting.add_argument(
        "--dtype",
        default=files.DTYPES[0],
        choices=files.DTYPES,
        help="of the file (default: %(default)s, which loses nothing)",
    )
    importing = commands.add_parser(
        "import",
        help="a new workdir from safetensors",
        epilog="Settings are changed with --config.a.b=value, as in training.",
        allow_abbrev=False,
    )
    importing.add_argument(
        "--weights",
        required=True,
        metavar="FILE.safetensors",
        help="what export wrote, or GPT-2's model.safetensors",
    )
    importing.add_argument("--workdir", required=True, metavar="DIR", help="the new workdir")
    importing.add_argument(
        "--config",
        metavar="FILE.json|CONFIG[:ARGUMENT]",
        help="the settings: the JSON that export wrote, GPT-2's config.json, or a config as for training, NAME or "
        "FILE.py (default: the JSON beside the weights)",
    )
    return parser


def _settings(given: str | None, weights: str, overrides: Sequence[str]) -> config.Config:
    # A JSON file has a suffix, which the names of configs do not have.
    if given is not None and pathlib.Path(given.partition(":")[0]).suffix in ("", ".py"):
        settings = config.load(given)
    else:
        settings = files.read_settings(files.settings_path(weights) if given is None else given)
    return config.override(settings, flags.read_overrides(overrides))


def main(arguments: Sequence[str], program: str = "sympow weights") -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    with cli.user_errors():
        known, rest = _parser(program).parse_known_args(arguments)
        if known.command == "export":
            if rest:
                raise ValueError(f"unexpected argument {rest[0]!r}; see --help")
            number, count = runs.export_run(known.workdir, known.out, dtype=known.dtype)
            print(f"{known.out} has the {count:,} numbers of step {number} of {known.workdir}")
        else:
            settings = _settings(known.config, known.weights, rest)
            count = runs.import_run(known.weights, settings, known.workdir)
            print(f"{known.workdir} is a run at step 0 with the {count:,} numbers of {known.weights}")
    return 0
