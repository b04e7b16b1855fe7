"""Tests that context-parallel ops equal those on one device.

Each group of checks has a process with eight devices.
"""

import json
import subprocess
import sys

import pytest

from tests.pallas_kernels import test_op as interpreted


def results(group):
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.time_axis", group],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_ops(report):
    for way in ("angles", "all angles", "angles of one document", "angles of pairs"):
        for devices, angles in report.pop(way, {}).items():
            assert angles["identical"], (way, devices)
            assert angles["rate"] <= 1e-5, (way, devices, angles)
    for case, runs in report.items():
        for run, errors in runs.items():
            for name, error in errors.items():
                bound = 2e-6 if name == "out" else 1e-5
                bound = 1e-10 if "float64" in run else bound
                assert error <= bound, (case, run, name, error, bound)


def check_refused(messages):
    expected = {
        "states": (
            "NotImplementedError: ",
            "does not support states; leave out initial_state and return_state",
        ),
        "state": (
            "NotImplementedError: ",
            "does not support states; leave out initial_state and return_state",
        ),
        "reference": ("NotImplementedError: ", "'reference' does not support; use implementation='xla'"),
        "KV cache": ("NotImplementedError: ", "equal numbers of keys and queries"),
        "KV cache of softmax": ("NotImplementedError: ", "equal numbers of keys and queries, not 8 and 7"),
        "KV cache of expressive": ("NotImplementedError: ", "equal numbers of keys and queries, not 8 and 7"),
        "exact_window": ("ValueError: ", "holds 8 of 16 positions, fewer than the window of 9; use a longer"),
    }
    assert messages.keys() == expected.keys()
    for name, (kind, words) in expected.items():
        assert messages[name].startswith(kind), messages[name]
        assert words in messages[name], messages[name]


def check_programs(report):
    # Two rows of documents' summaries, and of segment ids, in int32.
    summaries, ids = 8 * 2 * 4, 8 * 128 * 2 * 4
    # Two rows of 8 heads, D = E = 16: a window's keys, and states with their normalizers, of up to 160 features.
    exact_window, state = 64 * 2 * 8 * 16 * 4, 160 * 17 * 2 * 8 * 4
    for case, collectives in report.items():
        kinds = {kind for kind, _ in collectives}
        gathered = [size for kind, size in collectives if kind == "all-gather"]
        if case.startswith("chunked"):
            assert kinds <= {"collective-permute", "all-gather"}, (case, kinds)
            assert all(size <= summaries for size in gathered), (case, gathered)
            largest = max(size for kind, size in collectives if kind == "collective-permute")
            assert exact_window <= largest <= state, (case, largest)
            # For states, a shift and three rounds, forward and backward.
            assert sum(size > exact_window for _, size in collectives) == 2 * 4, (case, collectives)
        else:
            # Queries, keys, values, decays and outputs, and the gradients of each.
            assert sum(kind == "all-to-all" for kind, _ in collectives) == 2 * 5, (case, collectives)
            assert kinds == {"all-to-all", "all-gather"}, (case, kinds)
            # Segment ids; the mask of outputs reached by a NaN is a few bytes per row.
            assert [size for size in gathered if size > summaries] == [ids], (case, gathered)


def check_kernels(report):
    for errors in report.values():
        interpreted.check(errors["kernel"], errors["plain"])


def test_ops_over_devices_are_those_of_one():
    report = results("ops")
    check_refused(report.pop("refused"))
    check_ops(report)


def test_kernels_over_devices_are_as_exact_as_plain_jax_on_one():
    check_kernels(results("kernels"))


def test_collectives():
    check_programs(results("programs"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_ops_over_devices():
    report = results("all-ops")
    check_refused(report.pop("refused"))
    check_ops(report)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_kernels_over_devices():
    check_kernels(results("all-kernels"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_collectives():
    check_programs(results("all-programs"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_conformal_attention_over_65536_tokens():
    for name, error in results("long").items():
        assert error <= 2e-5, (name, error)
