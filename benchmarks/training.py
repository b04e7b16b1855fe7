"""Compares training with softmax and with power attention: tokens/s and memory of a whole step on one GPU.

    uv run --extra cuda13 python -m benchmarks.training [--context=N ...] [--preset=NAME[,p=POWER] ...] [--out=FILE]
        [--scan-layers]

The step is that of train.py with `configs/gpt2_124m.py`: 124M parameters and bfloat16 products, on random tokens. Only
the batch differs: it has the same number of tokens at every context. Without --context, contexts from 1,024 to 65,536
are measured. Without --preset, softmax (which uses cuDNN's flash attention), sympow and conformal at p = 2 are. The 12
layers are unrolled unless --scan-layers is given.

A row is the median of several steps after two warm-up steps; the host waits for each. MFU is the share of the data
sheet's peak that the model's arithmetic took (`sympow_jax.tasks.flops`). `attention` is read from the
compiled program, not from the request. Peak memory is reported by the allocator, in a separate process for every row;
`program` is what the compiler has reserved. If a row's process crashes, hangs or runs out of memory, the row has a note
instead. Rows are written as JSON as they come, to benchmarks/results/training-<gpu>[-<choices>].json unless --out is
given.
"""

import itertools
import math
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import _contenders, _rows, _timing
from pallas_kernels.check import supervisor
from sympow_jax import config, training
from sympow_jax.config import loading
from sympow_jax.tasks import flops
from sympow_jax.training import sharding, summary

CONTEXTS = tuple(2**n for n in range(10, 17))
PRESETS = ("softmax", "sympow", "conformal")
TOKENS = 65_536
# Time limit of a row: it compiles in a minute or two.
ROW_SECONDS = 600.0
SMOKE_CONTEXTS, SMOKE_TOKENS = (64, 128), 256
WARMUP_STEPS = 2
# Steps are timed for this many seconds, but at least LEAST_STEPS and at most MOST_STEPS of them.
SECONDS = 15.0
LEAST_STEPS, MOST_STEPS = 3, 10
# Kernels and copies of a step whose times are in its row.
LONGEST = 40
# A model small enough for any device.
TINY: dict[str, Any] = {"model.vocab_size": 128, "model.layers": 2, "model.width": 32}
TINY |= {"model.heads": 2, "model.kv_heads": 2, "model.head_dim": 16}
_FORMS = re.compile(r"\b(attention|chunked|recurrent|softmax)_(reference|xla|mosaic_gpu|cudnn)\b")
_KERNELS = re.compile(r"\bpower_(?:attention|state)_\w+|__cudnn\$\w+")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table and writes the JSON. Exits with status 1 and one line if there is no GPU."""
    parser = _rows.make_parser(__doc__)
    parser.add_argument("--context", action="append", type=int, choices=CONTEXTS, help="may be given again")
    parser.add_argument("--preset", action="append", help="may be given again")
    parser.add_argument("--scan-layers", action="store_true", help="scan the layers, not unroll them")
    options = _rows.read_options(parser, arguments)
    if options.context and options.smoke:
        parser.error("--smoke has contexts of its own")
    for preset in options.preset or ():
        try:
            config.load(f"gpt2_124m:{preset}")
        except ValueError as error:
            parser.error(str(error))
    contexts = SMOKE_CONTEXTS if options.smoke else CONTEXTS
    described = [
        {"context": context, "preset": preset, "tokens": SMOKE_TOKENS if options.smoke else TOKENS}
        for context, preset in itertools.product(options.context or contexts, options.preset or PRESETS)
    ]
    if options.smoke:
        described = [row | {"tiny": True} for row in described]
    if options.scan_layers:
        described = [row | {"scan_layers": True} for row in described]
    chosen = [*map(str, options.context or ()), *(options.preset or ()), *["scanned"] * options.scan_layers]
    name = "-".join(["training", *(re.sub(r"[^a-z0-9_]+", "-", choice) for choice in chosen)])
    _print(
        _rows.measure_rows("benchmarks.training", described, measure, options, seconds=ROW_SECONDS, name=name)
    )


def measure(row: dict) -> dict:
    """Measures a row with `preset`, `context` and `tokens` per step.

    The preset is the argument of `configs/gpt2_124m.py`. If `tiny` is set, the model is small enough for any device.
    """
    settings = config.load(f"gpt2_124m:{row['preset']}")
    changes = {"data.context_length": row["context"], "data.batch_tokens": row["tokens"]}
    changes["training.scan_layers"] = row.get("scan_layers", False)
    settings = loading.replace(settings, changes | (TINY if row.get("tiny") else {}))
    device = jax.devices()[0]
    mesh = sharding.whole_mesh([device])
    shape = settings.data.batch_size, row["context"] + 1
    drawn = np.random.default_rng(0).integers(settings.model.vocab_size, size=shape, dtype=np.int32)
    batch = sharding.place_batch({"inputs": drawn[:, :-1], "targets": drawn[:, 1:]}, mesh)
    program = training.Program(settings, mesh)
    with supervisor.tuning():
        begin = time.perf_counter()
        update = program.update.lower(program.abstract, batch).compile()
        compile_seconds = time.perf_counter() - begin
        state = program.init_state()
    with supervisor.exclusive():
        state, seconds, losses = _steps(update, state, batch)
        median = statistics.median(seconds)
        # The times of kernels are taken last, because the profiler may fail.
        try:
            kernels = _timing.traced_seconds(lambda: jax.block_until_ready(update(state, batch)))
            traced: dict[str, Any] = {
                "device_seconds": sum(kernels.values()),
                "longest": dict(itertools.islice(kernels.items(), LONGEST)),
            }
        except Exception as error:
            traced = {"kernels_note": f"{type(error).__name__}: {error}"[:200]}
    needed = row["tokens"] * flops.model_flops_per_token(settings.model, row["context"])
    peak = flops.peak_flops(device)
    return {
        **attention(update.as_text()),
        "seconds": median,
        "spread": _timing.spread(seconds),
        "tokens_per_second": row["tokens"] / median,
        "model_flops_per_second": needed / median,
        "mfu": None if peak is None else needed / median / peak,
        "steps": len(seconds),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "program_bytes": summary.program_bytes(update),
        "compile_seconds": compile_seconds,
        **traced,
    }


def _steps(update, state, batch):
    """Runs steps; returns the state, the seconds of those after the warm-up, and all losses."""
    seconds: list[float] = []
    losses: list[float] = []
    while len(seconds) < WARMUP_STEPS + LEAST_STEPS or (
        len(seconds) < WARMUP_STEPS + MOST_STEPS and sum(seconds[WARMUP_STEPS:]) < SECONDS
    ):
        begin = time.perf_counter()
        state, metrics = update(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - begin)
        losses.append(float(metrics["loss"]))
    if not all(map(math.isfinite, losses)):
        raise _contenders.WrongResult(f"the losses are not all finite: {losses}")
    return state, seconds[WARMUP_STEPS:], losses


def attention(program: str) -> dict:
    """Returns the forms, implementations and kernel names that compute attention in a compiled program.

    The backward pass of a form has the same name as the form. Its kernels, if it has any, have names of their own.
    """
    return {
        "attention": ", ".join(sorted({"/".join(found) for found in _FORMS.findall(program)})),
        "kernels": sorted(set(_KERNELS.findall(program))),
    }


def _print(report: dict) -> None:
    rows = sorted(report["rows"], key=lambda row: row["context"])
    softmax = {row["context"]: row.get("tokens_per_second") for row in rows if row["preset"] == "softmax"}
    for row in rows:
        if (reference := softmax.get(row["context"])) and "tokens_per_second" in row:
            row["softmax"] = row["tokens_per_second"] / reference
        if "first_loss" in row:
            row["loss"] = f"{row['first_loss']:.2f} to {row['last_loss']:.2f}"
        row.setdefault("note", ", ".join(row.get("kernels", ())))
    _rows.print_machine(report)
    columns = {
        "context": ("context", "{:,}"),
        "preset": ("preset", ""),
        "scanned": ("scan_layers", "{}"),
        "attention": ("attention", ""),
        "ms": ("seconds", "{:.4g}", 1e3),
        "spread": ("spread", "{:.1%}"),
        "tokens/s": ("tokens_per_second", "{:,.0f}"),
        "/ softmax": ("softmax", "{:.2f}x"),
        "MFU": ("mfu", "{:.1%}"),
        "peak GB": ("peak_bytes", "{:.2f}", 1e-9),
        "program GB": ("program_bytes", "{:.2f}", 1e-9),
        "loss": ("loss", "{}"),
        "kernels, note": ("note", ""),
    }
    _rows.print_table(f"training, {rows[0]['tokens']:,} tokens per step", rows, columns)


if __name__ == "__main__":
    main()
