"""Tests that the examples run unchanged and print the expected results."""

import os
import pathlib
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
# Examples for meshes, which run on any number of devices.
MESHES = {"explicit_mesh", "in_shard_map", "sharded_trainer"}


def run(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_plain_jax(capsys):
    result = run("plain_jax")
    np.testing.assert_allclose(result["last"], result["whole"][:, -1], atol=1e-5)
    assert capsys.readouterr().out.startswith("a step from the state differs from the whole by ")
    lines = (EXAMPLES / "plain_jax.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 15


@pytest.mark.slow
def test_a_linen_model_learns():
    losses = run("linen_model")["losses"]
    assert losses[0] > 2.5  # log 16 = 2.77
    assert losses[-1] < 0.5


@pytest.mark.slow
def test_a_hand_written_model_learns_and_goes_on_from_its_state():
    result = run("hand_written")
    assert result["losses"][0] > 2.5
    assert result["losses"][-1] < 0.5
    assert result["text"] == [3, 5, 3, 5, 3, 5, 3, 5, 3]


@pytest.mark.slow
def test_an_equinox_model_learns():
    pytest.importorskip("equinox")
    losses = run("equinox_module")["losses"]
    assert losses[0] > 2.5
    assert losses[-1] < 0.5


def run_on_devices(name, devices):
    """Returns the output of an example on a given number of devices."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_an_explicit_mesh():
    printed = run_on_devices("explicit_mesh", 4)
    assert "output float32[8@data,256,4,32], state float32[8@data,4,528,32]\n" in printed
    assert "gradient float32[8@data,256,4,32]\n" in printed
    assert float(printed.split()[-1]) < 1e-5


def test_shard_map():
    printed = run_on_devices("in_shard_map", 4)
    assert "output float32[4@data,256,4@heads,32]\n" in printed
    assert float(printed.split()[-1]) < 1e-5


def test_a_trainer_with_its_own_mesh():
    printed = run_on_devices("sharded_trainer", 4)
    assert "query float32[32@data,32@model]\n" in printed
    first, last = map(float, re.search(r"loss (\S+) at first, (\S+) after 20 steps", printed).groups())
    assert first > 2.5  # log 16 = 2.77
    assert last < 2.2


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MESHES))
def test_meshes_of_one_device(name):
    run_on_devices(name, 1)


def test_every_example_is_tested():
    tested = {"plain_jax", "linen_model", "hand_written", "equinox_module", *MESHES}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested
