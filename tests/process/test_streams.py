"""Tests of programs whose standard streams are closed, full, or without a reader."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from sympow_jax import spelling
from sympow_jax.process import signals, streams

ROOT = pathlib.Path(__file__).parents[1]
SYMPOW = [sys.executable, "-c", "import sys; from sympow_jax import commands; sys.exit(commands.main())"]
# Of a program that prints a text.
PRINTING = [
    sys.executable,
    "-c",
    "from sympow_jax.process import signals\nwith signals.user_errors():\n    print('text')",
]
# Python's own setting for whether it writes at once; "" for later.
UNBUFFERED = "PYTHONUNBUFFERED"

linux = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full and /proc")


def test_names_do_not_change_what_a_terminal_shows(capsys):
    name = "a\x1b[2J\x07\u202eb\nerror: no\udce9é"
    escaped = r"a\x1b[2J\x07\u202eb\nerror: no\udce9é"
    streams.say(name, "next")
    assert capsys.readouterr().out == f"{escaped}\nnext\n"
    with pytest.raises(SystemExit), signals.user_errors():
        raise ValueError(f"{name} is wrong")
    assert capsys.readouterr().err == f"error: {escaped} is wrong\n".replace(r"\n", " ", 1)
    assert spelling.shown([name, name]).isprintable()


@pytest.mark.parametrize("flush", [True, False])
def test_the_reader_of_stdout_ends_first(flush):
    """The program ends as of SIGPIPE, without a word, as before `| head -1`."""
    code = f"""
from sympow_jax.process import signals
with signals.user_errors():
    print("first", flush=True)
    input()
    print("second", flush={flush})
"""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, UNBUFFERED: ""},
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
    ) as program:
        assert program.stdout.readline() == "first\n"
        program.stdout.close()
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stderr.read() == ""
    assert program.returncode == 128 + signal.SIGPIPE


@linux
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command",
    [PRINTING, [*SYMPOW, "--help"], [*SYMPOW, "--version"], [*SYMPOW, "prepare", "--help"]],
    ids=["printing", "help", "version", "prepare"],
)
def test_stdout_is_full(command, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, UNBUFFERED: unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def run_with_closed(descriptor: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command with a standard stream closed, as by `>&-` in a shell."""
    shell = ["sh", "-c", f'exec "$@" {descriptor}{"<" if descriptor == 0 else ">"}&-', "sh"]
    return subprocess.run([*shell, *command], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--version"], ["prepare", "--help"]])
def test_stdout_is_closed(arguments):
    done = run_with_closed(1, [*SYMPOW, *arguments])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@linux
@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_no_file_gets_the_descriptor_of_a_closed_stream(descriptor, tmp_path):
    code = f"""
import os, sys
from sympow_jax.process import streams
streams.open_closed()
print("to stdout")
print("to stderr", file=sys.stderr)
assert os.readlink("/proc/self/fd/{descriptor}") == os.devnull
with open({str(tmp_path / "file")!r}, "w") as file:
    assert file.fileno() > 2
"""
    done = run_with_closed(descriptor, [sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if descriptor == 1 else "to stdout\n")
    assert done.stderr == ("" if descriptor == 2 else "to stderr\n")
