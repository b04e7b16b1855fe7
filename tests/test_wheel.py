"""Tests of the wheel, installed in otherwise empty environments."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

from sympow_jax import commands

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

# A run of seconds in place of the quickstart's minutes.
TINY = {
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "data.context_length": 32,
    "data.batch_tokens": 128,
    "training.steps": 3,
    "evaluation.context_lengths": "16,32,64",
    "evaluation.documents": 2,
}


def call(*arguments, **options):
    return subprocess.run([*map(str, arguments)], capture_output=True, text=True, timeout=600, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    built = call(UV, "build", "--wheel", "--out-dir", folder, ROOT)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def install(requirement: str, folder: pathlib.Path) -> pathlib.Path:
    created = call(UV, "venv", "--python", sys.executable, folder / "venv")
    assert created.returncode == 0, created.stderr
    python = folder / "venv" / "bin" / "python"
    installed = call(UV, "pip", "install", "--python", python, requirement)
    assert installed.returncode == 0, installed.stderr
    return python


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Returns the interpreter of an environment with the wheel and its dependencies."""
    return install(f"{wheel}", tmp_path_factory.mktemp("empty"))


@pytest.fixture(scope="module")
def trainer(wheel, tmp_path_factory):
    return install(f"{wheel}[train]", tmp_path_factory.mktemp("train")).with_name("sympow")


@pytest.fixture(scope="module")
def run(trainer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    settings = [f"--config.{name}={value}" for name, value in TINY.items()]
    done = call(trainer, "train", "--config=quickstart:sympow", "--workdir=run", *settings, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_the_wheel_holds_two_packages_and_the_configs(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"sympow_jax", "pallas_kernels"}
    assert len(top) == 3
    assert {"sympow_jax/py.typed", "pallas_kernels/py.typed"} <= set(names)
    configs = {f"sympow_jax/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    assert {name for name in names if "configs/" in name} == configs


def test_ops_layers_and_models_need_no_training(python, tmp_path):
    listed = call(UV, "pip", "list", "--python", python, "--format", "json")
    packages = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert "sympow-jax" in packages
    assert not packages & {"grain", "matplotlib", "pillow", "tensorboardx", "pytest"}
    done = call(python, "-c", OP, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shape, place = done.stdout.splitlines()
    assert shape == "(1, 8, 16)"
    assert pathlib.Path(place).is_relative_to(python.parents[1])


def test_commands_explain_themselves_without_the_extra(python, tmp_path):
    sympow = python.with_name("sympow")
    for name in ("", *commands.COMMANDS):
        done = call(sympow, *name.split(), "--help", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"usage: sympow {name or 'COMMAND'} ")
    done = call(sympow, "evl", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: sympow has no command 'evl'; did you mean eval?\n"


def test_a_program_without_the_extra_says_so_in_one_line(python, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    done = call(python.with_name("sympow"), "eval", "--workdir=run", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: sympow_jax.evaluation needs ")
    assert done.stderr.endswith("which is not installed: pip install 'sympow-jax[train]'\n")
    assert done.stderr.count("\n") == 1


def test_every_command_works_without_a_clone(trainer, run, tmp_path):
    """The extra `train` has every package that the commands import, except tokenizers."""

    def sympow(*arguments):
        done = call(trainer, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    shutil.copytree(run, tmp_path / "run")
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert (run / "context_loss.png").is_file()
    assert json.loads((run / "config.json").read_text())["model"]["attention"]["kernel"] == "power"
    sympow("eval", "--workdir=run", "--out=again", "--documents=2")
    assert (tmp_path / "again" / "context_loss.csv").is_file()
    assert sympow("generate", "--workdir=run", "--prompt=def ", "--max_tokens=4").startswith("def ")
    sympow("inspect", "--workdir=run", "--text=def main():")
    assert (tmp_path / "run" / "inspect" / "attention.png").is_file()
    sympow("weights", "export", "--workdir=run", "--out=run.safetensors")
    sympow("weights", "import", "--weights=run.safetensors", "--workdir=copy")
    (tmp_path / "text").write_text("some text")
    sympow("prepare", "--format=bin", "--out=text.bin", "text")
    (tokens,) = (tmp_path / "text.bin").glob("*.bin")
    assert tokens.stat().st_size == 2 * len("some text\0")
