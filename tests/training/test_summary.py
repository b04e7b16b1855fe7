"""Tests of the lines that a run prints before and after training."""

import dataclasses
import json
import pathlib
import types

import jax
import numpy as np
import pytest

from sympow_jax import config, loop, training
from sympow_jax.layers import partitioning
from sympow_jax.layers.attention.kernels import power
from sympow_jax.training import sharding, summary


def describe(settings: config.Config) -> list[str]:
    program = training.Program(settings, sharding.whole_mesh())
    tokens = np.zeros(settings.data.context_length, np.int32)
    traced = program.trace({"inputs": tokens, "targets": tokens})
    return summary.describe(program, traced, {"tokens": 1234, "heldout_tokens": 0}, "runs/a")


def with_attention(settings: config.Config, preset: str, **changes) -> config.Config:
    attention = config.preset(preset, **changes)
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, attention=attention))


def test_a_fact_a_line(settings):
    settings = with_attention(settings, "conformal", form="chunked", chunk_size=8)
    lines = describe(settings)
    assert lines[0].startswith("model: conformal, 1 layer of width 16, ")
    assert lines[1] == "attention of 1 layer: chunked by xla"
    assert lines[2].startswith("state while generating: ")
    assert lines[3:] == [
        "data: text, 1,234 tokens to train on, nothing held out",
        "batch: 64 tokens per step, 4 rows of 16",
        "devices: 1 x cpu",
        "results: runs/a, with a checkpoint every 4 steps",
        "metrics: tensorboard --logdir=runs/a",
    ]


def test_softmax_has_a_cache(settings):
    lines = describe(settings)
    assert lines[1:3] == [
        "attention of 1 layer: softmax by xla",
        "KV cache while generating: 140 bytes per token and row",
    ]


def test_a_sliding_window_has_a_state_of_a_fixed_size(settings):
    lines = describe(with_attention(settings, "sliding_window", window=11))
    # 10 positions of 140 bytes, the id of a document and the mark of one that exceeds the cache.
    assert lines[1:3] == [
        "attention of 1 layer: softmax by xla",
        "state while generating: 1.41 kB per row, at any length",
    ]


def test_a_state_larger_than_memory_does_not_prevent_training(settings):
    settings = with_attention(settings, "even_power")
    attention = config.preset("sympow", power=6)
    model = dataclasses.replace(settings.model, width=4096, heads=2, head_dim=2048, attention=attention)
    lines = describe(dataclasses.replace(settings, model=model))
    assert "attention of 1 layer: attention by xla" in lines
    assert any(line.startswith("state while generating: ") for line in lines)


def test_results_and_plan_of_a_run(settings, tmp_path, capsys):
    settings = dataclasses.replace(
        settings,
        training=dataclasses.replace(settings.training, steps=2),
        evaluation=config.EvaluationConfig(context_lengths=(8, 16)),
    )
    assert loop.train(settings, tmp_path) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3:] == [
        f"table: {tmp_path}/context_loss.csv",
        f"plot: {tmp_path}/context_loss.png",
        f"checkpoint: {tmp_path}/checkpoints/2",
    ]
    plan = json.loads((tmp_path / "environment.json").read_text())["plan"]
    assert set(plan) <= set(printed)
    assert plan[-1].startswith("memory of a device: ")


def test_results_are_those_that_were_written_now(settings, tmp_path, capsys):
    (tmp_path / "context_loss.csv").write_text("of an earlier step")
    training_config = dataclasses.replace(settings.training, steps=2)
    assert loop.train(dataclasses.replace(settings, training=training_config), tmp_path) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"checkpoint: {tmp_path}/checkpoints/2"
    assert not any(line.startswith("table: ") for line in printed)


def test_reasons_are_those_of_a_shard(settings, monkeypatch):
    settings = with_attention(settings, "conformal", form="chunked", chunk_size=8)
    program = training.Program(settings, sharding.whole_mesh())
    tokens = np.zeros(settings.data.context_length, np.int32)
    traced = program.trace({"inputs": tokens, "targets": tokens})
    explained = []
    monkeypatch.setattr(
        power.PowerKernel,
        "explain",
        lambda kernel, *shape: explained.append((kernel.num_heads, kernel.num_kv_heads, *shape)) or (),
    )

    def describe_on(**sizes: int) -> None:
        shape = dict.fromkeys(partitioning.AXES, 1) | sizes
        program.mesh = types.SimpleNamespace(size=4, shape=shape, devices=np.array(jax.devices()[:1]))
        summary.describe(program, traced, {"tokens": 1234, "heldout_tokens": 0}, "runs/a")

    describe_on(fsdp=2, tensor=2)
    assert explained == [(1, 1, 2, 16)]
    describe_on(context=2, tensor=2)
    assert len(explained) == 1


def test_memory_is_that_of_the_larger_program(settings):
    program = training.Program(settings, sharding.whole_mesh())
    state = summary.bytes_per_device(program.abstract)
    arguments = summary.bytes_per_device(program.abstract.params)

    def compiled(temporary: int) -> types.SimpleNamespace:
        sizes = {"argument": arguments, "output": 0, "alias": 0, "temp": temporary}
        analysis = types.SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
        return types.SimpleNamespace(memory_analysis=lambda: analysis)

    one, other = compiled(3 * state), compiled(10**9 - state)
    update = summary.memory(program, one, None)
    assert " in an update, " in update
    assert summary.memory(program, one, compiled(0)) == update
    assert summary.memory(program, one, other).startswith("memory of a device: 1 GB in a held-out loss, ")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(999, "999 bytes"), (999_400_000, "999 MB"), (999_600_000, "1 GB"), (1.5e12, "1.5 TB")],
)
def test_sizes_have_three_digits(settings, nbytes, text):
    program = training.Program(settings, sharding.whole_mesh())
    analysis = types.SimpleNamespace(
        argument_size_in_bytes=nbytes, output_size_in_bytes=0, alias_size_in_bytes=0, temp_size_in_bytes=0
    )
    line = summary.memory(program, types.SimpleNamespace(memory_analysis=lambda: analysis), None)
    assert line.startswith(f"memory of a device: {text} in an update, ")


@pytest.mark.parametrize(
    ("program", "command"), [("train.py", "uv run generate.py"), ("sympow train", "sympow generate")]
)
def test_next_command(settings, program, command):
    line = summary.next_command(settings, pathlib.Path("runs/a b"), program)
    assert line == f"next: {command} --workdir='runs/a b' --prompt=\"The \""


GENERATE, INSPECT, EVAL = "generate", 'inspect --workdir=runs/a --text="The"', "eval --workdir=runs/a"
NEXT_OF_CONFIG = {
    "deit_small.py": EVAL,
    "glue.py:cola,type1": EVAL,
    "gpt2.py": GENERATE,
    "gpt2_124m.py": GENERATE,
    "lra.py:text": EVAL,
    "lra.py:listops": EVAL,
    "lra.py:image": EVAL,
    "quickstart.py": GENERATE,
    "roberta_wikibook.py": INSPECT,
    "text.py:corpus": GENERATE,
    "wikitext103.py": GENERATE,
}


def test_every_config_has_a_next_command():
    folder = pathlib.Path(__file__).parents[2] / "configs"
    # A retrofit needs a run to start from.
    configs = {path.name for path in folder.glob("*.py")} - {"retrofit.py"}
    assert {spec.partition(":")[0] for spec in NEXT_OF_CONFIG} == configs
    for spec, expected in NEXT_OF_CONFIG.items():
        settings = config.load(f"{folder}/{spec}")
        found = summary.next_command(settings, pathlib.Path("runs/a"), "sympow train")
        command, _, tokenizer = found.removeprefix("next: sympow ").partition(" --tokenizer=")
        assert command == expected or (
            expected == GENERATE and command.startswith("generate --workdir=runs/a ")
        )
        assert bool(tokenizer) == (expected != EVAL and settings.data.source != "text")
