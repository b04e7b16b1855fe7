"""Tests of the command line: overrides, derived fields and one clear line for every mistake."""

import dataclasses
import pathlib
import re

import pytest

from sympow_jax import config
from sympow_jax.training import flags

QUICKSTART = "--config=configs/quickstart.py"


def _parse(*arguments: str) -> config.Config:
    return flags.parse([QUICKSTART, "--workdir=unused", *arguments])[0]


def test_without_overrides_the_file_decides():
    parsed, workdir, launch = flags.parse([QUICKSTART, "--workdir", "runs/a"])
    assert parsed == config.load("configs/quickstart.py")
    assert workdir == pathlib.Path("runs/a")
    assert launch is None


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("model.layers", "3", 3),
        ("model.attention.power", "4", 4),
        ("model.attention.form", "chunked", "chunked"),
        ("model.attention.form", "none", None),
        ("model.attention.chunk_size", "128", 128),
        ("optimizer.learning_rate", "1e-3", 1e-3),
        ("optimizer.learning_rate", "1", 1.0),
        ("optimizer.clip_norm", "None", None),
        ("optimizer.clip_norm", "0.5", 0.5),
        ("training.steps", "1_000", 1000),
        ("evaluation.context_lengths", "64,128", (64, 128)),
        ("evaluation.context_lengths", "(64, 128)", (64, 128)),
        ("evaluation.context_lengths", "[64]", (64,)),
        ("evaluation.context_lengths", "()", ()),
        ("evaluation.context_lengths", "", ()),
        ("data.paths", "a/*.txt", ("a/*.txt",)),
        ("data.paths", "007,'b c'", ("007", "b c")),
        ("data.document_separator", "0", 0),
    ],
)
def test_override(path, text, value):
    for arguments in ([f"--config.{path}={text}"], [f"--config.{path}", text]):
        node = _parse(*arguments)
        for name in path.split("."):
            node = getattr(node, name)
        assert node == value
        assert type(node) is type(value)


def test_several_overrides_are_validated_together():
    # Either one without the other contradicts the unchanged field.
    parsed = _parse("--config.data.context_length=96", "--config.data.batch_tokens=192")
    assert parsed.data.batch_size == 2


def test_derived_fields_are_derived_again():
    parsed = _parse("--config.model.heads=8")
    assert (parsed.model.kv_heads, parsed.model.head_dim) == (8, 16)
    parsed = _parse("--config.model.width=64")
    assert (parsed.model.kv_heads, parsed.model.head_dim) == (4, 16)
    parsed = _parse("--config.model.heads=8", "--config.model.kv_heads=2", "--config.model.head_dim=32")
    assert (parsed.model.kv_heads, parsed.model.head_dim) == (2, 32)


def test_a_field_that_the_file_sets_is_kept():
    base = config.load("configs/quickstart.py")
    base = dataclasses.replace(base, model=dataclasses.replace(base.model, kv_heads=2, head_dim=48))
    changed = config.override(base, {"model.heads": "6"})
    assert (changed.model.kv_heads, changed.model.head_dim) == (2, 48)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.model.layer=3"], "no setting --config.model.layer; model has vocab_size, layers, width"),
        (
            ["--config.modle.layers=3"],
            "groups are model, task, data, optimizer, training, sharding, evaluation",
        ),
        (["--config.model.attention.p", "4"], "model.attention has kernel, decay, position, causal, power"),
        (["--config.model=3"], "no setting --config.model;"),
        (["--config.model.layers.x=3"], "no setting --config.model.layers.x; model has vocab_size"),
        (["--config.model.layers=three"], "--config.model.layers is 'three'; it must be of type int"),
        (["--config.model.layers=2.5"], "must be of type int"),
        (["--config.model.layers=none"], "must be of type int"),
        (["--config.optimizer.learning_rate=fast"], "must be of type float"),
        (["--config.optimizer.learning_rate=nan"], "must be of type float"),
        (["--config.evaluation.context_lengths=64,x"], "must be of type tuple[int, ...]"),
        (["--config.optimizer.clip_norm=x"], "must be of type float | None"),
        (["--config.model.attention.power=3"], "attention.power is 3; it must be positive and even"),
        (["--config.model.heads=3"], "does not divide model.width 128"),
        (["--config.model.layers"], "--config.model.layers"),
        (["--cofnig.model.layers=3"], "cofnig"),
        (["extra"], "unexpected argument 'extra'"),
    ],
)
def test_mistakes_in_overrides(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        _parse(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workdir=x"], "required: --config"),
        ([QUICKSTART], "required: --workdir"),
    ],
)
def test_missing_flags(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        flags.parse(arguments)


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as caught:
        flags.parse(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for path in ("model.attention.power", "data.paths", "training.steps", "evaluation.context_lengths"):
        assert f"--config.{path} " in printed
