"""Tests of generate.py from the command line, on a run made by train.py."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from sympow_jax import config, generation, loop
from sympow_jax.commands import generate, prepare
from sympow_jax.process import workdir
from tests import mistakes

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Makes a run `a` of two steps over bytes below 128; without checkpoints `untrained`, `classifier` and `tokens`."""
    folder = tmp_path_factory.mktemp("runs")
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"{index}: the quick brown fox jumps over the lazy dog. " * 4)
    settings = config.Config(
        model=config.ModelConfig(
            vocab_size=128, layers=1, width=16, heads=2, dtype="float32", attention=config.preset("softmax")
        ),
        data=config.DataConfig(
            paths=(f"{folder}/*.txt",), heldout_fraction=0.3, context_length=16, batch_tokens=64
        ),
        training=config.TrainingConfig(steps=2),
    )
    assert loop.train(settings, folder / "a") == 0
    saved = json.loads((folder / "a" / "config.json").read_text())
    changes = {
        "untrained": {},
        "classifier": {"task": {"name": "classification", "classes": 2}},
        "tokens": {"data": {"source": "tokens", "paths": ["x.bin"]}},
    }
    for name, change in changes.items():
        changed = saved | {key: saved[key] | values for key, values in change.items()}
        if name == "classifier":
            changed["model"]["attention"]["causal"] = False
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(changed))
        saved = json.loads((folder / "a" / "config.json").read_text())
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


def test_a_prompt_alone_and_in_a_file(runs, capsys):
    flags = (f"--workdir={runs}/a", "--max_tokens=40", "--seed=5")
    alone = continued(capsys, *flags, "--prompt=the quick")
    assert alone.startswith("the quick")
    assert len(alone) == len("the quick") + 40 + len("\n")
    assert alone == continued(capsys, *flags, "--prompt=the quick")
    together = continued(capsys, *flags, f"--prompts={runs}/prompts")
    first, rest = together.removeprefix("--- 1 of 3 ---\n").split("--- 2 of 3 ---\n")
    second, third = rest.split("--- 3 of 3 ---\n")
    assert first == third == alone
    assert second.startswith("fox")
    # Text ends before a stop string, wherever blocks end.
    stop = alone[len("the quick") + 30 :][:3]
    stopped = continued(capsys, *flags, "--prompt=the quick", f"--stop={stop}", "--stop=never there")
    assert stopped == alone[: alone.index(stop, len("the quick"))] + "\n"


def test_samples_have_headings(runs, capsys):
    flags = (f"--workdir={runs}/a", "--max_tokens=40", "--min_p=0.01", "--repetition_penalty=1.1")
    first, second = (continued(capsys, *flags, "--prompt=the quick", f"--seed={seed}") for seed in (5, 6))
    assert first != second
    both = continued(capsys, *flags, "--prompt=the quick", "--seed=5", "--samples=2")
    assert both == f"--- sample 1 of 2 ---\n{first}--- sample 2 of 2 ---\n{second}"
    all_six = continued(capsys, *flags, f"--prompts={runs}/prompts", "--seed=5", "--samples=2")
    one = f"sample 1 of 2 ---\n{first}"
    two = f"sample 2 of 2 ---\n{second}"
    assert all_six.startswith(f"--- 1 of 3, {one}--- 1 of 3, {two}--- 2 of 3, sample 1 of 2 ---\nfox")
    assert all_six.endswith(f"--- 3 of 3, sample 1 of 2 ---\n{first}--- 3 of 3, sample 2 of 2 ---\n{second}")


def test_a_run_on_prepared_tokens_knows_its_tokenizer(runs, tmp_path, capsys):
    prepare.main(["--format=bin", f"--out={tmp_path}/out.bin", f"{runs}/*.txt"])
    settings = workdir.read_config(runs / "a")
    data = {"source": "tokens", "paths": (f"{tmp_path}/out.bin",), "document_separator": 0}
    settings = dataclasses.replace(
        settings,
        data=dataclasses.replace(settings.data, **data),
        training=dataclasses.replace(settings.training, steps=1),
    )
    for _ in range(2):  # The second resumes.
        assert loop.train(settings, tmp_path / "run") == 0
    assert "out.bin/prepared.json has ids below 256, but model.vocab_size is 128" in capsys.readouterr().err
    assert workdir.read_config(tmp_path / "run").data.tokenizer == "byte"
    assert generate.main([f"--workdir={tmp_path}/run", "--prompt=the quick", "--max_tokens=2"]) == 0
    assert capsys.readouterr().out.startswith("the quick")


MISTAKES = """
--workdir={runs}/nothing --prompt=a                    | is not the workdir of a run
--workdir={runs}/untrained --prompt=a                  | has no checkpoint
--workdir={runs}/classifier --prompt=a                 | a run of task 'classification'
--workdir={runs}/tokens --prompt=a                     | --tokenizer=FILE
--workdir={runs}/a --prompt=a --tokenizer=x.json       | read text as bytes
--workdir={runs}/a --prompt=                           | --prompt is empty
--workdir={runs}/a --prompt=café                       | vocabulary of 128 lacks: 169, 195
--workdir={runs}/a --prompts={runs}/empty              | empty is empty
--workdir={runs}/a --prompts={runs}/gap                | line 2 of {runs}/gap is empty
--workdir={runs}/a --prompts={runs}/latin              | is not UTF-8 (byte 4)
--workdir={runs}/a --prompts={runs}/nothing            | cannot be read: No such file or directory; name a
--workdir={runs}/a --prompts={runs}                    | cannot be read: Is a directory; name a file
--workdir={runs}/a --prompt=a --max_tokens=0           | max_tokens is 0
--workdir={runs}/a --prompt=a --max_tokens=many        | see sympow generate --help
--workdir={runs}/a --prompt=a --temperature=-1         | temperature is -1
--workdir={runs}/a --prompt=a --top_k=0                | top_k is 0
--workdir={runs}/a --prompt=a --top_p=0                | top_p is 0
--workdir={runs}/a --prompt=a --top_p=1.1              | top_p is 1.1
--workdir={runs}/a --prompt=a --min_p=2                | min_p is 2
--workdir={runs}/a --prompt=a --repetition_penalty=0   | repetition_penalty is 0
--workdir={runs}/a --prompt=a --samples=0              | samples is 0
--workdir={runs}/a --prompt=a --samples=1000000        | it must be from 1 to 4,096
--workdir={runs}/a --prompts=/dev/zero                 | has more than 268,435,456 bytes; use shorter files
--workdir={runs}/a --prompt=a --state_dtype=float16    | choose from 'float32', 'bfloat16'
--workdir={runs}/a --prompt=a --sharding.tensor=3      | tensor is 3 and does not divide
--workdir={runs}/a --prompt=a --sharding.data=0        | sharding.data is 0
--workdir={runs}/a --prompt=a --sharding.data=64       | data 64 x fsdp 1 x tensor 1
--workdir={runs}/a --prompt=a --seed=-1                | seed is -1
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


def test_dtypes(runs, capsys):
    """Two steps of training leave a model whose greedy text rounding does not change."""
    flags = (f"--workdir={runs}/a", "--max_tokens=20", "--temperature=0", "--prompt=the quick")
    short = continued(capsys, *flags, "--weights_dtype=bfloat16", "--state_dtype=bfloat16")
    assert short == continued(capsys, *flags)


def test_over_devices(runs, capsys):
    flags = (f"--workdir={runs}/a", "--max_tokens=40", f"--prompts={runs}/prompts")
    done = subprocess.run(
        [sys.executable, ROOT / "generate.py", *flags, "--sharding.tensor=2"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == continued(capsys, *flags)


@pytest.mark.slow
def test_a_mistake_prints_no_traceback_in_a_separate_process(runs):
    # Bytes of the command line that are not UTF-8 are bytes of the prompt.
    arguments = [f"--workdir={runs}/a".encode(), b"--prompt=caf\xe9"]
    done = subprocess.run(
        [sys.executable, ROOT / "generate.py", *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: --prompt has bytes that the model's vocabulary of 128 lacks: 233")
    assert done.stderr.count("\n") == 1
