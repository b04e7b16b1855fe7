"""Tests of the wheel, installed in an otherwise empty environment."""

import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
UV = os.environ.get("UV") or shutil.which("uv")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(UV is None, reason="uv builds the wheel")]

OP = """
import jax.numpy as jnp
from sympow_jax import config, layers, models, ops, weights
from flax import nnx
x = jnp.ones((1, 8, 2, 4))
out, state = ops.power_attention(x, x, x, return_state=True)
assert jnp.allclose(out, 1), out
settings = config.ModelConfig(vocab_size=16, layers=1, width=8, heads=2)
model = models.DecoderLM(settings, rngs=nnx.Rngs(0))
weights.save("model.safetensors", config.Config(model=settings), model)
model = weights.load("model.safetensors", weights.read_settings("model.json"))
print(model(jnp.zeros((1, 8), jnp.int32)).shape)
import pallas_kernels
import sympow_jax
print(sympow_jax.__file__)
"""

SECONDS = """
import time
import jax
# What it takes where nothing else is done.
start = time.process_time()
import sympow_jax
from sympow_jax import {names}
print(time.process_time() - start)
"""


def call(*arguments, **options):
    return subprocess.run([*map(str, arguments)], capture_output=True, text=True, timeout=600, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    built = call(UV, "build", "--wheel", "--out-dir", folder, ROOT)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Returns the interpreter of an environment with the wheel and its dependencies."""
    environment = tmp_path_factory.mktemp("empty") / "venv"
    made = call(UV, "venv", "--python", sys.executable, environment)
    assert made.returncode == 0, made.stderr
    python = environment / "bin" / "python"
    installed = call(UV, "pip", "install", "--python", python, wheel)
    assert installed.returncode == 0, installed.stderr
    return python


def test_the_wheel_holds_two_packages(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"sympow_jax", "pallas_kernels"}
    assert len(top) == 3
    assert {"sympow_jax/py.typed", "pallas_kernels/py.typed"} <= set(names)


def test_ops_layers_and_models_need_no_training(python, tmp_path):
    listed = call(UV, "pip", "list", "--python", python, "--format", "json")
    packages = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert "sympow-jax" in packages
    assert not packages & {"grain", "matplotlib", "ml-collections", "pillow", "tensorboardx", "pytest"}
    done = call(python, "-c", OP, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shape, place = done.stdout.splitlines()
    assert shape == "(1, 8, 16)"
    assert pathlib.Path(place).is_relative_to(python.parents[1])


@pytest.mark.parametrize(("names", "most"), [("ops", 0.5), ("config, layers, models, ops", 1.5)])
def test_imports_take_little_more_than_that_of_jax(python, tmp_path, names, most):
    code = SECONDS.format(names=names)
    seconds = [float(call(python, "-c", code, cwd=tmp_path).stdout) for _ in range(3)]
    assert statistics.median(seconds) < most, seconds


@pytest.mark.parametrize(
    "command",
    [
        ["train.py", "--config=x", "--workdir=y"],
        ["eval.py", "--workdir=x", "--out=y"],
        ["generate.py", "--workdir=x", "--prompt=y"],
        ["-m", "sympow_jax.data.prepare", "--format=bin", "--out=x", "y"],
        ["-m", "sympow_jax.evaluation.inspect", "--workdir=x", "--text=y"],
        ["-m", "sympow_jax.weights", "export", "--workdir=x", "--out=y"],
    ],
)
def test_a_program_without_the_extra_says_so_in_one_line(python, tmp_path, command):
    if command[0] != "-m":
        shutil.copy(ROOT / command[0], tmp_path)
    done = call(python, *command, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith("which is not installed: pip install 'sympow-jax[train]'\n")
    assert done.stderr.count("\n") == 1
