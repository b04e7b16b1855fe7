"""Tests of the lines that a run prints before and after training."""

import math
import pathlib
import types

import jax
import numpy as np
import pytest

from sympow_jax import config
from sympow_jax.layers import partitioning
from sympow_jax.layers.attention.kernels import power
from sympow_jax.training import summary
from tests.training import small


def _describe(settings: config.Config, **data: int) -> list[str]:
    program = small.program(settings)
    tokens = np.zeros(settings.data.context_length, np.int32)
    traced = program.trace({"inputs": tokens, "targets": tokens})
    return summary.describe(program, traced, {"tokens": 1234, "heldout_tokens": 0, **data}, "runs/a")


def _with_attention(settings: config.Config, preset: str, **changes) -> config.Config:
    return small.changed(settings, model={"attention": config.preset(preset, **changes)})


def test_a_fact_a_line(settings):
    settings = _with_attention(settings, "conformal_paper", form="chunked", chunk_size=8)
    lines = _describe(settings)
    assert lines[0].startswith("model: conformal_paper, 1 layer of width 16, ")
    assert lines[1] == "attention of 1 layer: chunked by xla"
    assert lines[2].startswith("state while generating: ")
    facts = [
        "data: text, 1,234 tokens to train on, nothing held out",
        "batch: 64 tokens per step, 4 rows of 16",
        "devices: 1 x cpu",
        "results: runs/a, with a checkpoint every 4 steps",
        "metrics: tensorboard --logdir=runs/a",
    ]
    assert lines[3:] == facts
    settings = small.changed(
        settings, optimizer={"warmup_steps": 11}, training={"max_skips": 3, "profile_steps": (11, 12)}
    )
    facts.insert(2, "warning: the run ends after 10 of 11 updates of warmup; lower optimizer.warmup_steps")
    facts.insert(3, "warning: training.profile_steps begins at 11, after the last step")
    unread = "training.max_skips (training.skip_nonfinite is false)"
    facts.insert(4, f"no effect in this run: {unread}")
    assert _describe(settings)[3:] == facts


@pytest.mark.parametrize(("shares", "warned"), [(1, 0), (2, 0), (4, 0), (3, 1), (8, 1)])
def test_a_warning_of_streams_that_processes_cannot_divide(settings, monkeypatch, shares, warned):
    monkeypatch.setattr(summary.sharding, "batch_share", lambda mesh: (0, shares))
    lines = [line for line in _describe(settings, streams=4) if "cannot divide the 4 streams" in line]
    assert len(lines) == warned


def test_softmax_has_a_cache_and_a_sliding_window_a_state_of_a_fixed_size(settings):
    for changed, memory in (
        (settings, "KV cache while generating: 140 bytes per token and row"),
        # 10 positions of 140 bytes, the id of a document and the mark of one that exceeds the cache.
        (
            _with_attention(settings, "sliding_window", window=11),
            "state while generating: 1.41 kB per row, at any length",
        ),
    ):
        assert _describe(changed)[1:3] == ["attention of 1 layer: softmax by xla", memory]


def test_a_state_larger_than_memory_does_not_prevent_training(settings):
    attention = config.preset("sympow", power=6)
    sizes = {"width": 4096, "heads": 2, "head_dim": 2048, "attention": attention}
    lines = _describe(small.changed(settings, model=sizes))
    assert "attention of 1 layer: attention by xla" in lines
    assert any(line.startswith("state while generating: ") for line in lines)
    # A window alongside, here of 2^30 tokens of 8 kB, counts once.
    attention = config.preset("sympow", power=4, softmax_window=True, window=2**30)
    sizes |= {"head_dim": 512, "attention": attention}
    features = math.comb(512 + 3, 4)
    nbytes = 2 * features * (512 + 1) * 4 + 2**30 * 2 * (512 + 512) * 4
    lines = _describe(small.changed(settings, model=sizes))
    assert any(line.startswith(f"state while generating: {summary._size(nbytes)} per row") for line in lines)


def test_reasons_are_those_of_a_shard(settings, monkeypatch):
    settings = _with_attention(settings, "conformal_paper", form="chunked", chunk_size=8)
    program = small.program(settings)
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


def _compiled(**sizes: int) -> types.SimpleNamespace:
    sizes = dict.fromkeys(("argument", "output", "alias", "temp"), 0) | sizes
    analysis = types.SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    return types.SimpleNamespace(memory_analysis=lambda: analysis)


def test_memory_is_that_of_the_larger_program_and_sizes_have_three_digits(settings):
    program = small.program(settings)
    state = summary.bytes_per_device(program.abstract)
    arguments = summary.bytes_per_device(program.abstract.params)
    one = _compiled(argument=arguments, temp=3 * state)
    update = summary.memory(program, one, None)
    assert " in an update, " in update
    assert summary.memory(program, one, _compiled(argument=arguments)) == update
    other = _compiled(argument=arguments, temp=10**9 - state)
    assert summary.memory(program, one, other).startswith("memory of a device: 1 GB in a held-out loss, ")
    # An evaluation computes the average of schedule-free.
    program = small.program(small.changed(settings, optimizer=config.OptimizerConfig(name="schedule_free")))
    state = summary.bytes_per_device(program.abstract)
    line = summary.memory(program, _compiled(), _compiled(argument=arguments, temp=9 * state))
    assert f": {summary._size(10 * state + arguments)} in a held-out loss, " in line
    for nbytes, text in {
        999: "999 bytes",
        999_400_000: "999 MB",
        999_600_000: "1 GB",
        1.5e12: "1.5 TB",
    }.items():
        line = summary.memory(program, _compiled(argument=nbytes), None)
        assert line.startswith(f"memory of a device: {text} in an update, ")


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


def test_every_config_has_a_next_command(settings):
    for program, command in {"train.py": "uv run generate.py", "sympow train": "sympow generate"}.items():
        line = summary.next_command(settings, pathlib.Path("runs/a b"), program)
        assert line == f"next: {command} --workdir='runs/a b' --prompt=\"The \""
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
