"""Tests of the lines that a run prints before and after training."""

import dataclasses
import json

import numpy as np
import pytest

from sympow_jax import config, training
from sympow_jax.commands import train
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
    assert "needs a Hopper GPU" in lines[2]
    assert lines[3].startswith("state while generating: ")
    assert lines[4:] == [
        "data: text, 1,234 tokens to train on, nothing held out",
        "batch: 64 tokens a step, 4 rows of 16",
        "devices: 1 x cpu",
        "results: runs/a, with a checkpoint every 4 steps",
        "metrics: tensorboard --logdir=runs/a",
    ]


def test_softmax_has_a_cache(settings):
    lines = describe(settings)
    assert lines[1:3] == [
        "attention of 1 layer: softmax by xla",
        "KV cache while generating: 140 bytes a token and row",
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
    assert train.train(settings, tmp_path) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3:] == [
        f"table: {tmp_path}/context_loss.csv",
        f"plot: {tmp_path}/context_loss.png",
        f"checkpoint: {tmp_path}/checkpoints/2",
    ]
    plan = json.loads((tmp_path / "environment.json").read_text())["plan"]
    assert set(plan) <= set(printed)
    assert plan[-1].startswith("memory of a device: ")


@pytest.mark.parametrize(
    ("program", "command"), [("train.py", "uv run generate.py"), ("sympow train", "sympow generate")]
)
def test_next_command(settings, program, command):
    line = summary.next_command(settings, "runs/a", program)
    assert line == f'next: {command} --workdir=runs/a --prompt="The "'
