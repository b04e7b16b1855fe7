"""Draws what a trained model does with a text: `sympow inspect --workdir=runs/quickstart --text="def main():"`."""

import argparse
import os
import pathlib
from collections.abc import Sequence

from sympow_jax.evaluation import inspect
from sympow_jax.training import cli

__all__ = ["main"]


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = cli.Parser(
        prog=program,
        description="Draws what a trained model does with a text: attention maps (attention.png), half-lives of decays "
        "(half_life.png) and rotation rates (rotation.png), and writes the numbers to inspect.json.",
        allow_abbrev=False,
    )
    parser.add_argument("--workdir", required=True, metavar="DIR", help="the workdir of a training run")
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--text", metavar="TEXT", help=f"of at most {inspect.MAX_TOKENS} tokens")
    texts.add_argument("--text_file", metavar="FILE", help="a file that holds the text")
    parser.add_argument("--layer", type=int, metavar="L", help="one layer, from 0 (default: all)")
    parser.add_argument("--out", metavar="DIR", help="the folder to write to (default: WORKDIR/inspect)")
    parser.add_tokenizer()
    return parser.parse_args(arguments)


def main(arguments: Sequence[str], program: str = "sympow inspect") -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    with cli.user_errors():
        flags = _parse(arguments, program)
        # The bytes that the shell passed, whether UTF-8 or not.
        given = flags.text_file is None
        text = os.fsencode(flags.text) if given else pathlib.Path(flags.text_file).read_bytes()
        name = "--text" if given else f"--text_file={flags.text_file}"
        for line in inspect.inspect(
            flags.workdir, text, name=name, layer=flags.layer, out=flags.out, tokenizer=flags.tokenizer
        ):
            print(line)
        return 0
