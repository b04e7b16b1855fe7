"""Turns text into token files: `sympow prepare --format=bin --out=train.bin FILES...`."""

import argparse
from collections.abc import Sequence

from sympow_jax.data import files, longcrawl64, prepare
from sympow_jax.data import tokenizer as tokenizer_lib
from sympow_jax.training import cli

__all__ = ["main"]


def _parser(program: str) -> cli.Parser:
    parser = cli.Parser(prog=program, description=prepare.__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--format", choices=("bin", "longcrawl64"), required=True)
    parser.add_argument("--out", required=True, help="the .bin file or the .zarr folder to write")
    parser.add_argument(
        "--tokenizer",
        default="byte",
        help="byte, a tokenizers .json or a tiktoken encoding",
    )
    parser.add_argument(
        "--separator", type=int, help="the id that ends a document (default: the tokenizer's)"
    )
    parser.add_argument("--row_tokens", type=int, default=longcrawl64.ROW_TOKENS, help="longcrawl64 only")
    parser.add_argument("files", nargs="+", help="files, folders or globs")
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
