"""Tests that ops on meshes of Auto and Explicit axes and within `jax.shard_map` equal those on one device."""

import json
import subprocess
import sys

import pytest

from tests.ops import meshes

# Ops that together cover most loops and custom gradients, in one process.
FAST = ("chunked", "step-that-folds", "softmax", "kv_cache-step", "lrpe")


def check(which, names):
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.meshes", which, *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, ways in json.loads(done.stdout).items():
        for way, error in ways.items():
            assert isinstance(error, float), (name, way, error)
            assert error <= 1e-5, (name, way, error)


def test_sharded_arrays():
    check("few", FAST)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", meshes.OPS)
def test_every_kind_of_mesh(name):
    check("all", [name])
