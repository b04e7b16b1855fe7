"""Measures each row of a benchmark in a process of its own, with a time limit, and writes rows as they come.

A kernel that crashes or hangs loses only its own row. A benchmark measures one row with the flag `--row`.
"""

import argparse
import importlib.metadata
import itertools
import json
import pathlib
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import rich.console
import rich.markup
import rich.table

from pallas_kernels.check import supervisor, verdict
from sympow_jax.process import atomic

RESULTS = pathlib.Path(__file__).parent / "results"
# Characters of the line that is printed for a row.
_LINE = 400
# Row for which a process describes its device.
_DEVICE = {"device": True}
NO_TIME = "not measured: the time was over"
# The supervisor of the check judges errors; rows judge their own, and fail if they are too large.
_JUDGED = {"errors": {"row": 0.0}, "bounds": {"row": 0.0}, "different": []}


def in_processes(
    rows: Sequence[dict],
    command: Sequence[str],
    *,
    seconds: float,
    deadline: float = float("inf"),
    jobs: int = 1,
) -> Iterator[dict]:
    """Yields each row with its results or, if its process failed, a note.

    Args:
        rows: descriptions, to which the results are added.
        command: prints the result of a row, which is added to it as `--row=JSON`, by `measure_rows`.
        seconds: time limit of a row that is measured alone. Each of the other processes at once adds a quarter, since
            a row waits for the device while they use it.
        deadline: value of `time.monotonic` at which running rows are ended and after which none begins.
        jobs: number of processes at once. They compile at the same time, but take turns on the device.
    """
    outcomes = supervisor.run_all(
        [json.dumps(row) for row in rows],
        lambda name: [*command, f"--row={name}"],
        seconds=seconds * (1 + (jobs - 1) / 4),
        deadline=deadline,
        jobs=jobs,
    )
    for row, outcome in zip(rows, outcomes):
        if outcome.status is supervisor.Status.OK:
            yield row | {name: value for name, value in outcome.result.items() if name not in _JUDGED}
        elif outcome.status is supervisor.Status.SKIPPED:
            yield row | {"note": NO_TIME}
        else:
            yield row | {"note": outcome.detail.strip().splitlines()[-1].removeprefix("exit status 1: ")}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help shows the docstring of a benchmark as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def read_options(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses arguments, after adding the options that benchmarks of rows share to a benchmark's own."""
    add = parser.add_argument
    add("--out", type=pathlib.Path, help="the JSON file")
    smoke = "tiny shapes, on any device, in this process; writes only --out"
    add("--smoke", action="store_true", help=smoke)
    add("--jobs", type=int, default=1, help="rows that compile at once; they take turns on the device")
    add("--minutes", type=float, help="begin no row after this time")
    add("--resume", action="store_true", help="keep the rows that --out has, and measure only the others")
    add("--row", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it must be at least 1")
    if options.resume and options.out is None:
        parser.error("--resume needs --out, the file whose rows are kept")
    return options


def machine(*, gpu: bool = False) -> dict[str, Any]:
    """Returns the device and the package versions; raises NotImplementedError if it should be a GPU and is not."""
    device = jax.devices()[0]
    if gpu and device.platform != "gpu":
        raise NotImplementedError(f"JAX sees no GPU here, only {device.device_kind}")
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "processor": platform.processor() or platform.machine(),
        "driver": verdict.driver_version(),
        "jax": jax.__version__,
        "runtime": " ".join(device.client.platform_version.split()),
        "cudnn": version("nvidia-cudnn-cu13") or version("nvidia-cudnn-cu12"),
        "jax-linear-attention": version("jax-linear-attention"),
    }


def _machine_alone(smoke: bool) -> dict:
    return {"machine": machine(gpu=not smoke)}


def measure_rows(
    benchmark: str,
    rows: Sequence[dict],
    measure: Callable[[dict], dict],
    options: argparse.Namespace,
    *,
    seconds: float,
    most_seconds: float = float("inf"),
    name: str | None = None,
    device: Callable[[bool], dict] = _machine_alone,
    rates: Callable[[dict, dict], dict] = lambda row, device: {},
) -> dict:
    """Measures rows on the GPU and returns the report, which is written as JSON after each row.

    With --smoke, rows are measured in this process, on any device. With --resume, rows of the file at --out that were
    measured or failed are kept. A row is also one line on standard error, and may have a `machine`, which is added to
    that of the report. Exits with one line if there is no GPU, or if the file is of another device. With --row, prints
    the result of that row for `in_processes`, and exits.

    Args:
        benchmark: module that measures a row with the flag `--row`.
        rows: descriptions of all rows.
        measure: measures a row in this process.
        options: parsed by `read_options`.
        seconds: time limit of a row, see `in_processes`.
        most_seconds: without --minutes, no row begins after this time.
        name: without --out and --smoke, results are written to `benchmarks/results/<name>-<device>.json`.
        device: describes the device, with its `machine`, given whether --smoke is set.
        rates: what is added to a measured row, given the description of the device.
    """
    if options.row:
        row = json.loads(options.row)
        try:
            result = device(False) if row == _DEVICE else measure(row)
        except Exception as error:
            sys.exit(_one_line(error))
        print(supervisor.RESULT + json.dumps(result | _JUDGED), flush=True)
        sys.exit()
    end = time.monotonic() + (most_seconds if options.minutes is None else 60 * options.minutes)
    command = (sys.executable, "-m", benchmark)
    if options.smoke:
        described = device(True)
    else:
        described, *_ = in_processes([_DEVICE], command, seconds=seconds)
        if "note" in described:
            sys.exit(
                f"{benchmark} measures on a GPU: {described['note']}; --smoke runs tiny shapes without one"
            )
        described = {name: described[name] for name in ("machine", "ceilings") if name in described}
    here, path = described["machine"]["device"], options.out
    if path is None and name is not None and not options.smoke:
        path = RESULTS / f"{name}-{re.sub(r'[^a-z0-9]+', '-', here.lower()).strip('-')}.json"

    # Rows of an earlier report are finished unless there was no time for them.
    before: dict = {"rows": []}
    if options.resume and options.out.exists():
        before = json.loads(options.out.read_text())
        for fact, now in described["machine"].items():
            if (then := before["machine"].get(fact)) != now:
                sys.exit(f"{options.out} has rows of {fact} {then} and this is {now}; use another --out")
    finished, missing = [], []
    for row in rows:
        found = next((old for old in before["rows"] if old.items() >= row.items()), None)
        if found is None or found.get("note") == NO_TIME:
            missing.append(row)
        else:
            finished.append(found | {"machine": before["machine"]})

    def measured_here(row: dict) -> dict:
        try:
            return row | measure(row)
        except Exception as error:
            return row | {"note": _one_line(error)}

    measured: Iterable[dict] = map(measured_here, missing)
    if not options.smoke:
        measured = in_processes(missing, command, seconds=seconds, deadline=end, jobs=options.jobs)
    report: dict = {**described, "rows": []}
    for row in itertools.chain(finished, measured):
        row = row | rates(row, described)
        report["machine"] = report["machine"] | row.pop("machine", {})
        report["rows"].append(row)
        write(path, report)
        short = {name: value for name, value in row.items() if isinstance(value, str | int | float)}
        print(f"row {len(report['rows'])}: {json.dumps(short)}"[:_LINE], file=sys.stderr, flush=True)
    return report


def _one_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:200]
    # The message of what is not supported explains itself; others need their type's name.
    return text if isinstance(error, NotImplementedError) and text else f"{type(error).__name__}: {text}"


def version(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write(path: pathlib.Path | None, report: dict) -> None:
    """Writes a report as JSON; does nothing if the path is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replace(path) as draft:
            draft.write_text(json.dumps(report, indent=1) + "\n")


def say(row: dict) -> None:
    """Prints a row, its names and values, in one line."""
    values = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
    )
    print(", ".join(values), flush=True)


def print_machine(report: dict) -> None:
    """Prints the machine and the ceilings of a report."""
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items() if value))
    for name, rate in report.get("ceilings", {}).items():
        print(f"measured here: {rate:.4g} {name} per second")


def print_table(title: str, rows: Iterable[dict], columns: Mapping[str, tuple]) -> None:
    """Prints rows as a table. Each header has the name of a value, its format and, optionally, a factor.

    A value that a row lacks, or that is None, is a dash. Columns without a format have text, aligned to the left.
    """
    table = rich.table.Table(title=title)
    for header, (_, how, *_) in columns.items():
        table.add_column(header, justify="right" if how else "left", no_wrap=not header.endswith("note"))
    for row in rows:
        cells = []
        for name, how, *factor in columns.values():
            value = row.get(name)
            if value is not None:
                value = (how or "{}").format(value * factor[0] if factor else value)
            cells.append(rich.markup.escape(value or "-"))
        table.add_row(*cells)
    rich.console.Console(width=None if sys.stdout.isatty() else 200).print(table)
