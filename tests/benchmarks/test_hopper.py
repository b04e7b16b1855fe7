"""Tests of `benchmarks.hopper` that need no GPU: its smoke run, the summary, and what it makes of measured rows."""

import functools
import json
import math
import os
import re
import subprocess
import sys

import pytest

from benchmarks import _rows
from benchmarks.hopper import __main__ as hopper
from benchmarks.hopper import choices, counters, hardware, summary, text
from sympow_jax.ops._recurrent import cost
from tests.pallas_kernels import marks
from tools import h100


def row(contender, seconds, **sizes):
    """Returns a made-up row of `benchmarks.kernels`."""
    shape = {"mode": "training", "batch": 1, "heads": 8, "head_dim": 64, "power": 2, "chunk": None} | sizes
    return shape | {"contender": contender, "seconds": 2 * seconds, "kernel_seconds": seconds}


def both(attention, chunked, **sizes):
    return [
        row("attention/mosaic_gpu", attention, **sizes),
        row("chunked/mosaic_gpu", chunked, **sizes),
    ]


# At D = 64 the rule takes the attention form up to T = 8,192 and the chunked one from 16,384 on.
RIGHT = both(1e-3, 2e-3, time=4096) + both(40e-3, 5e-3, time=65_536)
WRONG = both(3e-3, 2e-3, time=8192) + both(1e-3, 4e-3, time=16_384)


def test_choices_name_the_shapes_at_which_the_slower_form_is_chosen():
    found = choices.measured_choices([*RIGHT, *WRONG])
    assert [(choice.shape["time"], choice.form, choice.loss) for choice in found] == [
        (4096, "attention", 1.0),
        (65_536, "chunked", 1.0),
        (8192, "attention", pytest.approx(1.5)),
        (16_384, "chunked", pytest.approx(4.0)),
    ]


def test_the_faster_form_is_chosen_wherever_both_were_measured_on_an_h200():
    rows = json.loads((_rows.RESULTS / "h200" / "kernels-brief.json").read_text())["rows"]
    found = choices.measured_choices(rows)
    assert len(found) == 10
    assert [choice for choice in found if choice.loss > 1] == []


def test_choices_need_both_forms_with_the_chosen_chunk():
    alone = row("attention/mosaic_gpu", 1e-3, time=4096)
    others = [
        row("chunked/mosaic_gpu", 1e-3, time=4096, chunk=384),
        row("chunked/mosaic_gpu", 1e-3, time=4096, power=4),
        row("chunked/xla", 1e-3, time=4096),
        {**row("chunked/mosaic_gpu", 1e-3, time=4096), "seconds": None, "kernel_seconds": None},
    ]
    assert choices.measured_choices([alone, *others]) == []


def test_constants_that_choose_right_are_left_as_they_are():
    assert choices.fit(RIGHT) == {
        "feature_cost": cost.FEATURE_COST,
        "least_chunked_time": cost.LEAST_CHUNKED_TIME,
    }


def test_fitted_constants_lose_no_time_where_some_do_not():
    # The chunked form is faster from 8,192 on, where the rule still takes the other one.
    rows = RIGHT + both(3e-3, 2e-3, time=8192) + both(9e-3, 3e-3, time=16_384)
    assert max(choice.loss for choice in choices.measured_choices(rows)) == pytest.approx(1.5)
    fitted = choices.fit(rows)
    assert fitted["feature_cost"] < cost.FEATURE_COST
    assert all(choice.loss == 1 for choice in choices.measured_choices(rows, **fitted))


def test_crossover_is_interpolated_in_logarithms():
    # The ratio falls from 2 to 1/2 between the two, so it is 1 at their geometric mean.
    slower, faster = {1024: 2.0, 4096: 1.0}, {1024: 1.0, 4096: 2.0}
    assert choices.crossover(slower, faster) == pytest.approx(2048)
    assert choices.crossover(faster, slower) is None
    assert choices.crossover({1024: 1.0, 4096: 1.0}, {1024: 2.0, 4096: 2.0, 8192: 0.1}) == 1024
    assert choices.crossover({}, slower) is None


NCU = """==PROF== Connected to process 7
some output of the process
"ID","Process ID","Kernel Name","gpu__time_duration.sum","dram__bytes.sum","sm__throughput.avg","device__name"
"","","","us","Mbyte","%",""
"0","7","power_state_update_mosaic_gpu_kernel","1,360.5","2.5","61.2","H100"
"1","7","power_state_query_mosaic_gpu_kernel","n/a","3","50","H100"
"""


def test_counters_are_read_in_base_units():
    first, second = counters.parse(NCU)
    assert first == {
        "kernel": "power_state_update_mosaic_gpu_kernel",
        "gpu__time_duration.sum": pytest.approx(1360.5e-6),
        "dram__bytes.sum": 2.5e6,
        "sm__throughput.avg": 61.2,
    }
    assert "gpu__time_duration.sum" not in second
    assert counters.parse("==ERROR== crashed\n") == []


@pytest.mark.parametrize("message", ["==WARNING== x", "==WARNING== a, b, c, d, e, f", "8,cut"])
def test_messages_after_the_counters_are_no_kernels(message):
    assert counters.parse(f"{NCU}{message}\n") == counters.parse(NCU)


@pytest.mark.parametrize("lines", [3, 4])
def test_a_table_of_counters_without_kernels_is_empty(lines):
    assert counters.parse("".join(NCU.splitlines(keepends=True)[:lines])) == []


def test_counters_need_ncu(monkeypatch):
    monkeypatch.setattr(counters, "COMMAND", ("true",))
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    call = {"contender": "chunked/xla", "power": 2, "head_dim": 8, "time": 128}
    with pytest.raises(NotImplementedError, match="ncu is not installed"):
        counters.measure(call)


@pytest.mark.parametrize("failure", ["kill -11 $$", """echo '"ID","Process ID","Kernel Name"'"""])
def test_replay_of_applications_follows_a_crash_or_an_empty_table(monkeypatch, tmp_path, failure):
    program = tmp_path / "ncu"
    program.write_text(
        f"#!/bin/sh\ncase $* in *mode=application*) cat <<'END'\n{NCU}END\n;; *) {failure};; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(counters, "COMMAND", ("true",))
    monkeypatch.setattr(counters.shutil, "which", lambda name: str(program))
    found = counters.measure({"contender": "chunked/xla", "power": 2, "head_dim": 8, "time": 128})
    assert found["replay"] == "application"
    assert len(found["counters"]) == 2


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


def test_smoke_runs_and_resumes(tmp_path, capfd):
    arguments = [
        "--smoke",
        f"--out={tmp_path / 'out'}",
        f"--cache={tmp_path / 'cache'}",
        "--parts=check,hardware",
    ]
    with pytest.raises(SystemExit, match="not every part ended well: check;"):
        hopper.main(arguments)
    assert "needs an NVIDIA Hopper GPU" in capfd.readouterr().err
    report = json.loads((tmp_path / "out" / "hardware.json").read_text())
    assert [row["rate"] for row in report["rows"]] == ["wgmma", "cache"]
    ended = json.loads((tmp_path / "out" / "parts.json").read_text())
    assert {name: found["finished"] for name, found in ended.items()} == {"check": False, "hardware": True}
    markdown = (tmp_path / "out" / "summary.md").read_text()
    assert "| check | exit status 1," in markdown
    assert "`tools.h100.CACHE_BYTES`" in markdown

    hopper.main([*arguments[:-1], "--parts=hardware"])
    assert "hardware: finished before" in capfd.readouterr().out


def test_parts_that_take_too_long_are_ended(tmp_path, monkeypatch, capfd):
    sleeps = hopper.Part(("-c", "import time; time.sleep(60)"), 0.5, resumes=False, least_seconds=0)
    monkeypatch.setattr(hopper, "PARTS", hopper.PARTS | {"check": sleeps})
    with pytest.raises(SystemExit):
        hopper.main(["--parts=check", f"--out={tmp_path}"])
    assert "check: ended at its time limit" in capfd.readouterr().out
    assert "Not measured." in (tmp_path / "summary.md").read_text()


def test_without_time_no_part_begins(tmp_path, capfd):
    hopper.main(["--minutes=0.1", f"--out={tmp_path}"])
    assert capfd.readouterr().out.count("not started, ") == len(hopper.PARTS)
    assert (tmp_path / "summary.md").read_text().count("| not started |") == len(hopper.PARTS)


def test_the_check_does_not_start_without_time_to_finish(tmp_path, monkeypatch, capfd):
    started = []
    monkeypatch.setattr(hopper, "_run", lambda command, *_: started.append(command) or (0, 1.0))
    hopper.main(["--parts=check,hardware", "--minutes=5", f"--out={tmp_path}"])
    assert ["benchmarks.hopper.hardware" in command for command in started] == [True]
    assert re.search(r"== check: not started, \d+ s are left of 480 needed", capfd.readouterr().out)
    markdown = (tmp_path / "summary.md").read_text()
    assert "| check | not started |" in markdown
    hopper.main(["--parts=check", "--minutes=9", f"--out={tmp_path}"])
    assert "check" in started[-1]


def test_unknown_parts_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        hopper.main(["--parts=kernel", f"--out={tmp_path}"])
    assert "'kernel' is no part; the parts are check, kernels," in capsys.readouterr().err


def test_summary_has_every_measurement():
    step = {"mode": "step", "bytes_per_second": 2e12, "fraction": 0.62}
    kernels = [
        *RIGHT,
        *WRONG,
        row("softmax/cudnn", 34e-3, time=65_536),
        row("softmax/cudnn", 1e-3, time=4096),
        row("step/mosaic_gpu", 122e-6, time=256) | step | {"batch": 64},
        {**row("retention", 1.0, time=1024), "note": "not installed: retention"},
    ]
    del kernels[-1]["seconds"], kernels[-1]["kernel_seconds"]
    chunk = functools.partial(row, "chunked/mosaic_gpu", time=65_536)
    trained = {"steps": 20, "tokens_per_second": 2e5, "every": 10, "losses": [5.5, 3.0, 2.5]}
    markdown = summary.markdown(
        {
            "parts": {"kernels": {"status": 0, "seconds": 470.2, "finished": False}},
            "check": {"cases": [{"case": "a", "status": "ok"}, {"case": "b", "status": "wrong"}]},
            "kernels": {"machine": {"device": "NVIDIA H100"}, "ceilings": {"bytes": 3e12}, "rows": kernels},
            "hardware": {
                "rows": [
                    {"rate": "wgmma", "columns": 40, "measured": 24.0},
                    {"rate": "wgmma", "columns": 64, "measured": 28.0},
                    {"rate": "cache", "megabytes": 16, "measured": 41.5},
                ]
            },
            "chunks": {"rows": [chunk(5e-3), chunk(4e-3, chunk=1152), chunk(6e-3, chunk=384)]},
            "counters": {"rows": [counters.CALLS[0] | {"counters": counters.parse(NCU)}]},
            "training": {"rows": [{"context": 4096, "preset": "conformal", "note": "RESOURCE_EXHAUSTED"}]},
            "text": {
                "rows": [
                    trained | {"preset": "conformal", "heldout": {"256": 2.6, "65536": 2.4}},
                    trained
                    | {"preset": "softmax", "losses": [5.5, 3.1], "heldout": {"256": 2.7, "65536": 3.9}},
                ]
            },
        }
    )
    for line in (
        "# Measured on NVIDIA H100",
        "| kernels | not every row had time, 470 s |",
        "| hardware | not started |",
        "1 of 2 cases are correct.",
        "* b: wrong",
        "| training | 2 | 64 | 65,536 | 5 | 40 | 34 | 6.80x |",
        "* retention, training, p = 2, D = 64, T = 1,024: not installed: retention",
        "At 2 of 4 shapes at which both forms were measured.",
        "| training | 2 | 64 | 1 | 8 | 16384 | chunked | 1 | 4 | 4.00x |",
        "| step/mosaic_gpu | 64 | 122 | 2.00 TB/s | 62% |",
        # At N = 64 a product takes 28 cycles, so N = 40 would take 17.5 at the same rate.
        "| cycles of m64n40k16, N / 2 in `tools.compiled` | 20 | 24, 1.371 times the share at N = 64 |",
        f"| `tools.h100.CACHE_BYTES`, from 16 MB | {h100.CACHE_BYTES} | 41.5 |",
        "| `square.tiles.longest_chunk(64)` | 768 | 1152 |",
        "| 64 | 65,536 | chosen: 5, 1152: 4, 384: 6 |",
        "| 4,096 | conformal | RESOURCE_EXHAUSTED |  |  |  |",
        "| preset | steps | tokens/s | training loss after 10 steps | to 256 | to 65,536 |",
        "| softmax | 20 | 200,000 | 3.100 | 2.700 | 3.900 |",
    ):
        assert line in markdown.splitlines(), line

    assert "1360" in markdown
