"""Prints the results of `benchmarks/hopper/run.sh` as Markdown: `python -m benchmarks.hopper.summary DIR`.

Each program prints its own tables too. Here contenders are next to each other, and measured rates next to those that
predictions assume.
"""

import json
import pathlib
import sys
from collections.abc import Iterable, Sequence

from benchmarks.hopper import counters

__all__ = ["PARTS", "markdown"]

PARTS = ("check", "kernels", "hardware", "chunks", "counters", "training", "text")


def markdown(reports: dict[str, dict]) -> str:
    """Returns the tables of the reports by part; parts that have not started have none."""
    rows = {name: reports.get(name, {}).get("rows", []) for name in PARTS}
    machine: dict = next((report["machine"] for report in reports.values() if "machine" in report), {})
    sections = {
        "Kernels, ms on the device": _kernels(rows["kernels"]),
        "Chunks, ms of both passes": _kernels(rows["chunks"]),
        "Decode steps": _table(
            ["contender", "batch", "us per step", "of the copy bandwidth"],
            [
                [row["contender"], row["batch"], 1e6 * _seconds(row), f"{row['fraction']:.0%}"]
                for row in rows["kernels"]
                if row["mode"] == "step" and "fraction" in row
            ],
        ),
        "Rates in cycles or bytes per cycle, which replace constants of tools/h100.py and tools/compiled": _table(
            ["rate", "of", "measured", "assumed"],
            [
                [row["rate"], row.get("columns", row.get("megabytes")), row["measured"], row["assumed"]]
                for row in rows["hardware"]
                if "measured" in row
            ],
        ),
        "Counters": _table(
            ["op", "p", "D", "T", "kernel", *counters.COLUMNS],
            [
                [
                    *(row[name] for name in ("contender", "power", "head_dim", "time")),
                    *(kernel.get(name, "") for name in ("Kernel Name", *counters.COLUMNS.values())),
                ]
                for row in rows["counters"]
                for kernel in row.get("counters", ())
            ],
        ),
        "Training steps of the 124M model": _table(
            ["tokens per row", "preset", "attention", "tokens/s", "MFU", "GB at most"],
            [
                [
                    *(row[name] for name in ("context", "preset", "attention", "tokens_per_second")),
                    row["mfu"] and f"{row['mfu']:.1%}",
                    row["peak_bytes"] and row["peak_bytes"] / 1e9,
                ]
                for row in rows["training"]
                if "seconds" in row
            ],
        ),
        "Trained on text: held-out loss by position": _text(
            [row for row in rows["text"] if "heldout" in row]
        ),
    }
    lines = [f"# Measured on {machine.get('device', 'no device yet')}", ""]
    lines += [", ".join(f"{name} {value}" for name, value in machine.items() if value)]
    if cases := reports.get("check", {}).get("cases"):
        wrong = [case for case in cases if case["status"] != "ok"]
        lines += ["", f"Check: {len(cases) - len(wrong)} of {len(cases)} cases are correct."]
        lines += [f"* {case['case']}: {case['status']}" for case in wrong]
    for title, table in sections.items():
        lines += ["", f"## {title}", "", *(table or ["Not measured."])]
    notes = [(name, row) for name in PARTS for row in rows[name] if "note" in row]
    shape = ("contender", "preset", "rate", "mode", "power", "head_dim", "columns", "context", "time")
    lines += ["", "## Notes", ""]
    lines += [
        f"* {name}: {', '.join(str(row[x]) for x in shape if x in row)}: {row['note']}" for name, row in notes
    ]
    return "\n".join(lines) + "\n"


def _seconds(row: dict) -> float:
    """Returns the device's time for a row of `benchmarks.kernels`."""
    return row.get("kernel_seconds", row["seconds"])


def _table(columns: Sequence[str], rows: Iterable[Sequence]) -> list[str]:
    """Returns the lines of a table, or none if it has no rows; numbers have four digits."""
    cells = [[f"{cell:,.4g}" if isinstance(cell, float) else str(cell or "") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells)]
    return lines if cells else []


def _kernels(rows: list[dict]) -> list[str]:
    """Returns the table of times at batch 1: a row per shape, a column per contender or chunk."""
    shapes: dict[tuple, dict[str, float]] = {}
    for row in rows:
        if "seconds" in row and row["mode"] != "step" and row["batch"] == 1:
            name = row["contender"] + (f" {row['chunk']}" if row.get("chunk") else "")
            shape = tuple(row[x] for x in ("mode", "power", "head_dim", "time"))
            shapes.setdefault(shape, {})[name] = 1e3 * _seconds(row)
    names = list(dict.fromkeys(name for times in shapes.values() for name in times))
    body = []
    for shape, times in sorted(shapes.items()):
        best = min((time for name, time in times.items() if "mosaic_gpu" in name), default=None)
        ratio = f"{times['softmax/cudnn'] / best:.2f}x" if best and "softmax/cudnn" in times else ""
        body.append([*shape, *(times.get(name, "") for name in names), ratio])
    return _table(["pass", "p", "D", "T", *names, "cuDNN / best form"], body)


def _text(rows: list[dict]) -> list[str]:
    if not rows:
        return []
    # Presets differ in speed: after the same number of steps, the training losses compare.
    last = min(len(row["losses"]) for row in rows) - 1
    lengths = list(rows[0]["heldout"])
    columns = ["preset", "steps", f"training loss after {max(last * rows[0]['every'], 1)}", *lengths]
    return _table(
        columns,
        [[row["preset"], row["steps"], row["losses"][last], *row["heldout"].values()] for row in rows],
    )


if __name__ == "__main__":
    paths = {name: pathlib.Path(sys.argv[1], f"{name}.json") for name in PARTS}
    print(
        markdown({name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}),
        end="",
    )
