"""Turns text into token files: `sympow prepare --format=bin --out=train.bin FILES...`."""

import contextlib
import shlex
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence

import rich.console
import rich.progress

from sympow_jax.commands import command_line
from sympow_jax.config import literals
from sympow_jax.data import prepare
from sympow_jax.data.sources import zarr
from sympow_jax.process import signals, streams, workdir

__all__ = ["main"]

# Seconds between two lines about the progress, where the output is not a terminal.
_LINE_SECONDS = 5.0


def _parser(program: str) -> command_line.Parser:
    parser = command_line.Parser(prog=program, description=prepare.__doc__)
    parser.add_argument(
        "--format", choices=("bin", "longcrawl64"), required=True, help="Format of the output, as above."
    )
    parser.add_argument(
        "--out", required=True, metavar="PATH", help="Folder to write, which ends in .bin or .zarr."
    )
    parser.add_argument(
        "--text_column",
        metavar="NAME",
        help="Column of parquet files, or field of JSON lines, that holds the text of a document. Without it, every "
        "file is a document.",
    )
    parser.add_argument(
        "--tokenizer",
        default="byte",
        metavar="NAME",
        help="`byte`, a `tokenizers` JSON file, a folder that has it as `tokenizer.json`, `hf://ORG/NAME`, or the name "
        "of a tiktoken encoding.",
    )
    parser.add_argument(
        "--separator", type=int, metavar="ID", help="Id that ends a document. Default: the tokenizer's."
    )
    parser.add_argument(
        "--shortest_document",
        type=int,
        metavar="N",
        default=1,
        help="Number of tokens, with the separator, of the shortest document that is written; shorter ones are left "
        "out, and counted.",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", default=1, help="Number of processes that tokenize."
    )
    parser.add_argument(
        "--row_tokens",
        type=int,
        metavar="N",
        default=zarr.ROW_TOKENS,
        help="Tokens per row of `longcrawl64`.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="Files, folders or globs to read.")
    return parser


@contextlib.contextmanager
def _stops() -> Iterator[None]:
    """Turns Ctrl-C, SIGTERM and SIGUSR1 into a line that says how to continue."""
    received = [signal.SIGINT]

    def stop(number: int, frame: types.FrameType | None) -> None:
        del frame
        received[:] = [signal.Signals(number)]
        raise KeyboardInterrupt  # which no code takes for an error

    before = {number: signal.signal(number, stop) for number in signals.NOTICES}
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr, flush=True)
        raise SystemExit(128 + received[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _reporting() -> Iterator[Callable[[prepare.Progress], None]]:
    """Yields a function that shows progress on stderr: as a bar on a terminal, or else as a line now and then."""
    console, begin = rich.console.Console(stderr=True), time.monotonic()
    earlier, last = None, begin  # tokens of an earlier command, and the time of the last line
    bar = rich.progress.Progress(console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("")

    def show(progress: prepare.Progress) -> None:
        nonlocal earlier, last
        earlier, now = progress.tokens if earlier is None else earlier, time.monotonic()
        line = (
            f"{progress.done} of {progress.pieces} files, {progress.documents:,} documents, {progress.tokens:,} "
            f"tokens, {(progress.tokens - earlier) / (now - begin):,.0f} tokens/s"
        )
        bar.update(task, completed=progress.done, total=progress.pieces, description=line)
        if not console.is_terminal and now - last >= _LINE_SECONDS:
            print(line, file=sys.stderr, flush=True)
            last = now

    with bar:
        yield show


def main(arguments: Sequence[str], program: str = "sympow prepare") -> int:
    """Writes the token files and prints the settings that read them; returns the exit code."""
    with signals.user_errors():
        flags = _parser(program).parse_args(arguments)
        suffix = {"bin": ".bin", "longcrawl64": ".zarr"}[flags.format]
        if not flags.out.rstrip("/").endswith(suffix):
            raise ValueError(f"--out is {flags.out}; with --format={flags.format} it must end in {suffix}")
        if flags.format == "longcrawl64":
            workdir.require_path("--out", flags.out, "Zarr arrays", refused="\\")
        options = prepare.Options(
            tokenizer=flags.tokenizer,
            separator=flags.separator,
            text_column=flags.text_column,
            shortest_document=flags.shortest_document,
            workers=flags.workers,
        )
        with _stops(), _reporting() as report:
            if flags.format == "bin":
                about = prepare.write_bin(flags.out, flags.files, options, report=report)
            else:
                about = prepare.write_longcrawl64(
                    flags.out, flags.files, options, row_tokens=flags.row_tokens, report=report
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
