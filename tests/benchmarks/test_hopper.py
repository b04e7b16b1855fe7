"""Tests of `benchmarks.hopper` that need no GPU: programs at tiny sizes and the script."""

import json
import math
import os
import pathlib
import re
import subprocess

import pytest

from benchmarks import _rows, hopper
from sympow_jax.ops import cost


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
def test_the_script_runs_every_part_with_its_limit(tmp_path):
    """Runs it with a `python` that records its arguments. A part that fails does not end the others."""
    (tmp_path / "python").write_text(f"""#!/bin/bash
echo "$@" >>{tmp_path}/calls
case "$*" in *chunks*) exit 3 ;; esac
for word in "$@"; do case $word in --out=*) echo '{{"rows": []}}' >"${{word#--out=}}" ;; esac; done
""")
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WEIGHTS": "MODEL.gguf"}
    script = [pathlib.Path(hopper.__file__).with_name("run.sh"), tmp_path / "out"]
    for _ in range(2):
        assert subprocess.run(script, env=environment, capture_output=True).returncode == 1
    calls = (tmp_path / "calls").read_text().splitlines()
    parts = [re.search(r"--(out|workdir)=(\S*/)*(\w+)", call)[3] for call in calls]
    # A check is not repeated.
    texts = ["conformal", "softmax", "sympow_gated", "sympow"]
    assert parts == ["check", *2 * ["kernels", "chunks", "training", "scanned", *texts, "retrofit"]]
