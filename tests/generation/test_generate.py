"""Tests of generate.py from the command line, on a run of two updates."""

import json
import os
import shutil
import signal

import pytest

from sympow_jax import generation
from sympow_jax.commands import generate
from tests import devices, mistakes


@pytest.fixture(scope="module")
def runs(trained, tmp_path_factory):
    """Copies the run `a`, and its settings to `untrained`, `classifier` and `tokens`, which have no good checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(trained, folder / "a")
    changes = {
        "untrained": {},
        "classifier": {"task": {"name": "classification", "classes": 2}},
        "tokens": {"data": {"source": "tokens", "paths": ["x.bin"]}},
    }
    for name, change in changes.items():
        values = json.loads((trained / "config.json").read_text())
        for group, settings in change.items():
            values[group] |= settings
        if name == "classifier":
            values["model"]["attention"]["causal"] = False
            values["evaluation"]["context_lengths"] = None
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
    (folder / "tokens" / "checkpoints" / "2").mkdir(parents=True)
    (folder / "prompts").write_text("\ufeffthe quick\nfox\r\nthe quick\n")
    (folder / "empty").write_text("")
    (folder / "gap").write_text("a\n\nb\n")
    (folder / "latin").write_bytes("caf\xe9\n".encode("latin-1"))
    return folder


def continued(capsys, *arguments):
    assert generate.main(arguments) == 0
    printed, error = capsys.readouterr()
    assert error == ""
    return printed


def test_prompts_and_samples_have_headings(runs, capsys):
    flags = (f"--workdir={runs}/a", "--max_tokens=40", "--min_p=0.01", "--repetition_penalty=1.1")
    first, second = (continued(capsys, *flags, "--prompt=the quick", f"--seed={seed}") for seed in (5, 6))
    assert first.startswith("the quick")
    assert len(first) == len("the quick") + 40 + len("\n")
    assert first != second
    # Text ends before a stop string, wherever blocks end.
    stop = first[len("the quick") + 30 :][:3]
    stops = (f"--stop={stop}", "--stop=never there")
    stopped = continued(capsys, *flags, "--prompt=the quick", "--seed=5", *stops)
    assert stopped == first[: first.index(stop, len("the quick"))] + "\n"
    all_six = continued(capsys, *flags, f"--prompts={runs}/prompts", "--seed=5", "--samples=2")
    one, two = f"sample 1 of 2 ---\n{first}", f"sample 2 of 2 ---\n{second}"
    assert all_six.startswith(f"--- 1 of 3, {one}--- 1 of 3, {two}--- 2 of 3, sample 1 of 2 ---\nfox")
    assert all_six.endswith(f"--- 3 of 3, {one}--- 3 of 3, {two}")


@pytest.mark.robust
def test_text_over_devices_is_that_of_one(runs, capsys):
    flags = (f"--workdir={runs}/a", "--max_tokens=40", "--prompt=the quick", "--samples=2")
    expected = continued(capsys, *flags)
    with devices.seen(2):
        assert continued(capsys, *flags, "--sharding.tensor=2") == expected
    assert expected.startswith("--- sample 1 of 2 ---\nthe quick")


MISTAKES = """
--workdir={runs}/nothing --prompt=a                    | is not the workdir of a run
--workdir={runs}/untrained --prompt=a                  | has no checkpoint
--workdir={runs}/classifier --prompt=a                 | a run of task 'classification'
--workdir={runs}/tokens --prompt=a                     | --tokenizer=FILE
--workdir={runs}/a --prompt=a --tokenizer=x.json       | read text as bytes
--workdir={runs}/a --prompt=                           | --prompt is empty
--workdir={runs}/a --prompt=café                       | vocabulary of 128 lacks: 169, 195
--workdir={runs}/a --prompt=caf\udce9                  | vocabulary of 128 lacks: 233
--workdir={runs}/a --prompts={runs}/empty              | empty is empty
--workdir={runs}/a --prompts={runs}/gap                | line 2 of {runs}/gap is empty
--workdir={runs}/a --prompts={runs}/latin              | is not UTF-8 (byte 4)
--workdir={runs}/a --prompts={runs}/nothing            | cannot be read: No such file or directory; name a
--workdir={runs}/a --prompt=a --max_tokens=many        | see sympow generate --help
--workdir={runs}/a --prompt=a --top_p=1.1              | top_p is 1.1
--workdir={runs}/a --prompt=a --samples=1000000        | it must be from 1 to 4,096
--workdir={runs}/a --prompts=/dev/zero                 | has more than 268,435,456 bytes; use shorter files
--workdir={runs}/a --prompt=a --state_dtype=float16    | choose from 'float32', 'bfloat16'
--workdir={runs}/a --prompt=a --sharding.tensor=3      | tensor is 3 and does not divide
--workdir={runs}/a --prompt=a --sharding.data=64       | data 64 x fsdp 1 x tensor 1
--workdir={runs}/a --prompt=a --stop=                  | a stop string is empty
--workdir={runs}/a                                     | --prompt
--workdir={runs}/a --prompt=a --prompts={runs}/prompts | not allowed with
--workdir={runs}/a --prompt=a --top=1                  | unknown option '--top'; did you mean --stop?
"""


def test_a_mistake_is_one_line_and_exit_code_1(runs, capsys):
    for line in MISTAKES.format(runs=runs).strip().splitlines():
        arguments, message = line.split(" | ")
        assert message in mistakes.line(generate.main, arguments.split(), capsys)


@pytest.mark.usefixtures("interruptible")
def test_control_c(runs, capsys, monkeypatch):
    add = generation.Transcript.add

    def add_and_interrupt(transcript, tokens):
        os.kill(os.getpid(), signal.SIGINT)
        return add(transcript, tokens)

    monkeypatch.setattr(generation.Transcript, "add", add_and_interrupt)
    with pytest.raises(SystemExit) as stopped:
        generate.main([f"--workdir={runs}/a", "--prompt=the quick", "--max_tokens=40"])
    assert stopped.value.code == 130
    printed, error = capsys.readouterr()
    assert printed.startswith("the quick")
    assert error == "interrupted\n"


@pytest.mark.robust
def test_dtypes(runs, capsys):
    """Two steps of training leave a model whose greedy text rounding does not change."""
    flags = (f"--workdir={runs}/a", "--max_tokens=20", "--temperature=0", "--prompt=the quick")
    short = continued(capsys, *flags, "--weights_dtype=bfloat16", "--state_dtype=bfloat16")
    assert short == continued(capsys, *flags)
