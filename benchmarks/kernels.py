"""Times the kernels on a GPU against plain JAX, cuDNN's flash attention and other packages.

    uv run --extra cuda13 python -m benchmarks.kernels [--part=NAME ...] [--out=FILE]

Inputs are bfloat16 with float32 gates, batch 1 and 8 heads unless a row says otherwise. Without --part, all parts
except `brief` run. `brief` has the most important comparisons and takes 8 minutes at most. Rows are written as JSON as
they come, to benchmarks/results/kernels-<gpu>[-<part>...].json unless --out is given, and printed as a table per part.

Every result is checked before it is timed. Rows at the end and in the middle of the sequence are compared with float32,
gradients are compared with float32 at 2,048 tokens, and all values must be finite. A row that is wrong has no time.
Contenders of one shape take turns in one process, with calls enqueued one after another on two sets of random inputs.
PyTorch contenders run in a process of their own. A kernel that crashes or hangs loses only its own row.

FLOPs are those that the mathematics needs, per token and head: 2 (D + E) T / 2 for pairs, or 4 F E for features (F is
their exact number) plus the pairs of a chunk of 128 and a window of 64. A backward pass counts 2.5 times the pairs and
twice the features. A decode step is measured in bytes. Fractions are relative to a large matrix product and a copy
measured in the same run. Memory is the peak of a call according to the compiler, arguments and results included.
"""

import argparse
import concurrent.futures
import itertools
import pathlib
import sys
import threading
import time
from collections.abc import Sequence

import rich.console
import rich.table

from benchmarks import _peers, _report, _shapes, _timing, _worker
from pallas_kernels.check import verdict

BRIEF_SECONDS = 450.0
# A worker without an event for this many seconds hangs: compilation takes a minute or two, tuning for Triton more.
SILENCE = {"jax": 300.0, "torch": 900.0}
BRIEF_SILENCE = 120.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables and writes the JSON. Exits with status 1 and one line if there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", action="append", choices=_shapes.PARTS, help="may be given several times")
    parser.add_argument("--out", type=pathlib.Path, help="the JSON file")
    parser.add_argument(
        "--smoke", action="store_true", help="tiny shapes, on any device, in this process; writes only --out"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="workers that compile at once; they take turns on the device"
    )
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it must be at least 1")
    started = time.monotonic()
    if options.smoke:
        comparisons = _shapes.SMOKE
    else:
        parts = options.part or [part for part in _shapes.PARTS if part != "brief"]
        comparisons = tuple(itertools.chain.from_iterable(_shapes.PARTS[part] for part in parts))
    report = Report(options.out, "" if options.smoke else "".join(f"-{part}" for part in options.part or ()))
    try:
        _measure(comparisons, report, options.smoke, started, options.jobs)
    except _worker.NoDevice as error:
        sys.exit(f"benchmarks.kernels measures on a GPU: {error}; --smoke runs tiny shapes without one")
    _print(report.content)


class Report:
    """The machine, its ceilings and the rows so far, written to a file after every addition."""

    def __init__(self, path: pathlib.Path | None, suffix: str):
        self.content: dict = {"machine": {"driver": verdict.driver_version()}, "ceilings": {}, "rows": []}
        self._file = _report.File("kernels", path, suffix)
        self._lock = threading.Lock()

    def add(self, event: dict) -> None:
        """Adds an event of `_worker.serve`; may be called from any thread."""
        with self._lock:
            for name in ("machine", "ceilings"):
                self.content[name] |= event.get(name, {})
            # Ceilings come from one worker, after the first rows of others.
            rows = [*self.content["rows"], *event.get("rows", ())]
            self.content["rows"] = [row | _rates(row, self.content["ceilings"]) for row in rows]
            self._file.write(self.content)


def _measure(comparisons, report, smoke, started, jobs):
    ours = _shapes.of_side(comparisons, lambda name: name not in _shapes.PEERS)
    absent = {name: "PyTorch's peers need a GPU" if smoke else _peers.missing(name) for name in _shapes.PEERS}
    for comparison in _shapes.of_side(comparisons, lambda name: absent.get(name) is not None):
        report.add({"rows": [_row(comparison, name, absent[name]) for name in comparison.contenders]})
    theirs = _shapes.of_side(comparisons, lambda name: name in absent and absent[name] is None)
    if smoke:
        _worker.serve("jax", ours, {}, report.add, ceilings=True, smoke=True)
        return
    brief = all(comparison.part == "brief" for comparison in comparisons)
    deadline = started + BRIEF_SECONDS if brief else float("inf")
    # PyTorch contenders have a worker of their own.
    with _timing.turns(jobs + bool(theirs)), concurrent.futures.ThreadPoolExecutor(jobs + 1) as pool:
        # A worker that waits for the others emits nothing for longer.
        patience = 1 + jobs / 4
        silence = (BRIEF_SILENCE if brief else SILENCE["jax"]) * patience
        running = [
            pool.submit(_supervise, "jax", part, report.add, silence, deadline, ceilings=number == 0)
            for number, part in enumerate(_deal(ours, jobs))
        ]
        running.append(pool.submit(_supervise_peers, theirs, report, deadline, SILENCE["torch"] * patience))
        for future in running:
            future.result()


def _deal(comparisons, jobs):
    """Splits the comparisons between workers, keeping their order.

    Comparisons that agree in mode, power and head size stay together where possible: a worker checks the gradients of
    shapes that differ only in length once, which saves compiling.
    """
    groups: dict[tuple, list] = {}
    for comparison in comparisons:
        shape = comparison.shape
        groups.setdefault((shape.mode, shape.power, shape.head_dim), []).append(comparison)
    most = -(-len(comparisons) // jobs)
    dealt: list[list] = [[] for _ in range(jobs)]
    for group in groups.values():
        for part in itertools.batched(group, most):
            min(dealt, key=len).extend(part)
    return [part for part in dealt if part]


def _supervise_peers(comparisons, report, deadline, silence):
    try:
        _supervise("torch", comparisons, report.add, silence, deadline)
    except _worker.NoDevice as error:
        for comparison in comparisons:
            report.add({"rows": [_row(comparison, name, str(error)) for name in comparison.contenders]})


def _supervise(side, comparisons, emit, silence, deadline, *, ceilings=True):
    command = [sys.executable, "-m", "benchmarks._worker", side]
    _worker.supervise(command, comparisons, emit, silence=silence, deadline=deadline, ceilings=ceilings)


def _row(comparison, name, note):
    return _worker.row(comparison, name) | {"note": note}


def _rates(row: dict, ceilings: dict) -> dict:
    """Returns FLOP/s (bytes/s for a step) and their fraction of the measured ceiling."""
    if "seconds" not in row:
        return {}
    shape = _shapes.Shape(**{name: row[name] for name in _shapes.FIELDS})
    unit, work = "flops", _shapes.flops(shape, row["contender"])
    if work is None:
        unit, work = "bytes", _shapes.step_bytes(shape)
    rate = work / row["seconds"]
    return {f"{unit}_per_second": rate, "fraction": rate / ceilings[unit] if unit in ceilings else None}


def _print(report: dict) -> None:
    console = rich.console.Console(width=None if sys.stdout.isatty() else 200)
    console.print(", ".join(f"{name} {value}" for name, value in report["machine"].items() if value))
    for name, reached in report["ceilings"].items():
        console.print(f"measured here: {_CEILINGS[name].format(reached)}")
    rows = sorted(report["rows"], key=lambda row: list(_shapes.PARTS).index(row["part"]))
    for part, of_part in itertools.groupby(rows, key=lambda row: row["part"]):
        console.print(_table(part, sorted(of_part, key=_order)))


def _order(row):
    return [row[name] for name in ("mode", "power", "head_dim", "batch", "heads", "time")]


_CEILINGS = {
    "flops": "{:.4g} FLOP/s in a bfloat16 product",
    "bytes": "{:.4g} bytes/s in a copy, read and written",
    "torch flops": "{:.4g} FLOP/s in a bfloat16 product by PyTorch",
}
_COLUMNS = ("pass", "p", "D", "b x n", "T", "contender", "ms", "spread", "kernels ms", "rate", "of peak")
_CHECKED = ("cuDNN /", "GB", "error", "note")


def _table(part: str, rows: list[dict]) -> rich.table.Table:
    table = rich.table.Table(title=part)
    for column in (*_COLUMNS, *_CHECKED):
        text = column in ("pass", "contender", "note")
        table.add_column(column, justify="left" if text else "right", no_wrap=column != "note")
    cudnn = {tuple(_order(row)): row.get("seconds") for row in rows if row["contender"] == "softmax/cudnn"}
    for row in rows:
        cells = [row["mode"], str(row["power"]), str(row["head_dim"]), f"{row['batch']} x {row['heads']}"]
        cells += [f"{row['time']:,}", row["contender"]]
        if seconds := row.get("seconds"):
            flops = row.get("flops_per_second")
            reference = cudnn.get(tuple(_order(row)))
            cells += [
                f"{1e3 * seconds:.4g}",
                f"{row['spread']:.1%}",
                f"{1e3 * row['kernel_seconds']:.4g}" if "kernel_seconds" in row else "-",
                f"{flops / 1e12:.3g} TFLOP/s" if flops else f"{row['bytes_per_second'] / 1e9:.3g} GB/s",
                f"{row['fraction']:.1%}" if row["fraction"] else "-",
                f"{reference / seconds:.2f}x" if reference else "-",
                f"{row['memory'] / 1e9:.3g}" if row["memory"] is not None else "-",
                f"{row['error']:.1e}",
            ]
        else:
            cells += ["-"] * 8
        table.add_row(*cells, row.get("note", ""))
    return table


if __name__ == "__main__":
    main()
