"""Times the kernels on a GPU against plain JAX, cuDNN's flash attention and other packages.

    uv run --extra cuda13 python -m benchmarks.kernels [--part=NAME ...] [--out=FILE [--resume]]

Inputs are bfloat16 with float32 gates, batch 1 and 8 heads unless a row says otherwise. The part `brief`, the default,
has the most important comparisons and takes 8 minutes at most. Rows are written as JSON as they come, to
benchmarks/results/kernels-<part>...-<gpu>.json unless --out is given, and printed as a table per part.

Every result is checked before it is timed. Rows at the end and in the middle of the sequence are compared with float32,
gradients are compared with float32 at 2,048 tokens, and all values must be finite. A row that is wrong has no time.
Each row is measured in a process of its own, with calls enqueued one after another on two sets of random inputs. A
kernel that crashes or hangs loses only its own row.

FLOPs are those that the mathematics needs, per token and head: 2 (D + E) T / 2 for pairs, or 4 F E for features (F is
their exact number) plus the pairs of a chunk of 128 and a window of 64. A backward pass counts 2.5 times the pairs and
twice the features. A decode step is measured in bytes. Fractions are relative to a large matrix product and a copy
measured in the same run. Memory is the peak of a call according to the compiler, arguments and results included.
"""

import contextlib
import dataclasses
import statistics
from collections.abc import Sequence

from benchmarks import _contenders, _peers, _rows, _shapes, _timing
from pallas_kernels.check import supervisor

BRIEF_SECONDS = 450.0
# Time limit of a row: compilation takes a minute or two, tuning for Triton more.
ROW_SECONDS, BRIEF_ROW_SECONDS = 600.0, 150.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables and writes the JSON. Exits with status 1 and one line if there is no GPU."""
    parser = _rows.make_parser(__doc__)
    parser.add_argument("--part", action="append", choices=_shapes.PARTS, help="may be given several times")
    options = _rows.read_options(parser, arguments)
    parts = options.part or ["brief"]
    brief = parts == ["brief"]
    described = _shapes.SMOKE if options.smoke else [row for part in parts for row in _shapes.PARTS[part]]
    report = _rows.measure_rows(
        "benchmarks.kernels",
        list(map(dataclasses.asdict, described)),
        measure,
        options,
        seconds=BRIEF_ROW_SECONDS if brief else ROW_SECONDS,
        most_seconds=BRIEF_SECONDS if brief else float("inf"),
        name="-".join(["kernels", *parts]),
        device=_device,
        rates=_rates,
    )
    _print(report)


def _device(smoke: bool) -> dict:
    """Returns the device and its ceilings."""
    machine = _rows.machine(gpu=not smoke)
    with contextlib.nullcontext() if smoke else supervisor.exclusive():
        size, copied = (64, 2**16) if smoke else (8192, 2**31)
        return {"machine": machine, "ceilings": _timing.ceilings(size=size, copied=copied)}


def measure(row: dict) -> dict:
    """Measures a row with the fields of `_shapes.Row`.

    Raises NotImplementedError if the contender does not support the shape, WrongResult if its result is wrong.
    """
    side = _peers if row["contender"] in _shapes.PEERS else _contenders
    prepared = side.prepare(_shapes.Row(**row))
    with supervisor.exclusive():
        samples = _timing.samples(prepared.sample)
    taken = [sample.seconds / prepared.steps for sample in samples]
    queued = statistics.median(taken)
    host_bound = sum(sample.host_bound for sample in samples) * 2 > len(samples)
    result = {
        "machine": _peers.machine() if side is _peers else {},
        "queued_seconds": queued,
        "seconds": queued,
        "spread": _timing.spread(taken),
        "host_bound": host_bound,
        "error": prepared.error,
        "memory": prepared.memory,
    }
    if host_bound:
        result["note"] = "the host was slower: with its time"
    with supervisor.exclusive():
        try:
            kernels = prepared.kernels()
        except Exception as error:  # CUPTI may be missing or in use
            return result | {"kernels_note": f"{type(error).__name__}: {error}"[:200]}
    if kernels:
        result["kernels"] = {name: seconds / prepared.steps for name, seconds in kernels.items()}
        result["kernel_seconds"] = sum(result["kernels"].values())
        if host_bound:
            # The device waited for the host; the sum of its kernels is its own time.
            result |= {
                "seconds": result["kernel_seconds"],
                "note": "the host was slower: kernels' sum",
            }
    return result


def _rates(row: dict, device: dict) -> dict:
    """Returns FLOP/s (bytes/s for a step) and their fraction of the measured ceiling."""
    if "seconds" not in row:
        return {}
    shape = _shapes.Row(**{field.name: row[field.name] for field in dataclasses.fields(_shapes.Row)})
    unit, work = "flops", _shapes.flops(shape)
    if work is None:
        unit, work = "bytes", _shapes.step_bytes(shape)
    rate = work / row["seconds"]
    return {f"{unit}_per_second": rate, "fraction": rate / device["ceilings"][unit]}


_SHAPE = {
    "pass": ("mode", ""),
    "p": ("power", "{}"),
    "D": ("head_dim", "{}"),
    "b": ("batch", "{}"),
    "n": ("heads", "{}"),
    "T": ("time", "{:,}"),
}
_COLUMNS = {
    **_SHAPE,
    "chunk": ("chunk", "{}"),
    "contender": ("contender", ""),
    "ms": ("seconds", "{:.4g}", 1e3),
    "spread": ("spread", "{:.1%}"),
    "kernels ms": ("kernel_seconds", "{:.4g}", 1e3),
    "TFLOP/s": ("flops_per_second", "{:.3g}", 1e-12),
    "GB/s": ("bytes_per_second", "{:.3g}", 1e-9),
    "of peak": ("fraction", "{:.1%}"),
    "cuDNN /": ("cudnn", "{:.2f}x"),
    "GB": ("memory", "{:.3g}", 1e-9),
    "error": ("error", "{:.1e}"),
    "note": ("note", ""),
}


def _print(report: dict) -> None:
    _rows.print_machine(report)
    parts = list(_shapes.PARTS)

    def shape(row):
        return [row[name] for name, *_ in _SHAPE.values()]

    rows = sorted(report["rows"], key=lambda row: (parts.index(row["part"]), shape(row)))
    for part in dict.fromkeys(row["part"] for row in rows):
        of_part = [row for row in rows if row["part"] == part]
        cudnn = {
            tuple(shape(row)): row["seconds"]
            for row in of_part
            if row["contender"] == "softmax/cudnn" and "seconds" in row
        }
        for row in of_part:
            if "seconds" in row and (reference := cudnn.get(tuple(shape(row)))):
                row["cudnn"] = reference / row["seconds"]
        _rows.print_table(part, of_part, _COLUMNS)


if __name__ == "__main__":
    main()
