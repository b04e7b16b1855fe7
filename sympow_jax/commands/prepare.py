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
from sympow_jax.data import longcrawl64, prepare
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
        "--out", required=True, metavar="PATH", help="The .bin file or .zarr folder to write."
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
        default=longcrawl64.ROW_TOKENS,
        help="Tokens per row of `longcrawl64`.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="Files, folders or globs to read.")
    return parser


class _Terminated(KeyboardInterrupt):
    """Arrival of a notice, whose number is the argument; no code takes it for an error."""


def _terminate(number: int, frame: types.FrameType | None) -> None:
    del frame
    raise _Terminated(number)


@contextlib.contextmanager
def _stops() -> Iterator[None]:
    """Turns Ctrl-C, SIGTERM and SIGUSR1 into a line that says how to continue."""
    before = {number: signal.signal(number, _terminate) for number in signals.NOTICES}
    try:
        yield
    except KeyboardInterrupt as error:
        print("interrupted; the same command continues", file=sys.stderr, flush=True)
        number = error.args[0] if isinstance(error, _Terminated) else signal.SIGINT
        raise SystemExit(128 + number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Rate:
    """Describes progress, with the tokens per second since its creation."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._tokens: int | None = None

    def describe(self, progress: prepare.Progress) -> str:
        if self._tokens is None:
            self._tokens = progress.tokens  # of an earlier command
        rate = (progress.tokens - self._tokens) / (time.monotonic() - self._begin)
        return (
            f"{progress.done} of {progress.pieces} pieces, {progress.documents:,} documents, {progress.tokens:,} "
            f"tokens, {rate:,.0f} tokens/s"
        )


@contextlib.contextmanager
def _reporting() -> Iterator[Callable[[prepare.Progress], None]]:
    """Yields a function that shows progress on stderr: as a bar on a terminal, or else as a line now and then."""
    console, rate = rich.console.Console(stderr=True), _Rate()
    if console.is_terminal:
        with rich.progress.Progress(console=console, transient=True) as bar:
            task = bar.add_task("")

            def draw(progress: prepare.Progress) -> None:
                bar.update(
                    task, completed=progress.done, total=progress.pieces, description=rate.describe(progress)
                )

            yield draw
        return
    last = time.monotonic()

    def write(progress: prepare.Progress) -> None:
        nonlocal last
        line, now = rate.describe(progress), time.monotonic()
        if now - last >= _LINE_SECONDS:
            print(line, file=sys.stderr, flush=True)
            last = now

    yield write


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
