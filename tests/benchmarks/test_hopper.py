"""Tests of `benchmarks.hopper` that need no GPU: programs at tiny sizes, the script and the summary."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

from benchmarks import _rows
from benchmarks.hopper import counters, hardware, summary, text
from sympow_jax.ops._recurrent import cost
from tests.pallas_kernels import marks
from tools import h100


def test_the_faster_form_is_chosen_wherever_both_were_measured_on_an_h200():
    """Chooses from FLOPs at a chunk of 128, whatever the kernels choose, as the op does."""
    seconds: dict[tuple, dict[str, float]] = {}
    for row in json.loads((_rows.RESULTS / "h200" / "kernels-brief.json").read_text())["rows"]:
        form, _, implementation = row["contender"].partition("/")
        if form in ("attention", "chunked") and implementation == "mosaic_gpu" and "seconds" in row:
            shape = tuple(row[name] for name in ("mode", "power", "head_dim", "batch", "heads", "time"))
            seconds.setdefault(shape, {})[form] = row.get("kernel_seconds", row["seconds"])
    both = {shape: times for shape, times in seconds.items() if len(times) == 2}
    assert len(both) == 10
    for (_, power, head_dim, _, heads, time), times in both.items():
        sizes = {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "value_dim": head_dim}
        sizes |= {"time": time, "power": power, "chunk": 128, "exact_window": 64}
        flops = {form: cost.flops_per_token(form, **sizes) for form in times}
        assert cost.faster_kernel(flops, time) == min(times, key=times.__getitem__)


NCU = """==PROF== Connected to process 7
some output of the process
"ID","Process ID","Kernel Name","gpu__time_duration.sum","dram__bytes.sum","sm__throughput.avg","device__name"
"","","","us","Mbyte","%",""
"0","7","power_state_update_mosaic_gpu_kernel","1,360.5","2.5","61.2","H100"
"1","7","power_state_query_mosaic_gpu_kernel","n/a","3","50","H100"
"""


NCU_CALL = {"contender": "chunked/xla", "power": 2, "head_dim": 8, "time": 128}


@pytest.mark.parametrize("message", ["", "==WARNING== x\n", "==WARNING== a, b, c, d, e, f\n", "8,cut\n"])
def test_counters_are_read_among_messages(message):
    first, second = counters.parse(NCU + message)
    assert first["Kernel Name"] == "power_state_update_mosaic_gpu_kernel"
    assert (first["gpu__time_duration.sum"], second["gpu__time_duration.sum"]) == ("1,360.5", "n/a")


@pytest.mark.parametrize("lines", [1, 3, 4])
def test_a_table_of_counters_without_kernels_is_empty(lines):
    assert counters.parse("".join(NCU.splitlines(keepends=True)[:lines])) == []


def test_counters_need_ncu(monkeypatch):
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    with pytest.raises(NotImplementedError, match="ncu is not installed"):
        counters.measure(NCU_CALL)


@pytest.mark.robust
@pytest.mark.parametrize("failure", ["kill -11 $$", """echo '"ID","Process ID","Kernel Name"'"""])
def test_replay_of_applications_follows_a_crash_or_an_empty_table(monkeypatch, tmp_path, failure):
    program = tmp_path / "ncu"
    program.write_text(
        f"#!/bin/sh\ncase $* in *mode=application*) cat <<'END'\n{NCU}END\n;; *) {failure};; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(counters.shutil, "which", lambda name: str(program))
    assert len(counters.measure(NCU_CALL)["counters"]) == 2


def test_constants_are_those_of_the_model():
    assert (hardware.HERTZ, hardware.MULTIPROCESSORS) == (h100.SUSTAINED_HERTZ, h100.MULTIPROCESSORS)
    assert hardware.CACHE_BYTES == h100.CACHE_BYTES


@pytest.mark.parametrize("columns", [32, 40])
def test_products_are_measured_on_right_results(columns):
    found = hardware.measure({"rate": "wgmma", "columns": columns}, smoke=True)
    assert found["assumed"] == columns / 2
    assert found["error"] < 1e-2
    # One iteration: cycles of two warpgroups' 16 products of four instructions each.
    assert found["measured"] == pytest.approx(found["seconds"] * h100.SUSTAINED_HERTZ / 128)


def test_reads_are_measured_on_right_results():
    found = hardware.measure({"rate": "cache", "megabytes": 1 / 32}, smoke=True)
    assert found["error"] == 0
    assert found["measured"] == pytest.approx(2**15 / (found["seconds"] * h100.SUSTAINED_HERTZ))


# Prints the kernels of `hardware` as JSON. JAX must be told first that there is no GPU.
COMPILED = """
import dataclasses, functools, json, jax, jax.numpy as jnp
from benchmarks.hopper import hardware
from tools import h100
shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
product = functools.partial(hardware.wgmma, repeats=hardware.ITERATIONS, blocks=h100.MULTIPROCESSORS)
found = [h100.kernels(product, shape((64, 64)), shape((columns, 64))) for columns in hardware.COLUMNS]
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
    assert len(products) == len(hardware.COLUMNS)
    for kernel in products:
        assert kernel["spill_bytes"] == 0
        assert not kernel["serialized"]
        assert kernel["hgmma"] == hardware.UNROLLED * hardware.INSTRUCTIONS
    assert read["tma_loads"] > 0
    assert read["hgmma"] == 0


@pytest.fixture
def folder(tmp_path):
    """Returns a folder of text with enough subfolders that some are held out."""
    for number in range(30):
        path = tmp_path / "text" / f"package{number}" / "module.py"
        path.parent.mkdir(parents=True)
        path.write_text(f"# package {number}\n" + "x = 1\n" * 40)
    (tmp_path / "text" / "site-packages" / "other").mkdir(parents=True)
    (tmp_path / "text" / "site-packages" / "other" / "module.py").write_text("# other\n")
    (tmp_path / "text" / "picture.png").write_bytes(b"\x89PNG")
    return tmp_path / "text"


def test_text_of_a_folder_is_trained_on_or_held_out(folder):
    train, heldout = (part.tobytes().decode() for part in text.read_text([folder]))
    for number in range(30):
        assert (f"# package {number}\n" in train) != (f"# package {number}\n" in heldout)
    assert "other" not in train + heldout
    assert "PNG" not in train + heldout


def test_text_must_suffice_for_both_sides(tmp_path):
    (tmp_path / "alone.py").write_text("x = 1\n")
    with pytest.raises(
        ValueError, match="6 bytes to train on and 0 held out; name a folder with at least 10 "
    ):
        text.read_text([tmp_path])


def test_all_folders_together_are_read_up_to_the_limit(folder, monkeypatch):
    # A file has 252 or 253 bytes.
    monkeypatch.setattr(text, "MOST_BYTES", 20 * 255)
    parts = text.read_text([folder, folder])
    assert sum(part.tobytes().count(b"# package") for part in parts) == 20


def test_text_must_have_a_window_to_train_on_and_to_evaluate(folder):
    train, heldout = text.read_text([folder])
    row = text.SMOKE | {"preset": "conformal", "seconds": 0.1, "text": str(folder)}
    message = f"training text has {len(train):,} bytes; a window has {len(train) + 1:,}"
    with pytest.raises(ValueError, match=message):
        text.measure(row | {"context": len(train), "tokens": len(train)})
    with pytest.raises(ValueError, match=f"held-out text has {len(heldout):,} bytes; evaluation needs 4,096"):
        text.measure(row | {"lengths": [4096]})


@pytest.mark.slow
def test_training_on_text_lowers_the_loss(folder, monkeypatch):
    monkeypatch.setattr(text, "WARMUP_STEPS", 2)
    found = text.measure(text.SMOKE | {"preset": "conformal", "seconds": 0.1, "text": str(folder)})
    assert found["losses"][-1] < found["losses"][0] == pytest.approx(math.log(256), rel=0.2)
    assert found["steps"] == text.EVERY * (len(found["losses"]) - 1)
    assert found["heldout"].keys() == {"64", "128"}
    assert found["tokens_per_second"] > 0


@pytest.mark.robust
def test_the_script_runs_every_part_with_its_limit(tmp_path):
    """Runs it with a `python` that records its arguments. A part that fails does not end the others."""
    root = pathlib.Path(text.__file__).parents[2]
    (tmp_path / "python").write_text(f"""#!/bin/bash
echo "$@" >>{tmp_path}/calls
for word in "$@"; do case $word in --out=*) file=${{word#--out=}} ;; esac; done
case "$*" in
*summary*) exec {sys.executable} "$@" ;;
*hardware*) exit 3 ;;
*) echo '{{"rows": []}}' >"$file" ;;
esac
""")
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(root)}
    script = [root / "benchmarks" / "hopper" / "run.sh", tmp_path / "out"]
    for _ in range(2):
        done = subprocess.run(script, env=environment, capture_output=True, text=True)
        assert done.returncode == 1
    calls = (tmp_path / "calls").read_text().splitlines()
    parts = [pathlib.Path(c.rpartition("--out=")[2]).stem for c in calls if "--out=" in c]
    # A check is not repeated.
    assert parts == [*summary.PARTS, *summary.PARTS[1:]]
    assert (tmp_path / "out" / "summary.md").read_text().startswith("# Measured on no device yet")


def test_summary_has_every_measurement():
    def row(contender, seconds, **sizes):
        shape = {
            "mode": "training",
            "batch": 1,
            "heads": 8,
            "head_dim": 64,
            "power": 2,
            "chunk": None,
        } | sizes
        return shape | {"contender": contender, "seconds": 2 * seconds, "kernel_seconds": seconds}

    kernels = [row("attention/mosaic_gpu", 40e-3, time=65_536), row("chunked/mosaic_gpu", 5e-3, time=65_536)]
    kernels += [row("softmax/cudnn", 34e-3, time=65_536), row("softmax/cudnn", 1e-3, time=4096)]
    kernels.append(row("step/mosaic_gpu", 122e-6, time=256, mode="step", batch=64) | {"fraction": 0.62})
    failed = {
        "contender": "retention",
        "mode": "training",
        "batch": 1,
        "power": 2,
        "head_dim": 64,
        "time": 1024,
    }
    kernels.append(failed | {"note": "not installed: retention"})
    trained = {"steps": 20, "every": 10, "losses": [5.5, 3.0, 2.5]}
    chunks = [
        row("chunked/mosaic_gpu", 5e-3, time=65_536),
        row("chunked/mosaic_gpu", 4e-3, time=65_536, chunk=1152),
    ]
    text_rows = [trained | {"preset": "conformal", "heldout": {"256": 2.6, "65536": 2.4}}]
    text_rows.append(
        trained | {"preset": "softmax", "losses": [5.5, 3.1], "heldout": {"256": 2.7, "65536": 3.9}}
    )
    markdown = summary.markdown(
        {
            "check": {"cases": [{"case": "a", "status": "ok"}, {"case": "b", "status": "wrong"}]},
            "kernels": {"machine": {"device": "NVIDIA H100"}, "rows": kernels},
            "hardware": {"rows": [{"rate": "wgmma", "columns": 40, "measured": 24.0, "assumed": 20.0}]},
            "chunks": {"rows": chunks},
            "counters": {"rows": [counters.CALLS[0] | {"counters": counters.parse(NCU)}]},
            "training": {"rows": [{"context": 4096, "preset": "conformal", "note": "RESOURCE_EXHAUSTED"}]},
            "text": {"rows": text_rows},
        }
    )
    for line in (
        "# Measured on NVIDIA H100",
        "Check: 1 of 2 cases are correct.",
        "* b: wrong",
        "| pass | p | D | T | attention/mosaic_gpu | chunked/mosaic_gpu | softmax/cudnn | cuDNN / best form |",
        "| training | 2 | 64 | 65536 | 40 | 5 | 34 | 6.80x |",
        "| training | 2 | 64 | 4096 |  |  | 1 |  |",
        "| training | 2 | 64 | 65536 | 5 | 4 |  |",
        "* kernels: retention, training, 2, 64, 1024: not installed: retention",
        "| step/mosaic_gpu | 64 | 122 | 62% |",
        "| wgmma | 40 | 24 | 20 |",
        "* training: conformal, 4096: RESOURCE_EXHAUSTED",
        "| preset | steps | training loss after 10 | 256 | 65536 |",
        "| softmax | 20 | 3.1 | 2.7 | 3.9 |",
    ):
        assert line in markdown.splitlines(), line
    assert "| 1,360.5 |" in markdown
