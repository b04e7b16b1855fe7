"""Tests that rows of a benchmark are measured in processes that may crash, hang or take too long."""

import argparse
import functools
import json
import os
import sys
import time

import pytest

from benchmarks import _rows

pytestmark = pytest.mark.robust

# Measures the row {"number": n}; the first ones have a fault each.
PROGRAM = """
import os, sys, time
from benchmarks import _rows
def measure(row):
    print("noise")
    match row["number"]:
FAULTS
    with _rows.exclusive():
        return {"seconds": 1.0, "machine": {"jax": str(row["number"])}}
_rows.print_result(measure, sys.argv[1].removeprefix("--row="))
"""


def measured(*faults, count=2, **limits):
    cases = (f"        case {number}:\n            {fault}" for number, fault in enumerate(faults))
    command = [sys.executable, "-c", PROGRAM.replace("FAULTS", "\n".join(cases))]
    return list(_rows.in_processes([{"number": n} for n in range(count)], command, **limits))


NOTES = {
    "raise ValueError('a mistake')": "ValueError: a mistake",
    "raise NotImplementedError('there is no GPU')": "there is no GPU",
    "sys.exit('segmentation fault')": "segmentation fault",
    "os.kill(os.getpid(), 11)": "exit status -11: no message",
}


def test_a_row_that_fails_is_lost_alone():
    *failed, measured_row = measured(*NOTES, count=len(NOTES) + 1, seconds=60.0, jobs=2)
    assert failed == [{"number": number, "note": note} for number, note in enumerate(NOTES.values())]
    last = len(NOTES)
    assert measured_row == {"number": last, "seconds": 1.0, "machine": {"jax": str(last)}}


@pytest.mark.slow
def test_a_row_that_hangs_is_ended():
    # The other row must import JAX in this time, on a busy machine too.
    hung, row = measured("time.sleep(600)", seconds=12.0, jobs=2)
    assert hung["note"] == "no result within 15 s"
    assert row["seconds"] == 1.0


@pytest.mark.parametrize(("jobs", "limit"), [(1, 8.0), (2, 10.0), (5, 16.0)])
def test_only_other_processes_lengthen_the_time_limit(monkeypatch, jobs, limit):
    limits = []
    monkeypatch.setattr(
        _rows.supervisor, "run_all", lambda *_, seconds, **options: limits.append(seconds) or []
    )
    assert list(_rows.in_processes([], ["none"], seconds=8.0, jobs=jobs)) == []
    assert limits == [limit]


def test_what_is_left_when_the_time_is_over_has_notes():
    rows = measured("time.sleep(60)", count=3, seconds=60.0, deadline=time.monotonic() + 1)
    assert [row["note"] for row in rows] == ["not measured: the time was over"] * 3


def test_processes_share_compiled_programs_and_take_turns(monkeypatch):
    monkeypatch.delenv("SYMPOW_BENCHMARK_LOCK", raising=False)
    before = dict(os.environ)
    with _rows._shared(2):
        assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        assert os.path.isdir(os.environ["JAX_COMPILATION_CACHE_DIR"])
        with _rows.exclusive():
            pass
    assert dict(os.environ) == before


def test_variables_of_others_are_kept(monkeypatch):
    for name in ("JAX_COMPILATION_CACHE_DIR", "SYMPOW_BENCHMARK_LOCK", "SYMPOW_TEST_OTHER"):
        monkeypatch.setenv(name, "of the test")
    monkeypatch.delenv("SYMPOW_TEST_OTHER")
    with _rows._shared(2):
        os.environ["SYMPOW_TEST_OTHER"] = "set inside"
    assert os.environ["SYMPOW_TEST_OTHER"] == "set inside"
    assert os.environ["SYMPOW_BENCHMARK_LOCK"] == "of the test"


def test_rows_of_the_caller_keep_their_machine():
    rows = [{"number": 0, "machine": {"torch": "2"}}]
    report = _rows.record({"machine": {}}, rows, None)
    assert report == {"machine": {"torch": "2"}, "rows": [{"number": 0}]}
    assert rows == [{"number": 0, "machine": {"torch": "2"}}]


def test_rows_are_written_as_they_come(tmp_path):
    path = tmp_path / "folder" / "rows.json"

    def rows():
        yield {"number": 0, "machine": {"torch": "2"}}
        assert json.loads(path.read_text())["rows"] == [{"number": 0}]
        yield {"number": 1}

    report = _rows.record({"machine": {"jax": "1"}}, rows(), path)
    assert report == {"machine": {"jax": "1", "torch": "2"}, "rows": [{"number": 0}, {"number": 1}]}
    assert json.loads(path.read_text()) == report


def test_results_are_named_after_the_device():
    path = _rows.result_path("training-brief", "NVIDIA H100 80GB HBM3")
    assert path == _rows.RESULTS / "training-brief-nvidia-h100-80gb-hbm3.json"


def test_a_smoke_run_writes_only_where_it_is_told(tmp_path):
    path = functools.partial(_rows.report_path, name="training", device="H100")
    given = tmp_path / "rows.json"
    assert path(argparse.Namespace(out=given, smoke=True)) == given
    assert path(argparse.Namespace(out=given, smoke=False)) == given
    assert path(argparse.Namespace(out=None, smoke=True)) is None
    assert path(argparse.Namespace(out=None, smoke=False)) == _rows.RESULTS / "training-h100.json"


def test_rows_of_a_report_are_measured_in_processes_of_the_benchmark(tmp_path, monkeypatch):
    limits = []

    def in_processes(rows, command, **options):
        limits.append((command[1:], options))
        return [row | {"machine": {"device": "H100"}, "seconds": 1.0} for row in rows]

    monkeypatch.setattr(_rows, "in_processes", in_processes)
    monkeypatch.setattr(_rows.time, "monotonic", lambda: 100.0)
    options = _rows.read_options(argparse.ArgumentParser(), [f"--out={tmp_path / 'rows.json'}", "--jobs=3"])
    report = _rows.make_report("module", [{"number": 0}], dict, options, seconds=9.0, most_seconds=50.0)
    command = ("-m", "module")
    assert limits == [(command, {"seconds": 9.0}), (command, {"seconds": 9.0, "deadline": 150.0, "jobs": 3})]
    assert report == {"machine": {"device": "H100"}, "rows": [{"number": 0, "seconds": 1.0}]}
    assert json.loads(options.out.read_text()) == report


def test_finished_rows_are_kept_and_the_others_measured(tmp_path):
    path = tmp_path / "rows.json"
    old = [
        {"number": 0, "seconds": 1.0},
        {"number": 1, "note": "segmentation fault"},
        {"number": 2, "note": _rows.NO_TIME},
    ]
    path.write_text(json.dumps({"machine": {"device": "H100", "torch": "2"}, "rows": old}))
    options = argparse.Namespace(resume=True, out=path)
    asked = []

    def measure(rows):
        asked.extend(rows)
        return [row | {"seconds": 2.0} for row in rows]

    described = [{"number": number} for number in range(4)]
    rows = _rows.resumed(described, measure, options, {"device": "H100"})
    report = _rows.record({"machine": {"device": "H100"}}, rows, path)
    assert asked == described[2:]
    assert report["machine"]["torch"] == "2"
    assert report["rows"] == [*old[:2], *({"number": number, "seconds": 2.0} for number in (2, 3))]


def test_rows_of_another_device_are_not_kept(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"machine": {"device": "H100"}, "rows": []}))
    options = argparse.Namespace(resume=True, out=path)
    with pytest.raises(SystemExit, match="has rows of H100 and this is H200; use another --out"):
        _rows.resumed([], list, options, {"device": "H200"})
