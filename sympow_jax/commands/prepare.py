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
        ("row_tokens", int, "N", zarr.ROW_TOKENS, "Tokens per row of `longcrawl64`."),
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="Files, folders or globs to read.")
    with signals.user_errors():
        flags = parser.parse_args(arguments)
        suffix = {"bin": ".bin", "longcrawl64": ".zarr"}[flags.format]
        if not flags.out.rstrip("/").endswith(suffix):
            raise ValueError(f"--out is {flags.out}; with --format={flags.format} it must end in {suffix}")
        if flags.format == "longcrawl64":
            workdir.require_path("--out", flags.out, "Zarr arrays", refused="\\")
        names = ("tokenizer", "separator", "text_column", "shortest_document", "workers")
        options = prepare.Options(**{name: getattr(flags, name) for name in names})
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
