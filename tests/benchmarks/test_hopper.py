"""Tests of `benchmarks.hopper` that need no GPU: programs at tiny sizes and the script."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

from benchmarks import _rows
from benchmarks.hopper import hardware
from sympow_jax.ops import cost
from tests.pallas_kernels import marks
from tools import h100


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("h200/kernels-brief", 10),
        ("h200/kernels-forward", 2),
        ("h200/kernels-both-passes", 2),
        ("h200/kernels-128", 2),
        ("h100/kernels-brief", 2),
        ("h100/kernels", 8),
    ],
)
def test_the_faster_form_is_chosen_wherever_both_were_measured(name, count):
    """Chooses from FLOPs at a chunk of 128, whatever the kernels choose, as the op does."""
    seconds: dict[tuple, dict[str, float]] = {}
    for row in json.loads((_rows.RESULTS / f"{name}.json").read_text())["rows"]:
        form, _, implementation = row["contender"].partition("/")
        if form in ("attention", "chunked") and implementation == "mosaic_gpu" and "seconds" in row:
            shape = tuple(row[name] for name in ("power", "head_dim", "batch", "heads", "time"))
            times = seconds.setdefault((*shape, row["mode"]), {})
            times[form] = min(row.get("kernel_seconds", row["seconds"]), times.get(form, math.inf))
    both: dict[tuple, dict[str, float]] = {}
    compared = [(shape, times) for shape, times in seconds.items() if len(times) == 2]
    assert len(compared) == count
    # The op does not know whether it will be differentiated, so the sum of the measured passes counts.
    for shape, times in compared:
        found = both.setdefault(shape[:-1], dict.fromkeys(times, 0.0))
        for form, taken in times.items():
            found[form] += taken
    for (power, head_dim, batch, heads, time), times in both.items():
        sizes = {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "value_dim": head_dim}
        sizes |= {"time": time, "power": power, "chunk": 128, "exact_window": 64}
        flops = {form: cost.flops_per_token(form, **sizes) for form in times}
        assert cost.faster_kernel(flops, time, batch * heads) == min(times, key=times.__getitem__)


@pytest.mark.robust
def test_rates_are_measured_on_right_results():
    found = hardware.measure(
        {"rate": "wgmma", "columns": 40, "left_in": "registers", "warpgroups": 2}, smoke=True
    )
    assert found["assumed"] == 20
    assert found["error"] < 1e-2
    # One iteration: cycles of two warpgroups' 16 products of four instructions each.
    assert found["measured"] == pytest.approx(found["seconds"] * h100.SUSTAINED_HERTZ / 128)
    found = hardware.measure({"rate": "cache", "megabytes": 1 / 32}, smoke=True)
    assert found["error"] == 0
    assert found["measured"] == pytest.approx(2**15 / (found["seconds"] * h100.SUSTAINED_HERTZ))


# Prints the kernels of `hardware` as JSON. JAX must be told first that there is no GPU.
COMPILED = """
import dataclasses, functools, json, jax, jax.numpy as jnp
from benchmarks.hopper import hardware
from tools import h100
shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
found = [
    h100.kernels(
        functools.partial(
            hardware.wgmma, repeats=hardware.ITERATIONS, blocks=h100.MULTIPROCESSORS, warpgroups=count, left_in=left
        ),
        shape((64, 64)),
        shape((columns, 64)),
    )
    for columns in hardware.COLUMNS
    for left, count in (("registers", 2), ("memory", 2), ("memory", 1))
]
read = functools.partial(hardware.cache, repeats=hardware.PASSES, blocks=h100.MULTIPROCESSORS)
found.append(h100.kernels(read, shape((2**15, 64))))
print(json.dumps([dataclasses.asdict(kernel) for kernels in found for kernel in kernels]))
"""


@pytest.mark.h100
@marks.needs_compiler
def test_kernels_that_measure_compile_for_an_h100():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    *products, read = json.loads(done.stdout.splitlines()[-1])
    assert len(products) == 3 * len(hardware.COLUMNS)
    for kernel in products:
        assert kernel["spill_bytes"] == 0
        assert not kernel["serialized"]
        assert kernel["hgmma"] == hardware.UNROLLED * hardware.INSTRUCTIONS
    assert read["tma_loads"] > 0
    assert read["hgmma"] == 0


@pytest.mark.robust
def test_the_script_runs_every_part_with_its_limit(tmp_path):
    """Runs it with a `python` that records its arguments. A part that fails does not end the others."""
    (tmp_path / "python").write_text(f"""#!/bin/bash
echo "$@" >>{tmp_path}/calls
case "$*" in *hardware*) exit 3 ;; esac
for word in "$@"; do case $word in --out=*) echo '{{"rows": []}}' >"${{word#--out=}}" ;; esac; done
""")
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = [pathlib.Path(hardware.__file__).with_name("run.sh"), tmp_path / "out"]
    for _ in range(2):
        assert subprocess.run(script, env=environment, capture_output=True).returncode == 1
    calls = (tmp_path / "calls").read_text().splitlines()
    parts = [re.search(r"--(out|workdir)=(\S*/)*(\w+)", call)[3] for call in calls]
    # A check is not repeated.
    texts = ["conformal", "softmax", "sympow_gated", "sympow"]
    assert parts == ["check", *2 * ["kernels", "hardware", "chunks", "training", *texts]]
