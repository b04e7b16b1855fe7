"""Tests of the command `sympow`, and of the scripts that run its subcommands from a clone."""

import pathlib
import runpy
import subprocess
import sys

import pytest

import sympow_jax
from sympow_jax import commands

ROOT = pathlib.Path(__file__).parents[1]
EVERY = f"the commands are {', '.join(commands.COMMANDS)}"


def test_help_and_a_mistyped_command_do_not_wait_for_jax():
    code = """
import sys
from sympow_jax import commands
assert commands.main(["--help"]) == 0
assert commands.main(["trian"]) == 2
assert not {"jax", "flax", "numpy", "absl"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(f"\n  {name} " in done.stdout for name in commands.COMMANDS)
    assert done.stderr == "error: sympow has no command 'trian'; did you mean train?\n"


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["wieght"], "did you mean weights?"),
        (["evaluate", "--workdir=x"], "did you mean eval?"),
        (["--workdir=x"], EVERY),
        ([""], EVERY),
    ],
)
def test_an_unknown_command_is_one_line_and_exit_code_2(arguments, remedy, capsys):
    assert commands.main(arguments) == 2
    assert capsys.readouterr() == ("", f"error: sympow has no command {arguments[0]!r}; {remedy}\n")


def test_without_a_command_it_explains_itself(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sympow"])
    assert commands.main() == 0
    assert capsys.readouterr().out.startswith("usage: sympow COMMAND")
    assert commands.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{sympow_jax.__version__}\n"


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_has_help_under_its_own_name(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        commands.main([name, "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: sympow {name} ")


@pytest.mark.parametrize("name", ["train", "eval", "generate"])
def test_a_script_is_the_command_under_its_own_name(name, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")
    assert stopped.value.code == 0
    of_script = capsys.readouterr().out
    assert of_script.startswith(f"usage: {name}.py ")
    with pytest.raises(SystemExit):
        commands.main([name, "--help"])
    # Lines break in other places, since the names differ in length.
    of_command = capsys.readouterr().out.replace(f"sympow {name}", f"{name}.py")
    assert of_command.split() == of_script.split()
