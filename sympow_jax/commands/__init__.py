"""The command `sympow`: one subcommand for each program of the package.

`train.py`, `eval.py` and `generate.py` of the repository run the same programs.
"""

import importlib
import sys
from collections.abc import Sequence

from sympow_jax import extras, spelling
from sympow_jax.process import signals

__all__ = ["COMMANDS", "main", "run"]

COMMANDS = {
    "train": ("sympow_jax.commands.launch", "train a model, or resume a run"),
    "eval": ("sympow_jax.commands.evaluate", "evaluate runs on held-out data, by context length"),
    "generate": ("sympow_jax.commands.generate", "continue prompts with a trained model"),
    "prepare": ("sympow_jax.commands.prepare", "turn text files into token files"),
    "weights": ("sympow_jax.commands.weights", "export a run to safetensors, or import a run from them"),
    "inspect": (
        "sympow_jax.commands.inspect",
        "draw attention maps, half-lives and rotation rates for a text",
    ),
    "lm_eval": ("sympow_jax.commands.lm_eval", "evaluate a run on tasks of lm-eval"),
    "check": ("sympow_jax.commands.check", "check the GPU kernels on this machine"),
}
"""Module and help of each subcommand. The module has `main(arguments, program)`, which returns the exit code."""

_HELP = """usage: sympow COMMAND [ARGUMENTS]

Attention with a recurrent state whose size you choose, in JAX.

{}

sympow COMMAND --help lists the arguments of a command.
sympow --version prints the version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subcommand that the first argument names; returns the exit code.

    Args:
        arguments: arguments after `sympow`; None takes those of this process.
    """
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in COMMANDS:
        return run(name, rest, program=f"sympow {name}")
    if name in ("-h", "--help", "--version"):
        with signals.user_errors():
            if name == "--version":
                # Imported late, because package metadata takes longer to read than all of this module.
                print(importlib.import_module("importlib.metadata").version("sympow-jax"))
            else:
                print(_HELP.format("\n".join(f"  {x:<10}{text}" for x, (_, text) in COMMANDS.items())))
        return 0
    remedy = spelling.remedy(name, COMMANDS, otherwise=f"the commands are {', '.join(COMMANDS)}")
    print(f"error: sympow has no command {name!r}; {remedy}", file=sys.stderr)
    return 2


def run(name: str, arguments: Sequence[str], *, program: str) -> int:
    """Runs a subcommand and returns its exit code.

    Args:
        name: a key of `COMMANDS`.
        arguments: arguments after the program's name.
        program: what the user typed to start it, for usage and error messages.

    Raises:
        SystemExit: the user made a mistake, which is printed in one line, or asked for help.
    """
    with extras.required("train", program, exits=True):
        # Imported only now, because most subcommands import jax, which takes seconds.
        return importlib.import_module(COMMANDS[name][0]).main(arguments, program)
