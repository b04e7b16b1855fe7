"""Compares training with softmax and with power attention: tokens/s and memory of a whole step on one GPU.

    uv run --extra cuda13 python -m benchmarks.training [--context=N ...] [--preset=NAME[,p=POWER] ...] [--out=FILE]

The step is that of train.py with `configs/gpt2_124m.py`: 124M parameters and bfloat16 products, on random tokens. Only
the batch differs: it has the same number of tokens at every context. Without --context, contexts from 1,024 to 65,536
are measured. Without --preset, softmax (which uses cuDNN's flash attention), sympow and conformal at p = 2 are.

A row is the median of several steps after two warm-up steps; the host waits for each. MFU is the share of the data
sheet's peak that the model's arithmetic took (`sympow_jax.training.flops`). `attention` is read from the
compiled program, not from the request. Peak memory is reported by the allocator, in a separate process for every row;
`program` is what the compiler has reserved. If a row's process crashes, hangs or runs out of memory, the row has a note
instead. Rows are written as JSON as they come, to benchmarks/results/training-<gpu>[-<choices>].json unless --out is
given. A plot is saved next to that file.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import pathlib
import re
import sys
import time
from collections.abc import Sequence

import matplotlib.backends.backend_agg
import matplotlib.figure
import matplotlib.ticker
import rich.console
import rich.table

from benchmarks import _contenders, _report, _timing, _training, _worker
from pallas_kernels.check import verdict

CONTEXTS = tuple(2**n for n in range(10, 17))
PRESETS = ("softmax", "sympow", "conformal")
TOKENS = 65_536
# Longest first, since it matters most.
BRIEF_CONTEXTS = (65_536, 8192, 1024)
BRIEF_SECONDS = 450.0
# A process without a sign of progress for this many seconds hangs: it compiles in a minute or two.
SILENCE = 400.0
BRIEF_SILENCE = 150.0
SMOKE_CONTEXTS, SMOKE_TOKENS = (64, 128), 256


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and writes the JSON. Exits with status 1 and one line if there is no GPU."""
    options = _options(arguments)
    started = time.monotonic()
    contexts = options.context or (
        SMOKE_CONTEXTS if options.smoke else BRIEF_CONTEXTS if options.brief else CONTEXTS
    )
    presets = options.preset or PRESETS
    tokens = SMOKE_TOKENS if options.smoke else TOKENS
    runs = [
        _training.Run(preset=preset, context=context, tokens=tokens, tiny=options.smoke)
        for context, preset in itertools.product(contexts, presets)
    ]
    chosen = ["brief"] if options.brief else [*map(str, options.context or ()), *(options.preset or ())]
    file = _report.File(
        "training", options.out, "".join(f"-{re.sub(r'[^a-z0-9_]+', '-', name)}" for name in chosen)
    )
    deadline = started + BRIEF_SECONDS if options.brief else float("inf")
    try:
        report = _measure(runs, file, deadline, BRIEF_SILENCE if options.brief else SILENCE, options.jobs)
    except _worker.NoDevice as error:
        sys.exit(f"benchmarks.training measures on a GPU: {error}; --smoke runs tiny shapes without one")
    _print(report)
    if (path := file.path(report["machine"])) is not None and any("seconds" in row for row in report["rows"]):
        _plot(path.with_suffix(".png"), report)


def _options(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", action="append", type=int, choices=CONTEXTS, help="may be given again")
    parser.add_argument("--preset", action="append", help="may be given again")
    parser.add_argument("--out", type=pathlib.Path, help="the JSON file")
    parser.add_argument(
        "--brief", action="store_true", help="contexts 1,024, 8,192 and 65,536; ends within 8 minutes"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="tiny shapes, on any device, in this process; writes only --out"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes that compile at once; they take turns on the device"
    )
    options = parser.parse_args(arguments)
    if options.context and (options.smoke or options.brief):
        parser.error("--smoke and --brief have contexts of their own")
    for preset in options.preset or ():
        try:
            _training.Run(preset=preset, context=CONTEXTS[0], tokens=TOKENS).settings()
        except ValueError as error:
            parser.error(str(error))
    return options


def _measure(runs, file, deadline, silence, jobs) -> dict:
    """Measures all runs and returns the report; writes it to the file after every row."""
    report: dict = {"machine": {"driver": verdict.driver_version()}, "rows": []}

    order = {(run.context, run.preset): number for number, run in enumerate(runs)}

    def measured(run):
        row = {"context": run.context, "preset": run.preset, "tokens": run.tokens}
        if run.tiny:
            return _contenders.machine(), row | _training.measure(run, lambda event: None)
        machine: dict = {}
        for event in _events(run, silence * jobs, deadline):
            machine |= event.get("machine", {})
            row |= event.get("row", {})
        return machine, row

    with _timing.turns(jobs), concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(measured, run) for run in runs]):
            if done.exception() is not None:
                pool.shutdown(wait=False, cancel_futures=True)
            machine, row = done.result()
            report["machine"] |= machine
            report["rows"] = sorted(
                [*report["rows"], row], key=lambda row: order[row["context"], row["preset"]]
            )
            file.write(report)
    return report


def _events(run, silence, deadline):
    """Yields the events of a process that measures a run, or {"row": {"note": why}} if it measured nothing."""
    if time.monotonic() > deadline:
        yield {"row": {"note": "not measured: the time was over"}}
        return
    command = [sys.executable, "-m", "benchmarks._training"]
    failed, measured = None, False
    for event in _worker.events(command, dataclasses.asdict(run), silence=silence, deadline=deadline):
        if "no_device" in event:
            raise _worker.NoDevice(event["no_device"])
        failed = failed or event.get("failed")
        measured |= "row" in event
        if "ended" in event and not measured:
            yield {"row": {"note": failed or f"its process ended: {event['ended']}"}}
        yield event


def _print(report: dict) -> None:
    console = rich.console.Console(width=None if sys.stdout.isatty() else 200)
    console.print(", ".join(f"{name} {value}" for name, value in report["machine"].items() if value))
    tokens = report["rows"][0]["tokens"]
    table = rich.table.Table(title=f"training, {tokens:,} tokens a step")
    columns = ("context", "preset", "attention", "ms", "spread", "tokens/s", "/ softmax", "MFU", "peak GB")
    for column in (*columns, "program GB", "loss", "kernels, note"):
        text = column in ("preset", "attention", "kernels, note")
        table.add_column(column, justify="left" if text else "right", no_wrap=column != "kernels, note")
    rates = _rates(report)
    for row in sorted(report["rows"], key=lambda row: row["context"]):
        cells = [f"{row['context']:,}", row["preset"], row.get("attention", "-")]
        if "seconds" in row:
            reference = rates.get(("softmax", row["context"]))
            cells += [
                f"{1e3 * row['seconds']:.4g}",
                f"{row['spread']:.1%}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['tokens_per_second'] / reference:.2f}x" if reference else "-",
                f"{row['mfu']:.1%}" if row["mfu"] else "-",
                f"{row['peak_bytes'] / 1e9:.2f}" if row["peak_bytes"] else "-",
                f"{row['program_bytes'] / 1e9:.2f}",
                f"{row['first_loss']:.2f} to {row['last_loss']:.2f}",
            ]
        else:
            cells += ["-"] * 8
        table.add_row(*cells, row.get("note") or ", ".join(row.get("kernels", ())))
    console.print(table)


def _rates(report: dict) -> dict[tuple[str, int], float]:
    """Returns tokens per second by preset and context, in increasing order of contexts."""
    rows = sorted(report["rows"], key=lambda row: row["context"])
    return {(row["preset"], row["context"]): row["tokens_per_second"] for row in rows if "seconds" in row}


def _plot(path: pathlib.Path, report: dict) -> None:
    """Plots tokens per second against the context, one line per preset."""
    rates = _rates(report)
    # Not pyplot: no global state, no display.
    figure = matplotlib.figure.Figure(figsize=(8.0, 4.8), dpi=160, layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for preset, marker in zip(dict.fromkeys(name for name, _ in rates), itertools.cycle("osD^vPX")):
        points = [(context, rate) for (name, context), rate in rates.items() if name == preset]
        axes.plot(*zip(*points), marker=marker, label=preset)
    contexts = sorted({context for _, context in rates})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("tokens a second")
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.legend()
    axes.set_title(f"Training 124M parameters, {report['rows'][0]['tokens']:,} tokens a step")
    figure.savefig(path)


if __name__ == "__main__":
    main()
