"""Turns text into token files: `sympow prepare --format=bin --out=train.bin FILES...`."""

import contextlib
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import rich.console

from sympow_jax.commands import command_line
from sympow_jax.config import literals
from sympow_jax.data import prepare
from sympow_jax.data.sources import zarr
from sympow_jax.process import progress, signals, streams, workdir


@contextlib.contextmanager
def _interrupted_once() -> Iterator[None]:
    """Raises KeyboardInterrupt at the first signal, and ignores the same one after it, which `uv run` forwards."""

    def stop(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt(number, "the same command continues")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, *signals.NOTICES)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str], program: str = "sympow prepare") -> int:
    """Writes the token files and prints the settings that read them; returns the exit code."""
    parser = command_line.Parser(prog=program, description=prepare.__doc__)
    parser.add_options(
        ("format", ("bin", "longcrawl64"), None, ..., "Format of the output, as above."),
        ("out", str, "PATH", ..., "Folder to write, which ends in .bin or .zarr."),
        (
            *("text_column", str, "NAME", None),
            "Column of parquet files, or field of JSON lines, that holds the text of a document. Without it, every "
            "file is a document.",
        ),
        (
            *("tokenizer", str, "NAME", "byte"),
            "`byte`, a `tokenizers` JSON file, a folder that has it as `tokenizer.json`, `hf://ORG/NAME`, or the name "
            "of a tiktoken encoding.",
        ),
        ("separator", int, "ID", None, "Id that ends a document. Default: the tokenizer's."),
        (
            *("shortest_document", int, "N", 1),
            "Number of tokens, with the separator, of the shortest document that is written; shorter ones are left "
            "out, and counted.",
        ),
        ("workers", int, "N", 1, "Number of processes that tokenize."),
        ("row_tokens", int, "N", None, f"Tokens per row of `longcrawl64`. Default: {zarr.ROW_TOKENS:,}."),
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="Files, folders or globs to read.")
    with _interrupted_once(), signals.user_errors():
        flags = parser.parse_args(arguments)
        suffix = {"bin": ".bin", "longcrawl64": ".zarr"}[flags.format]
        if not flags.out.rstrip("/").endswith(suffix):
            raise ValueError(f"--out is {flags.out}; with --format={flags.format} it must end in {suffix}")
        if flags.format == "bin" and flags.row_tokens is not None:
            raise ValueError(
                "--row_tokens is for --format=longcrawl64: a .bin file has no rows; leave it out"
            )
        if flags.format == "longcrawl64":
            workdir.require_path("--out", flags.out, "Zarr arrays", refused="\\")
        names = ("tokenizer", "separator", "text_column", "shortest_document", "workers")
        options = prepare.Options(**{name: getattr(flags, name) for name in names})
        began, earlier = time.monotonic(), None  # the tokens of an earlier command
        with progress.Progress(rich.console.Console(stderr=True), "file", None) as shown:

            def report(found: prepare.Progress) -> None:
                nonlocal earlier
                earlier = found.tokens if earlier is None else earlier
                rate = (found.tokens - earlier) / (time.monotonic() - began)
                text = f"{found.documents:,} documents, {found.tokens:,} tokens, {rate:,.0f} tokens/s"
                shown.show(found.done, text, total=found.pieces)

            if flags.format == "bin":
                about = prepare.write_bin(flags.out, flags.files, options, report=report)
            else:
                row_tokens = zarr.ROW_TOKENS if flags.row_tokens is None else flags.row_tokens
                about = prepare.write_longcrawl64(
                    flags.out, flags.files, options, row_tokens=row_tokens, report=report
                )
        streams.say(
            ", ".join(f"{name} {value}" for name, value in about.items() if name != "tokenizer_fingerprint")
        )
        settings = {
            "data.source": "tokens" if flags.format == "bin" else "longcrawl64",
            "data.paths": (flags.out,),
            "data.token_dtype": about["token_dtype"],
            "data.document_separator": about["separator"],
            "data.tokenizer": about["tokenizer"],
            "model.vocab_size": about["vocab_size"],
            "evaluation.context_lengths": None,  # those that fit the documents
        }
        given = (
            f"--config.{name}={shlex.quote(literals.written(value))}" for name, value in settings.items()
        )
        streams.say(f"next: sympow train --config=quickstart --workdir=NEW {' '.join(given)}")
    return 0
