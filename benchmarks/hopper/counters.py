"""Reads hardware counters of the kernels with NVIDIA's Nsight Compute.

    python -m benchmarks.hopper.counters [--out=FILE]

A row is one op with gradients, whose kernels are profiled in a process under `ncu`. `ncu` has crashed while JAX
compiled. Therefore a first process without it compiles into JAX's persistent cache, and neither process autotunes XLA's
kernels or uses CUDA graphs. If kernels cannot be replayed, whole processes are (`--replay-mode application`). Clocks
are left alone. If `ncu` fails all the same, the row has its last message as a note. Rows of `benchmarks.kernels` have
the times of kernels in any case.
"""

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import _contenders, _rows, _shapes

__all__ = ["main", "measure", "parse"]

# Kernels and shapes whose times the model predicts, longest first.
CALLS: tuple[dict, ...] = (
    {"contender": "chunked/mosaic_gpu", "power": 2, "head_dim": 64, "time": 65_536},
    {"contender": "attention/mosaic_gpu", "power": 2, "head_dim": 64, "time": 16_384},
    {"contender": "chunked/mosaic_gpu", "power": 2, "head_dim": 128, "time": 16_384},
    {"contender": "attention/mosaic_gpu", "power": 4, "head_dim": 64, "time": 16_384},
    {"contender": "chunked/mosaic_gpu", "power": 4, "head_dim": 32, "time": 8192},
)
SMOKE = ({"contender": "chunked/xla", "power": 2, "head_dim": 8, "time": 128},)
KERNELS = "regex:power_"
# Kernels that are profiled at most; one call of the op launches fewer.
LAUNCHES = 12
SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SchedulerStats",
    "WarpStateStats",
    "LaunchStats",
    "Occupancy",
)
# Metrics that rows have: time, use of each unit, traffic at each level, what warps wait for, and resources.
METRICS = re.compile(
    r"time_duration|throughput|pipe_tensor|inst_executed|issue_active|issued|dram__bytes|lts__t_(bytes|sectors)"
    r"|xbar2l1tex|bank_conflicts|stalled|warps_active|registers_per_thread|shared_mem"
)
# Metrics of the table, with a factor.
COLUMNS = (
    ("gpu__time_duration.sum", 1e6),
    ("sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active", 1),
    ("sm__inst_issued.avg.pct_of_peak_sustained_active", 1),
    ("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed", 1),
    ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1),
)
ROW_SECONDS = 240.0
COMMAND = (sys.executable, "-m", "benchmarks.hopper.counters")
_NO_TUNING = "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer="
# Factors to SI base units.
_SCALES = {"ns": 1e-9, "us": 1e-6, "usecond": 1e-6, "nsecond": 1e-9, "ms": 1e-3, "msecond": 1e-3}
_SCALES |= {
    f"{prefix}byte{ending}": scale
    for prefix, scale in {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()
    for ending in ("", "/s", "/second")
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and writes the JSON. Exits with status 1 and one line if there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", help=argparse.SUPPRESS)
    options = _rows.read_options(parser, arguments)
    if options.call:
        _call(json.loads(options.call))
        return
    if options.row:
        _rows.print_result(measure, options.row)
        return
    report = _rows.make_report(
        "benchmarks.hopper.counters",
        SMOKE if options.smoke else CALLS,
        measure,
        options,
        seconds=ROW_SECONDS,
    )
    columns = ("contender", "p", "D", "T", "kernel", "us", "tensor %", "issue %", "DRAM %", "L2 %", "note")
    table = _rows.make_table("counters", columns, ("contender", "kernel", "note"))
    for row in report["rows"]:
        shape = [row["contender"], *(str(row[name]) for name in ("power", "head_dim", "time"))]
        for kernel in row.get("counters", [{"kernel": "-"}]):
            cells = [_cell(kernel, *column) for column in COLUMNS]
            table.add_row(*shape, kernel["kernel"], *cells, row.get("note", ""))
    _rows.print_tables(report, [table])


def _cell(kernel: dict, metric: str, factor: float) -> str:
    return f"{factor * kernel[metric]:.4g}" if metric in kernel else "-"


def measure(row: dict) -> dict:
    """Returns the counters of each kernel of a call; raises NotImplementedError without `ncu` or if it fails.

    For {"device": True}, describes the GPU.
    """
    if "device" in row:
        return {"machine": _rows.machine(gpu=True)}
    call = [*COMMAND, f"--call={json.dumps(row)}"]
    environment = os.environ | {
        # Every program is cached, however small or fast to compile.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_NO_TUNING}",
    }
    if "JAX_COMPILATION_CACHE_DIR" not in environment and row["contender"].endswith("mosaic_gpu"):
        raise NotImplementedError("JAX_COMPILATION_CACHE_DIR is not set, so that ncu would see JAX compile")
    # Compile before ncu is there, and find failures that are not its own.
    warm = subprocess.run(call, env=environment, capture_output=True, text=True)
    if warm.returncode:
        raise NotImplementedError(f"without ncu: {_last_line(warm.stderr)}")
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NotImplementedError("ncu is not installed")
    notes = []
    for replay in ("kernel", "application"):
        command = [ncu, "--target-processes=all", "--clock-control=none", f"--replay-mode={replay}"]
        command += [f"--kernel-name={KERNELS}", f"--launch-count={LAUNCHES}", "--csv", "--page=raw"]
        command += [f"--section={section}" for section in SECTIONS]
        done = subprocess.run([*command, *call], env=environment, capture_output=True, text=True)
        if counters := parse(done.stdout):
            return {"counters": counters, "replay": replay}
        notes.append(
            f"{replay}: exit status {done.returncode}, {_last_line(done.stdout)} {_last_line(done.stderr)}"
        )
    raise NotImplementedError("; ".join(notes)[:600])


def parse(output: str) -> list[dict]:
    """Returns the name and the metrics of each kernel from the output of `ncu --csv --page=raw`, in SI base units.

    The table follows messages of ncu and of the process, and more may follow it. Its second line has units. A run that
    profiled no kernel may still have printed the line of names.
    """
    lines = output.splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        return []
    table = list(csv.DictReader(lines[begin:]))
    units, kernels = (table[0], table[1:]) if table else ({}, [])
    return [
        {"kernel": kernel["Kernel Name"]}
        | {
            name: number * _SCALES.get(units[name], 1)
            for name, text in kernel.items()
            if name and METRICS.search(name) and (number := _number(text)) is not None
        }
        for kernel in kernels
        # A message has no number in the first column, or no further columns.
        if kernel["ID"].isdigit() and kernel["Kernel Name"]
    ]


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"


def _call(row: dict) -> None:
    """Runs both passes of an op once."""
    import jax

    call, arguments = _contenders.training_call(_shapes.Row(**row, mode="training"))
    jax.block_until_ready(jax.jit(call)(*arguments))


if __name__ == "__main__":
    main()
