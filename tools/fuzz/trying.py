"""Inputs for one reader, made by hypothesis, with a limit of time and memory for each."""

import concurrent.futures
import contextlib
import dataclasses
import faulthandler
import io
import multiprocessing
import pathlib
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis

from tools.fuzz import readers

__all__ = ["Outcome", "try_in_process", "try_reader"]

_SECONDS = 20
_MEMORY_BYTES = 2 << 30
_CHARACTERS = 600
# Seconds after which a process ends because its input does not heed the limit of processor time.
_PATIENCE = 300


@dataclasses.dataclass
class Outcome:
    """Results of a reader.

    Attributes:
        accepted: number of inputs that succeeded.
        refused: number of inputs that ended in one line.
        problem: description of the input that ended otherwise, after which no other is tried; None if there is none.
        longest: characters of the longest error.
        seconds: time that all took.
    """

    accepted: int = 0
    refused: int = 0
    problem: str | None = None
    longest: int = 0
    seconds: float = 0.0


class _Problem(Exception):
    pass


class _TooSlow(BaseException):
    """No `Exception`, so that a reader that catches all exceptions cannot catch it."""


def _stop(*_: Any) -> None:
    raise _TooSlow


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Raises _TooSlow after `_SECONDS` of processor time, and lets memory run out after `_MEMORY_BYTES` more."""
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler, (memory, most) = signal.signal(signal.SIGPROF, _stop), resource.getrlimit(resource.RLIMIT_AS)
    faulthandler.dump_traceback_later(_PATIENCE, exit=True)
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, most))
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (memory, most))
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGPROF, handler)


def _read(reader: readers.Reader, value: Any) -> str | None:
    """Gives one input to a reader; returns the error with which it was refused, or None.

    Raises:
        _Problem: it took too long, or ended in an error that is too long or of another type.
    """
    try:
        with _limits(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            reader.read(value)
    except readers.ACCEPTED as error:
        text = str(error)
        if "\n" in text or len(text) > _CHARACTERS:
            raise _Problem(f"an error of {len(text)} characters: {text[:300]}") from error
        return text
    except _TooSlow as error:
        raise _Problem(f"more than {_SECONDS} s") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # Rust's panics are no Exception
        line = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} in {line.filename}:{line.lineno}"
        raise _Problem(f"{kind}: {str(error)[:200]}") from error
    return None


def try_reader(name: str, examples: int, seed: int, last: pathlib.Path) -> Outcome:
    """Gives a reader its good input, its cases and random inputs, until one is a problem, which is shrunk.

    Args:
        name: name of the reader.
        examples: number of random inputs.
        seed: seed of what is random; the same command tries the same inputs.
        last: file to which each input is written before it is tried.

    Raises:
        ValueError: the good input is refused.
    """
    reader, outcome, began = readers.READERS[name], Outcome(), time.monotonic()
    # Before the others, which would be charged with the memory and time of what is made only once.
    if refused := _read(reader, reader.good):
        raise ValueError(f"{name}: a good input is refused: {refused}")

    def attempt(value: Any) -> None:
        last.write_text(repr(value)[:2000])
        error = _read(reader, value)
        if error is None:
            outcome.accepted += 1
        else:
            outcome.refused, outcome.longest = outcome.refused + 1, max(outcome.longest, len(error))

    for case in reader.cases:
        attempt = hypothesis.example(case)(attempt)
    configured = hypothesis.settings(
        max_examples=examples,
        # Inputs have a limit of processor time. Other time depends on other programs, and so does the time in which
        # hypothesis makes inputs.
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
        database=None,  # a problem becomes a case
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink],
        report_multiple_bugs=False,
        verbosity=hypothesis.Verbosity.quiet,
    )
    try:
        configured(hypothesis.seed(seed)(hypothesis.given(reader.bad)(attempt)))()
    # Hypothesis has errors of its own, as of an input that fails only once.
    except (_Problem, hypothesis.errors.HypothesisException) as error:
        outcome.problem = f"{error}; the input is {last.read_text()}"
    outcome.seconds = time.monotonic() - began
    return outcome


def try_in_process(tries: Callable[[pathlib.Path], Outcome]) -> Outcome:
    """Returns the result of a function, run in a new process, of the file to which it writes each input.

    If the process dies, the problem is its last input. Shrinking it would need a new process for each input, which
    takes seconds to start.
    """
    with (
        tempfile.NamedTemporaryFile("r") as last,
        concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        try:
            return pool.submit(tries, pathlib.Path(last.name)).result()
        except concurrent.futures.BrokenExecutor:
            return Outcome(problem=f"the process died; the input is {last.read()}")
