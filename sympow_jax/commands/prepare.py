"""Turns text into token files: `sympow prepare --format=bin --out=train.bin FILES...`."""

from collections.abc import Sequence

from sympow_jax.commands import command_line
from sympow_jax.data import files, longcrawl64, prepare
from sympow_jax.data import tokenizer as tokenizer_lib
from sympow_jax.training import cli

__all__ = ["main"]


def _parser(program: str) -> command_line.Parser:
    parser = command_line.Parser(prog=program, description=prepare.__doc__)
    parser.add_argument(
        "--format", choices=("bin", "longcrawl64"), required=True, help="Format of the output, as above."
    )
    parser.add_argument(
        "--out", required=True, metavar="PATH", help="The .bin file or .zarr folder to write."
    )
    parser.add_argument(
        "--tokenizer",
        default="byte",
        metavar="NAME",
        help="`byte`, a `tokenizers` JSON file, or the name of a tiktoken encoding.",
    )
    parser.add_argument(
        "--separator", type=int, metavar="ID", help="Id that ends a document. Default: the tokenizer's."
    )
    parser.add_argument(
        "--row_tokens",
        type=int,
        metavar="N",
        default=longcrawl64.ROW_TOKENS,
        help="Tokens per row of `longcrawl64`.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="Files, folders or globs to read.")
    return parser


def main(arguments: Sequence[str], program: str = "sympow prepare") -> int:
    """Writes the token files and prints the settings that read them; returns the exit code."""
    with cli.user_errors():
        options = _parser(program).parse_args(arguments)
        if options.row_tokens < 1:
            raise ValueError(f"--row_tokens is {options.row_tokens}; it must be at least 1")
        if options.separator is not None and not 0 <= options.separator < 1 << 32:
            raise ValueError(
                f"--separator is {options.separator}; it must be an id from 0 to {(1 << 32) - 1}"
            )
        tokenizer = tokenizer_lib.load(options.tokenizer)
        found = files.find("files", options.files)
        if options.format == "bin":
            about = prepare.write_bin(options.out, found, tokenizer, separator=options.separator)
        else:
            about = prepare.write_longcrawl64(
                options.out, found, tokenizer, separator=options.separator, row_tokens=options.row_tokens
            )
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    source = "tokens" if options.format == "bin" else "longcrawl64"
    print(
        f"read it with data.source={source} data.paths={options.out} data.token_dtype={about['token_dtype']} "
        f"data.document_separator={about['separator']} and model.vocab_size at least {about['vocab_size']}"
    )
    return 0
