"""Measures a training step in this process.

python -m benchmarks._training    # one run on standard input, its events on standard output
"""

import dataclasses
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import _contenders, _timing, _worker
from configs import gpt2_124m
from sympow_jax import config, training
from sympow_jax.training import flops, sharding

__all__ = ["Run", "attention", "measure"]

WARMUP_STEPS = 2
# Steps are timed for this many seconds, but at least LEAST_STEPS and at most MOST_STEPS of them.
SECONDS = 15.0
LEAST_STEPS, MOST_STEPS = 3, 10
# Kernels and copies of a step whose times are in its row.
LONGEST = 40
_FORMS = re.compile(r"\b(attention|chunked|recurrent|softmax)_(reference|xla|mosaic_gpu|cudnn)\b")
_KERNELS = re.compile(r"\bpower_(?:attention|state)_\w+|__cudnn\$\w+")
# A model small enough for any device.
_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "layers": 2,
    "width": 32,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 16,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of the training run that one process measures.

    preset: the argument of `configs/gpt2_124m.py`, with its power. tokens: tokens per step, a multiple of the context.
    tiny: whether to use a model small enough for any device.
    """

    preset: str
    context: int
    tokens: int
    tiny: bool = False

    def settings(self) -> config.Config:
        """Returns the papers' configuration with this run's batch. Raises ValueError for an unknown preset."""
        settings = gpt2_124m.get_config(self.preset)
        data = dataclasses.replace(settings.data, context_length=self.context, batch_tokens=self.tokens)
        model = settings.model
        if self.tiny:
            model = dataclasses.replace(model, **_TINY)
        return dataclasses.replace(settings, data=data, model=model)


def measure(run: Run, emit: Callable[[dict], None]) -> dict:
    """Measures a run on the first device and returns its row; emits {"sign": ...} as a sign of progress.

    The times of single kernels are taken last; the row is emitted before, so a profiler that fails costs only them.
    Errors from compiling and running propagate.
    """
    settings = run.settings()
    device = jax.devices()[0]
    mesh = sharding.whole_mesh([device])
    rows = np.random.default_rng(0).integers(
        settings.model.vocab_size, size=(settings.data.batch_size, run.context + 1), dtype=np.int32
    )
    batch = sharding.place_batch({"inputs": rows[:, :-1], "targets": rows[:, 1:]}, mesh)
    begin = time.perf_counter()
    program = training.Program(settings, mesh)
    update = program.update.lower(program.abstract, batch).compile()
    compile_seconds = time.perf_counter() - begin
    emit({"sign": "compiled"})

    seconds: list[float] = []
    losses: list[float] = []
    state = program.init_state()
    with _timing.exclusive():
        while len(seconds) < WARMUP_STEPS + LEAST_STEPS or (
            len(seconds) < WARMUP_STEPS + MOST_STEPS and sum(seconds[WARMUP_STEPS:]) < SECONDS
        ):
            begin = time.perf_counter()
            state, metrics = update(state, batch)
            jax.block_until_ready((state, metrics))
            seconds.append(time.perf_counter() - begin)
            losses.append(float(metrics["loss"]))
            emit({"sign": f"step {len(losses)}"})
    if not all(map(math.isfinite, losses)):
        raise _contenders.WrongResult(f"the losses are not all finite: {losses}")

    measured = seconds[WARMUP_STEPS:]
    median = statistics.median(measured)
    stats = device.memory_stats() or {}
    needed = run.tokens * flops.model_flops_per_token(settings.model, run.context)
    peak = flops.peak_flops(device)
    row = {
        **attention(update.as_text()),
        "seconds": median,
        "spread": _timing.spread(measured),
        "tokens_per_second": run.tokens / median,
        "model_flops_per_second": needed / median,
        "mfu": None if peak is None else needed / median / peak,
        "steps": len(measured),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "program_bytes": _contenders.program_bytes(update),
        "compile_seconds": compile_seconds,
    }
    emit({"row": row})
    with _timing.exclusive():
        kernels = _timing.traced_seconds(lambda: jax.block_until_ready(update(state, batch)))
    return row | {"device_seconds": sum(kernels.values()), "longest": dict(list(kernels.items())[:LONGEST])}


def attention(program: str) -> dict:
    """Returns the forms, implementations and kernel names that compute attention in a compiled program.

    The backward pass of a form has the same name as the form. Its kernels, if it has any, have names of their own.
    """
    return {
        "attention": ", ".join(sorted({"/".join(found) for found in _FORMS.findall(program)})),
        "kernels": sorted(set(_KERNELS.findall(program))),
    }


def main() -> None:
    """Reads a run from standard input and measures it."""
    run = Run(**json.load(sys.stdin))
    try:
        machine = _contenders.machine()
    except RuntimeError as error:
        _worker.say({"no_device": _worker.one_line(error)})
        return
    if machine["platform"] != "gpu":
        _worker.say({"no_device": f"JAX sees no GPU here, only {machine['device']}"})
        return
    _worker.say({"machine": machine})
    try:
        _worker.say({"row": measure(run, _worker.say)})
    except Exception as error:
        _worker.say({"failed": _worker.one_line(error)})
        raise


if __name__ == "__main__":
    main()
