"""Tests of the folder of a run: its records, and the settings with which it may be resumed."""

import dataclasses
import json

import pytest

from sympow_jax import config, weights
from sympow_jax.process import workdir
from tests import mistakes


def _settings(**training) -> config.Config:
    return config.Config(
        model=config.ModelConfig(vocab_size=256, layers=1, width=16, heads=2),
        data=config.DataConfig(context_length=16, batch_tokens=64),
        training=config.TrainingConfig(**training),
    )


def _pretend_a_checkpoint(folder) -> None:
    (folder / workdir.CHECKPOINTS / "5").mkdir(parents=True)


def test_environment_is_recorded(tmp_path):
    workdir.open_workdir(tmp_path, _settings())
    recorded = json.loads((tmp_path / "environment.json").read_text())
    assert recorded["packages"]["jax"]
    assert recorded["devices"]
    assert set(recorded) >= {"python", "git_revision", "command", "backend"}


def test_what_does_not_change_the_run_may_change(tmp_path):
    folder = tmp_path / "new" / "run"
    workdir.open_workdir(folder, _settings(steps=5))
    _pretend_a_checkpoint(folder)
    reporting = {"profile_steps": (7, 8), "wandb_project": "papers"}
    after = _settings(steps=10, log_every=1, checkpoint_every=2, keep_checkpoints=1, **reporting)
    after = dataclasses.replace(
        after,
        evaluation=config.EvaluationConfig(context_lengths=(16, 32)),
        sharding=config.ShardingConfig(fsdp=2),
        model=dataclasses.replace(after.model, remat="full"),
    )
    workdir.open_workdir(folder, after)
    assert workdir.read_config(folder) == after


def test_another_model_is_an_error_that_lists_the_fields(tmp_path):
    before = _settings()
    workdir.open_workdir(tmp_path, before)
    _pretend_a_checkpoint(tmp_path)
    after = dataclasses.replace(
        before,
        model=dataclasses.replace(before.model, layers=2, attention=config.preset("softmax")),
        optimizer=config.OptimizerConfig(learning_rate=1.0),
        training=config.TrainingConfig(seed=3),
    )
    with pytest.raises(ValueError, match="other settings") as caught:
        workdir.open_workdir(tmp_path, after)
    for part in (
        "model.layers was 1 and is 2",
        "model.attention.kernel was 'power' and is 'softmax'",
        "optimizer.learning_rate was 0.0006 and is 1.0",
        "training.seed was 0 and is 3",
    ):
        assert part in str(caught.value)
    assert "width" not in str(caught.value)
    assert workdir.read_config(tmp_path) == before


def test_settings_may_be_corrected_before_the_first_checkpoint(tmp_path):
    workdir.open_workdir(tmp_path, _settings(seed=1), {"digest": "a"})
    workdir.open_workdir(tmp_path, _settings(seed=2), {"digest": "b"})
    assert workdir.read_config(tmp_path) == _settings(seed=2)
    assert json.loads((tmp_path / "data.json").read_text()) == {"digest": "b"}


def test_other_data_is_an_error(tmp_path):
    described = {"source": "text", "files": 3, "digest": "a"}
    workdir.open_workdir(tmp_path, _settings(), described)
    _pretend_a_checkpoint(tmp_path)
    workdir.open_workdir(tmp_path, _settings(), described)
    with pytest.raises(ValueError, match="digest was 'a' and is 'b'"):
        workdir.open_workdir(tmp_path, _settings(), described | {"digest": "b"})
    assert workdir.read_description(tmp_path) == described
    (tmp_path / "data.json").write_text('{"a": ' * 100_000)
    with pytest.raises(ValueError, match=r"data\.json: its JSON has too many levels"):
        workdir.open_workdir(tmp_path, _settings(), described)


def test_unwritable(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to --workdir .*file"):
        workdir.open_workdir(tmp_path / "file" / "run", _settings())


def test_settings_of_another_program_are_not_overwritten(tmp_path):
    path = tmp_path / "config.json"
    others = (
        b"{}",
        b'{"hidden_size": 768}',
        b'{"model": {"vocab_size": "x", "layers": 1}}',
        b"[1, 2]",
        b"\xff",
    )
    for content in others:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.json is not the settings of a run and would be"):
            workdir.open_workdir(tmp_path, _settings())
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]


def test_settings_that_no_run_can_have(tmp_path):
    for path, value, message in (
        ("model.layers", "100000", "model.layers is 100000; it must be at least 1 and at most 1024"),
        ("model.layers", "1.0", "model.layers is 1.0, a float; it must be an int: write 1"),
        ("model.dtype", "1", "dtype is 1; it must be a dtype or its name"),
        ("model.attention", "[" * 100_000, "its JSON has too many levels"),
    ):
        values = dataclasses.asdict(_settings())
        group, name = path.split(".")
        values[group][name] = "here"
        (tmp_path / "config.json").write_text(json.dumps(values).replace('"here"', value))
        _assert_refused(tmp_path, f"config.json: {message}")
    values = dataclasses.asdict(_settings())
    for content, message in (
        (None, "config.json"),
        ("{", "config.json"),
        ("{}", "Config lacks model"),
        ('{"model": {"layers": 1}}', "ModelConfig lacks width, heads"),
        ('{"model": {"depth": 3}}', "ModelConfig has no depth"),
        (json.dumps(values | {"model": [1]}), "ModelConfig is [1]; it must have fields"),
        (json.dumps(values | {str(x): 0 for x in range(10**5)}), " more; it has model"),
        (json.dumps(values | {"model": values["model"] | {"heads": "x" * 10**5}}), "model.heads is 'xxx"),
    ):
        (tmp_path / "config.json").unlink() if content is None else (tmp_path / "config.json").write_text(
            content
        )
        _assert_refused(tmp_path, message)
    with pytest.raises(ValueError, match="not the workdir of a run"):
        workdir.read_config(tmp_path / "nothing")


def _assert_refused(folder, message) -> None:
    for read, path in ((workdir.read_config, folder), (weights.read_settings, folder / "config.json")):
        with mistakes.refused(message) as raised:
            read(path)
        assert str(folder) in str(raised.value)
        assert len(str(raised.value)) < len(str(folder)) + 600


@pytest.mark.parametrize("exists", [True, False])
def test_a_lock_that_is_a_link_is_refused(tmp_path, exists):
    target, folder = tmp_path / "thesis.txt", tmp_path / "run"
    if exists:
        target.write_text("the user's")
    folder.mkdir()
    (folder / "lock").symlink_to(target)
    with pytest.raises(ValueError, match=r"cannot write to --workdir .*: Too many levels of symbolic links"):
        workdir.open_workdir(folder, _settings())
    assert target.exists() == exists
    assert not exists or target.read_text() == "the user's"
