"""Tests of what programs print, and of a stdout that is full or without a reader."""

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

linux = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")


def test_names_do_not_change_what_a_terminal_shows(capsys):
    name = "a\x1b[2J\x07\u202eb\nerror: no\udce9é"
    escaped = r"a\x1b[2J\x07\u202eb\nerror: no\udce9é"
    streams.say(name, "next")
    assert capsys.readouterr().out == f"{escaped}\nnext\n"
    with pytest.raises(SystemExit), signals.user_errors():
        raise ValueError(f"{name} is wrong")
    assert capsys.readouterr().err == f"error: {escaped} is wrong\n".replace(r"\n", " ", 1)
    assert spelling.shown([name, name]).isprintable()


@pytest.mark.robust
@pytest.mark.parametrize(("flush", "unbuffered"), [(True, ""), (False, ""), (True, "1")])
def test_the_reader_of_stdout_ends_first(flush, unbuffered):
    """The program ends as of SIGPIPE, without a word, as before `| head -1`."""
    lines = (
        "from sympow_jax.process import signals",
        "with signals.user_errors():",
        "    print('first', flush=True)",
        "    input()",
        f"    print('second', flush={flush})",
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = {**os.environ, UNBUFFERED: unbuffered}
    command = [sys.executable, "-c", "\n".join(lines)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as program:
        assert program.stdout.readline() == "first\n"
        program.stdout.close()
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stderr.read() == ""
    assert program.returncode == 128 + signal.SIGPIPE


@linux
@pytest.mark.robust
@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [(PRINTING, ""), (PRINTING, "1"), ([*SYMPOW, "--version"], ""), ([*SYMPOW, "prepare", "--help"], "")],
    ids=["printing", "unbuffered", "version", "prepare"],
)
def test_stdout_is_full(command, unbuffered):
    with open("/dev/full", "w") as full:
        options = {"cwd": ROOT, "env": {**os.environ, UNBUFFERED: unbuffered}, "stderr": subprocess.PIPE}
        done = subprocess.run(command, stdout=full, text=True, check=False, **options)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1
