"""Tests of generation over simulated devices: the tokens of one device, from states that are sharded."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
D, T = "data", "tensor"


def axes(rows, heads):
    """Returns the axes that should shard the arrays of a cache, then those of a recurrent state."""
    slots = [rows, None, heads] if heads else [rows] if rows else []
    state = [rows, heads] if heads else [rows] if rows else []
    row = [rows] if rows else []
    cache = dict.fromkeys(("key", "value", "log_decay"), slots)
    cache |= dict.fromkeys(("segment_ids", "segment", "complete"), row)
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


# Cases, and the axes that should shard their rows and key/value heads.
CASES = [
    (("conformal", 2, 4, {D: 4, T: 2}), D, T),
    # Neither axis divides: every device has all rows, or all heads.
    (("conformal", 2, 3, {D: 2, T: 4}), None, None),
    (("softmax", 4, 4, {D: 2, T: 4}), D, T),
]


def test_tokens_and_states():
    results = run([case for case, *_ in CASES])
    assert len(results) == len(CASES)
    for (case, rows, heads), result in zip(CASES, results):
        assert result["equal"], case
        assert result["varied"] > 10
        cache, recurrent = axes(rows, heads)
        # A cache at first, and a recurrent state once it is folded.
        for specs, expected in zip(result["specs"], [cache, cache, cache, recurrent]):
            assert {name: spec for name, spec in specs.items() if name in expected} == expected, case
        learned = case[0] == "conformal"
        position = {".position.whole": [x for x in (rows, heads) if x]} if learned else {}
        assert all(specs[name] == spec for specs in result["specs"] for name, spec in position.items()), case
