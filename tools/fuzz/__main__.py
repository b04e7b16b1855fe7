"""Random bad inputs for readers: `python -m tools.fuzz [--examples=N] [--results=DIR] [--out=FILE.md]`.

Gives random inputs, and good ones after random changes, to every reader of files, settings and arguments. Each must
end in success, or in an error of one line of at most 600 characters, of the types that programs print without a
traceback. It must take less than 20 seconds of processor time, and less than 2 GiB of memory more than the reader's
imports.

The exit code is 1 if an input does not. An input is a function of the seed and its number, with which `--first` and
`--examples=1` repeat it.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Iterator, Sequence

import jax

SECONDS = 20
MEMORY_BYTES = 2 << 30
CHARACTERS = 600
# Seconds without a result after which a worker is ended. Its example did not heed the limit of processor time.
_PATIENCE = 300
_ACCEPTED, _REFUSED = "accepted", "refused"


class _TooSlow(BaseException):
    pass


def _stop(number: int, frame: types.FrameType | None) -> None:
    raise _TooSlow


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    """Raises _TooSlow after `SECONDS` of processor time."""
    before = signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _address_space() -> int:
    """Returns the bytes of address space that this process uses."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def try_one(name: str, seed: int, number: int) -> tuple[str, str]:
    """Gives one input to a reader.

    Returns:
        "accepted", "refused" with the error, or "problem" with what is wrong.
    """
    from tools.fuzz import readers

    source = random.Random(f"{seed} {name} {number}")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try:
            with _limited_time():
                readers.READERS[name](source, pathlib.Path(folder))
        except readers.ACCEPTED as error:
            text = str(error)
            if "\n" in text or len(text) > CHARACTERS + len(folder):
                return "problem", f"an error of {len(text)} characters: {text[:300]}"
            return _REFUSED, text
        except _TooSlow:
            return "problem", f"more than {SECONDS} s"
        except BaseException as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            return "problem", f"{type(error).__name__} in {line.filename}:{line.lineno}: {str(error)[:200]}"
    return _ACCEPTED, ""


def _work(name: str, seed: int, first: int, count: int) -> None:
    """Tries inputs, and prints a line for each; this process has the limits."""
    from tools.fuzz import readers

    # Before the limit, because it makes the good input and starts threads.
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(*readers.ACCEPTED):
        readers.READERS[name](random.Random(0), pathlib.Path(folder))
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY_BYTES, resource.RLIM_INFINITY))
    print(json.dumps(["ready", ""]), flush=True)
    for number in range(first, first + count):
        print(json.dumps(try_one(name, seed, number)), flush=True)


@dataclasses.dataclass
class Outcome:
    """Results of a reader.

    Attributes:
        counts: number of inputs by result.
        problems: number and description of each input with a problem.
        longest: characters of the longest error.
        seconds: time that all took.
    """

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    problems: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    longest: int = 0
    seconds: float = 0.0

    def row(self, name: str) -> str:
        """Returns the row of the table."""
        total = sum(self.counts.values())
        accepted, refused = (self.counts.get(result, 0) for result in (_ACCEPTED, _REFUSED))
        parts = (name, total, accepted, refused, len(self.problems), self.longest)
        return f"| {' | '.join(map(str, parts))} | {self.seconds:.0f} |"


def _results(name: str, seed: int, first: int, count: int) -> Iterator[tuple[str, str]]:
    """Yields the result of each input, from a worker that is replaced if it dies."""
    done = 0
    while done < count:
        arguments = [
            f"--worker={name}",
            f"--seed={seed}",
            f"--first={first + done}",
            f"--examples={count - done}",
        ]
        with subprocess.Popen(
            [sys.executable, "-m", "tools.fuzz", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        ) as worker:
            assert worker.stdout is not None
            watchdog = _Watchdog(worker)
            ready = False
            for line in worker.stdout:
                watchdog.reset()
                if not line.startswith("["):
                    continue  # of a library
                result, text = json.loads(line)
                if result == "ready":
                    ready = True
                    continue
                done += 1
                yield result, text
            watchdog.end()
            code = worker.wait()
        if not ready:
            raise RuntimeError(f"the worker of {name!r} ended with {code} before its first input")
        if done < count:
            done += 1
            yield "problem", f"the process ended with {code}"


class _Watchdog:
    """Kills a process that says nothing for too long."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self.reset()

    def reset(self) -> None:
        """Begins to wait anew."""
        signal.signal(signal.SIGALRM, lambda *_: self._process.kill())
        signal.alarm(_PATIENCE)

    def end(self) -> None:
        """Waits no longer."""
        signal.alarm(0)


def try_reader(name: str, seed: int, first: int, count: int) -> Outcome:
    """Gives inputs to a reader in a process with limits."""
    outcome, began = Outcome(), time.monotonic()
    for number, (result, text) in enumerate(_results(name, seed, first, count), start=first):
        outcome.counts[result] = outcome.counts.get(result, 0) + 1
        if result == _REFUSED:
            outcome.longest = max(outcome.longest, len(text))
        elif result != _ACCEPTED:
            outcome.problems.append((number, text))
            print(f"  {name}, input {number}: {text}", file=sys.stderr, flush=True)
    outcome.seconds = time.monotonic() - began
    return outcome


_HEAD = (
    "| reader | inputs | accepted | refused in one line | problems | longest line | seconds |",
    "|---|---|---|---|---|---|---|",
)


def _page(outcomes: dict[str, Outcome], command: str) -> str:
    summary = (__doc__ or "").split("\n\n")[1].replace("\n", " ")
    total = sum(sum(outcome.counts.values()) for outcome in outcomes.values())
    problems = sum(len(outcome.problems) for outcome in outcomes.values())
    made = f"Made by `{command}` (jax {jax.__version__}, python {platform.python_version()})."
    table = [*_HEAD, *(outcome.row(name) for name, outcome in outcomes.items())]
    end = f"{total:,} inputs, {problems} problems."
    return "\n".join(["# Bad inputs", "", summary, "", made, "", *table, "", end, ""])


def main(arguments: Sequence[str]) -> int:
    """Runs the program with the arguments after its name; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, default=1000, help="inputs per reader")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    parser.add_argument("--only", default="", help="readers whose name contains this")
    parser.add_argument(
        "--results", type=pathlib.Path, help="folder of earlier results, which are not repeated"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="also write the table of all readers to this Markdown file"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        _work(options.worker, options.seed, options.first, options.examples)
        return 0
    from tools.fuzz import readers

    outcomes: dict[str, Outcome] = {}
    print("\n".join(_HEAD), flush=True)
    for name in readers.READERS:
        path = options.results and options.results / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.json"
        if path and path.exists():
            outcomes[name] = Outcome(**json.loads(path.read_text()))
        elif options.only in name:
            outcomes[name] = try_reader(name, options.seed, options.first, options.examples)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(dataclasses.asdict(outcomes[name])))
        else:
            continue
        print(outcomes[name].row(name), flush=True)
    if options.out:
        options.out.write_text(_page(outcomes, f"python -m tools.fuzz {' '.join(arguments)}"))
    return int(any(outcome.problems for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
