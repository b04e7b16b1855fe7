"""Reads hardware counters of the kernels with NVIDIA's Nsight Compute (`ncu`).

    python -m benchmarks.hopper.counters [--out=FILE]

A row is one op with gradients. `ncu` has crashed while JAX compiled. Therefore a first process without it compiles into
JAX's persistent cache, and neither process autotunes XLA's kernels or uses CUDA graphs. Clocks are left alone. If `ncu`
fails, the row has its last message as a note.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import _contenders, _rows, _shapes

__all__ = ["COLUMNS", "main", "measure", "parse"]

# Kernels and shapes whose times the model predicts, longest first.
CALLS: tuple[dict, ...] = (
    {"contender": "chunked/mosaic_gpu", "power": 2, "head_dim": 64, "time": 65_536},
    {"contender": "attention/mosaic_gpu", "power": 2, "head_dim": 64, "time": 16_384},
    {"contender": "chunked/mosaic_gpu", "power": 2, "head_dim": 128, "time": 16_384},
    {"contender": "attention/mosaic_gpu", "power": 4, "head_dim": 64, "time": 16_384},
    {"contender": "chunked/mosaic_gpu", "power": 4, "head_dim": 32, "time": 8192},
)
SMOKE = ({"contender": "chunked/xla", "power": 2, "head_dim": 8, "time": 128},)
# One call of the op launches fewer than 12 kernels. Units are those of the metrics, not scaled.
NCU = ["--target-processes=all", "--clock-control=none", "--kernel-name=regex:power_", "--launch-count=12"]
NCU += [
    "--csv",
    "--page=raw",
    "--print-units=base",
    "--section=SpeedOfLight",
    "--section=ComputeWorkloadAnalysis",
]
NCU += ["--section=MemoryWorkloadAnalysis", "--section=SchedulerStats", "--section=WarpStateStats"]
# Metrics of the table by its columns. In base units a time is in ns.
COLUMNS = {
    "ns": "gpu__time_duration.sum",
    "tensor %": "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
    "issue %": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "DRAM %": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
}
ROW_SECONDS = 240.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and writes the JSON. Exits with status 1 and one line if there is no GPU."""
    parser = _rows.make_parser(__doc__)
    parser.add_argument("--call", help=argparse.SUPPRESS)
    options = _rows.read_options(parser, arguments)
    if options.call:  # both passes of an op, once
        import jax

        call, operands = _contenders.training_call(_shapes.Row(**json.loads(options.call), mode="training"))
        jax.block_until_ready(jax.jit(call)(*operands))
        return
    if options.row:
        _rows.print_result(measure, options.row)
        return
    rows = SMOKE if options.smoke else CALLS
    report = _rows.make_report("benchmarks.hopper.counters", rows, measure, options, seconds=ROW_SECONDS)
    columns = ("contender", "p", "D", "T", "kernel", *COLUMNS, "note")
    table = _rows.make_table("counters", columns, ("contender", "kernel", "note"))
    for row in report["rows"]:
        shape = [row["contender"], *(str(row[name]) for name in ("power", "head_dim", "time"))]
        for kernel in row.get("counters", [{}]):
            cells = [kernel.get(metric, "-") for metric in ("Kernel Name", *COLUMNS.values())]
            table.add_row(*shape, *cells, row.get("note", ""))
    _rows.print_tables(report, [table])


def measure(row: dict) -> dict:
    """Returns the counters of each kernel of a call; raises NotImplementedError without `ncu` or if it fails."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NotImplementedError("ncu is not installed")
    call = [sys.executable, "-m", "benchmarks.hopper.counters", f"--call={json.dumps(row)}"]
    environment = os.environ | {
        # Every program is cached, however small or fast to compile.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer=",
    }
    # Kernels that cannot be replayed are measured by replays of the whole process.
    for command in ([], [ncu, *NCU], [ncu, *NCU, "--replay-mode=application"]):
        done = subprocess.run([*command, *call], env=environment, capture_output=True, text=True)
        if command and (kernels := parse(done.stdout)):
            return {"counters": kernels}
        if not command and done.returncode:
            break
    lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
    raise NotImplementedError(f"exit status {done.returncode}: {lines[-1][:200]}")


def parse(output: str) -> list[dict[str, str]]:
    """Returns the columns of each kernel from the output of `ncu --csv --page=raw`, as text.

    The table follows messages of ncu and of the process, and more may follow it. Its second line has units.
    """
    lines = output.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels = csv.DictReader(lines[begin:], restval="")
    return [kernel for kernel in kernels if kernel["ID"].isdigit() and kernel["Kernel Name"]]


if __name__ == "__main__":
    main()
