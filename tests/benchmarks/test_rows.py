"""Tests that rows of a benchmark are measured in processes that may crash, hang or take too long."""

import argparse
import json
import sys
import time

import pytest

from benchmarks import _rows

pytestmark = pytest.mark.robust

# Measures the row {"number": n}; the first ones have a fault each.
PROGRAM = """
import os, sys, time
from benchmarks import _rows
from pallas_kernels.check import supervisor
def measure(row):
    print("noise")
    match row["number"]:
FAULTS
    with supervisor.exclusive():
        return {"seconds": 1.0, "machine": {"jax": str(row["number"])}}
options = _rows.read_options(_rows.make_parser(""), sys.argv[1:])
_rows.measure_rows("", [], measure, options, seconds=1.0)
"""


def measured(*faults, count=2, **limits):
    cases = (f"        case {number}:\n            {fault}" for number, fault in enumerate(faults))
    command = [sys.executable, "-c", PROGRAM.replace("FAULTS", "\n".join(cases))]
    return list(_rows.in_processes([{"number": n} for n in range(count)], command, **limits))


def test_no_row_is_measured_while_another_tunes(tmp_path):
    """The first row measures only after the second, which began to tune before it."""
    begun, over = tmp_path / "begun", tmp_path / "over"
    tune = f"""with supervisor.tuning():
                open({str(begun)!r}, "w"); time.sleep(1); open({str(over)!r}, "w")"""
    wait = f"""
            while not os.path.exists({str(begun)!r}): time.sleep(0.01)
            with supervisor.exclusive(): assert os.path.exists({str(over)!r})"""
    assert [row["seconds"] for row in measured(wait, tune, seconds=60.0, jobs=2)] == [1.0, 1.0]


def test_a_row_that_fails_is_lost_alone():
    notes = {
        "raise ValueError('a mistake')": "ValueError: a mistake",
        "os.kill(os.getpid(), 11)": "exit status -11: no message",
    }
    *failed, last = measured(*notes, count=3, seconds=60.0, jobs=2)
    assert failed == [{"number": number, "note": note} for number, note in enumerate(notes.values())]
    assert last == {"number": 2, "seconds": 1.0, "machine": {"jax": "2"}}


def test_rows_have_a_time_limit(monkeypatch):
    rows = measured("time.sleep(60)", seconds=60.0, deadline=time.monotonic() + 1)
    assert [row["note"] for row in rows] == [_rows.NO_TIME] * 2
    # Only other processes lengthen the limit of a row.
    limits = []
    monkeypatch.setattr(
        _rows.supervisor, "run_all", lambda *_, seconds, **_more: limits.append(seconds) or []
    )
    for jobs in (1, 2, 5):
        assert list(_rows.in_processes([], ["none"], seconds=8.0, jobs=jobs)) == []
    assert limits == [8.0, 10.0, 16.0]


@pytest.mark.slow
def test_a_row_that_hangs_is_ended():
    # The other row must import JAX in this time, on a busy machine too.
    hung, row = measured("time.sleep(600)", seconds=12.0, jobs=2)
    assert hung["note"] == "no result within 15 s"
    assert row["seconds"] == 1.0


def options(*flags):
    return _rows.read_options(argparse.ArgumentParser(), flags)


def test_a_report_has_the_rows_of_processes_and_those_of_an_earlier_one(tmp_path, monkeypatch):
    path, limits, asked = tmp_path / "folder" / "rows.json", [], []

    def in_processes(rows, command, **limit):
        limits.append((command[1:], limit))
        for row in rows:
            if "device" not in row:
                asked.append(row["number"])
                # Written as they come.
                written = len(json.loads(path.read_text())["rows"]) if path.exists() else 0
                assert written == len(asked) - 1 + kept
            yield row | {"machine": {"device": "H100", "torch": "2"}, "seconds": 1.0}

    def report(count, *flags):
        described = [{"number": number} for number in range(count)]
        chosen = options(f"--out={path}", "--jobs=3", *flags)
        return _rows.measure_rows("module", described, dict, chosen, seconds=9.0, most_seconds=50.0)

    monkeypatch.setattr(_rows, "in_processes", in_processes)
    monkeypatch.setattr(_rows.time, "monotonic", lambda: 100.0)
    kept = 0
    found = report(2)
    command = ("-m", "module")
    assert limits == [(command, {"seconds": 9.0}), (command, {"seconds": 9.0, "deadline": 150.0, "jobs": 3})]
    rows = [{"number": number, "seconds": 1.0} for number in range(2)]
    assert (
        found == json.loads(path.read_text()) == {"machine": {"device": "H100", "torch": "2"}, "rows": rows}
    )

    # Rows that failed are finished, and those for which there was no time are not.
    rows[1:] = [{"number": 1, "note": "segmentation fault"}, {"number": 2, "note": _rows.NO_TIME}]
    path.write_text(json.dumps(found | {"rows": rows}))
    asked.clear()
    kept = 2
    assert report(4, "--resume")["rows"] == [*rows[:2], *({"number": n, "seconds": 1.0} for n in (2, 3))]
    assert asked == [2, 3]
    path.write_text(json.dumps({"machine": {"device": "H200"}, "rows": []}))
    with pytest.raises(SystemExit, match="has rows of device H200 and this is H100; use another --out"):
        report(1, "--resume")

    # Without --out, results are named after the device. A smoke run writes only where it is told.
    monkeypatch.setattr(_rows, "RESULTS", tmp_path / "results")
    path, kept = tmp_path / "results" / "brief-h100.json", 0
    asked.clear()
    for flags, files in ((["--smoke"], []), ([], [path])):
        _rows.measure_rows("module", [{"number": 0}], dict, options(*flags), seconds=9.0, name="brief")
        assert list(tmp_path.glob("results/*")) == files


def test_a_note_is_printed_as_it_is(capsys):
    _rows.print_table("rows", [{"note": "INTERNAL: [/tmp/x]"}], {"note": ("note", "")})
    assert "INTERNAL: [/tmp/x]" in capsys.readouterr().out
