"""Tests of generation over simulated devices: the tokens of one device, from states that are sharded."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
D, T = "data", "tensor"


def axes(rows, heads):
    """Returns the axes that should shard the arrays of a cache, then those of a recurrent state."""
    slots = [rows, None, heads] if heads else [rows] if rows else []
    state = [rows, heads] if heads else [rows] if rows else []
    row = [rows] if rows else []
    cache = dict.fromkeys(("key", "value", "log_decay"), state)
    cache |= dict.fromkeys(("segment_ids", "next", "segment", "complete"), row)
    window = dict.fromkeys(("keys", "values", "log_decays"), slots)
    recurrent = dict.fromkeys(("kv", "norm"), state) | window | dict.fromkeys(("length", "segment"), row)
    return (
        {f".memory.{name}": value for name, value in cache.items()},
        {f".memory.{name}": value for name, value in recurrent.items()},
    )


def run(cases):
    done = subprocess.run(
        [sys.executable, "-m", "tests.generation.sharded", *map(json.dumps, cases)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(case, rows, heads):
    """Checks tokens and states, whose rows and key/value heads should be sharded over these axes."""
    (result,) = run([case])
    assert result["equal"]
    assert result["varied"] > 10
    cache, recurrent = axes(rows, heads)
    # A cache at first, and a recurrent state once it is folded.
    for specs, expected in zip(result["specs"], [cache, cache, cache, recurrent]):
        assert {name: spec for name, spec in specs.items() if name in expected} == expected
        if ".position.whole" in specs:
            assert specs[".position.whole"] == [axis for axis in (rows, heads) if axis]


def test_rows_are_moved_on_every_kind_of_mesh():
    (results,) = run(["rows"])
    assert len(results) == 2 * 5 * 2 * 2
    types = {
        "fork": ["float32[8@data,8@tensor]", "int32[8@data]"],
        "take": ["float32[1,8@tensor]", "int32[1]"],
        "insert": ["float32[4@data,8@tensor]", "int32[4@data]"],
    }
    for kind, name, actual, equal in results:
        assert equal, (kind, name)
        if kind == "Explicit":
            assert actual == types[name.partition("_")[0]]


@pytest.mark.slow
def test_a_kv_cache_and_a_recurrent_state():
    check(("conformal", 2, 4, {D: 4, T: 2}), D, T)


@pytest.mark.slow
def test_a_kv_cache_alone():
    check(("softmax", 4, 4, {D: 2, T: 4}), D, T)


@pytest.mark.slow
def test_axes_that_do_not_divide():
    """Every device has all rows, and all heads."""
    check(("conformal", 2, 3, {D: 2, T: 4}), None, None)
