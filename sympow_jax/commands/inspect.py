"""Draws what a trained model does with a text: `sympow inspect --workdir=runs/quickstart --text="def main():"`."""

import codecs
import os
import pathlib
from collections.abc import Sequence

from sympow_jax.commands import command_line
from sympow_jax.process import compile_cache, signals, streams

# A file may be infinite. So much text has more tokens than are drawn.
_TEXT_BYTES = 1 << 20


def main(arguments: Sequence[str], program: str = "sympow inspect") -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    parser = command_line.Parser(
        prog=program,
        description="Draws what a trained model does with a text: attention maps (attention.png), half-lives of decays "
        "(half_life.png) and rotation rates (rotation.png), and writes the numbers to inspect.json. Each "
        "picture is also written as PDF.",
    )
    parser.add_workdir()
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--text", metavar="TEXT", help="Text to draw.")
    texts.add_argument("--text_file", metavar="FILE", help="File with the text.")
    parser.add_options(
        ("layer", int, "L", None, "Layer to draw, from 0. Default: all."),
        ("out", str, "DIR", None, "Folder to write to. Default: WORKDIR/inspect."),
    )
    parser.add_tokenizer()
    with signals.user_errors():
        flags = parser.parse_args(arguments)
        compile_cache.cache_programs()
        # Imported only now, because it takes seconds and needs the extra `train`, which `--help` does not.
        from sympow_jax.inspection import inspect

        # The bytes that the shell passed, whether UTF-8 or not.
        given = flags.text_file is None
        if given:
            text = os.fsencode(flags.text)
        else:
            with pathlib.Path(flags.text_file).open("rb") as stream:
                text = stream.read(_TEXT_BYTES).removeprefix(codecs.BOM_UTF8)
        name = "--text" if given else f"--text_file={flags.text_file}"
        streams.say(
            *inspect.inspect(
                flags.workdir, text, name=name, layer=flags.layer, out=flags.out, tokenizer=flags.tokenizer
            )
        )
        return 0
