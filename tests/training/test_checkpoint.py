"""Tests of checkpoints: exact, safe under donation, and robust to damage."""

import dataclasses
import functools
import json
import os
import pathlib
import resource
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sympow_jax import config, training
from sympow_jax.process import workdir
from sympow_jax.training import checkpoint, sharding


@functools.cache
def _abstract() -> training.TrainState:
    return jax.eval_shape(_first)


def _first() -> training.TrainState:
    params = {
        "embedding": jax.random.normal(jax.random.key(0), (64, 32)),
        "blocks": {0: {"bias": jnp.zeros(3)}},
    }
    return training.TrainState(step=jnp.int32(0), params=params, opt_state=optax.adam(1e-3).init(params))


@functools.partial(jax.jit, donate_argnums=0)
def _advance(state: training.TrainState) -> training.TrainState:
    return jax.tree.map(lambda leaf: leaf + 1, state)


def _states(count: int):
    """Yields the states after 0, 1, ... updates, each donated to the next."""
    state = jax.device_put(_first(), sharding.replicated(sharding.whole_mesh()))
    for _ in range(count):
        yield state
        state = _advance(state)


def _save(folder: pathlib.Path, settings: config.Config, numbers=(1, 2)) -> dict[int, training.TrainState]:
    """Saves the states after `numbers` updates; returns copies of them."""
    workdir.open_workdir(folder, settings)
    copies = {}
    with checkpoint.Checkpoints(folder, settings) as checkpoints:
        for number, state in enumerate(_states(max(numbers) + 1)):
            if number in numbers:
                copies[number] = jax.tree.map(np.array, state)
                checkpoints.save(number, state, {"next_index": number})
    return copies


def _restore(folder: pathlib.Path, settings: config.Config):
    replicated = sharding.replicated(sharding.whole_mesh())
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), _abstract()
    )
    with checkpoint.Checkpoints(folder, settings) as checkpoints:
        return checkpoints.restore(abstract)


def _assert_same(actual: training.TrainState, expected: training.TrainState) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def _files(folder: pathlib.Path, number: int, pattern: str) -> list[pathlib.Path]:
    return [path for path in (folder / "checkpoints" / str(number)).rglob(pattern) if path.is_file()]


def _truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def test_nothing_to_restore(tmp_path, settings):
    assert _restore(tmp_path / "run", settings) is None


def test_states_are_restored_to_the_bit_though_donated(tmp_path, settings, with_training):
    # Every state is donated right after its save began.
    folder = tmp_path / "run"
    copies = _save(folder, with_training(keep_checkpoints=5), numbers=range(5))
    for number in reversed(range(5)):
        state, position = _restore(folder, settings=with_training(keep_checkpoints=5))
        assert position == {"next_index": number}
        _assert_same(state, copies[number])
        assert {leaf.sharding for leaf in jax.tree.leaves(state)} == {
            sharding.replicated(sharding.whole_mesh())
        }
        shutil.rmtree(folder / "checkpoints" / str(number))


@pytest.mark.parametrize(
    "name",
    [
        "run[1]",
        *(pytest.param(name, marks=pytest.mark.robust) for name in ("a*b/run", "what?", "back\\slash/run")),
    ],
)
def test_a_path_that_orbax_globs_is_refused_and_a_link_to_it_is_not(tmp_path, settings, name):
    folder = tmp_path / name
    with pytest.raises(ValueError, match=r"need a path without .: rename"):
        workdir.open_workdir(folder, settings)
    folder.mkdir(parents=True, exist_ok=True)
    (tmp_path / "link").symlink_to(folder)
    copies = _save(tmp_path / "link", settings)
    _assert_same(_restore(tmp_path / "link", settings)[0], copies[2])
    with pytest.raises(ValueError, match=r"need a path without .: rename"):
        checkpoint.require_checkpoint(folder)


def test_the_first_save_is_read_back(tmp_path, settings, monkeypatch):
    monkeypatch.setattr(workdir, "require_path", lambda *_: None)
    with pytest.raises(ValueError, match=r"could not be read back from .*\[1\]/checkpoints: NOT_FOUND"):
        _save(tmp_path / "run[1]", settings)


def test_the_newest_are_kept(tmp_path, settings):
    _save(tmp_path, settings, numbers=range(1, 6))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "5"]


@pytest.mark.parametrize(
    "pattern",
    [
        "params/ocdbt.process_0/d/*",
        *(
            pytest.param(name, marks=pytest.mark.robust)
            for name in ("_CHECKPOINT_METADATA", "params/manifest.ocdbt")
        ),
    ],
)
def test_a_pipe_in_a_step_is_not_waited_for(tmp_path, settings, pattern):
    _save(tmp_path, settings)
    path = _files(tmp_path, 2, pattern)[0]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a pipe or a device"):
        _restore(tmp_path, settings)
    with pytest.raises(ValueError, match=r"step 2 .* cannot be read, .* is a pipe or a device"):
        training.restore_model(tmp_path)


# One of each kind; the rest of the grid is robust.
@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        pytest.param(damage, pattern, marks=() if i == j else pytest.mark.robust)
        for i, damage in enumerate((_flip, _truncate, pathlib.Path.unlink))
        for j, pattern in enumerate(
            ("params/ocdbt.process_0/d/*", "opt_state/manifest.ocdbt", "_CHECKPOINT_METADATA")
        )
    ],
)
def test_a_damaged_step_falls_back(tmp_path, settings, capfd, damage, pattern):
    copies = _save(tmp_path, settings)
    for path in _files(tmp_path, 2, pattern):
        damage(path)
    capfd.readouterr()
    state, position = _restore(tmp_path, settings)
    _assert_same(state, copies[1])
    assert position == {"next_index": 1}
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert "the checkpoint of step 2" in said[0]
    assert "is damaged" in said[0]
    assert (tmp_path / "damaged_checkpoints" / "2").is_dir()


def test_folders_that_are_no_checkpoints_are_ignored_and_kept(tmp_path, settings, capfd):
    copies = _save(tmp_path, settings)
    for name in ("²", "٣", "007", "notes"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "notes.txt").write_text("the user's")
    (tmp_path / "checkpoints" / "7").write_text("the user's")
    capfd.readouterr()
    _assert_same(_restore(tmp_path, settings)[0], copies[2])
    assert capfd.readouterr().err == ""
    _save(tmp_path, settings, numbers=(8, 9, 10))
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"²", "٣", "007", "notes", "7", "9", "10"}
    for name in ("007/notes.txt", "7"):
        assert (tmp_path / "checkpoints" / name).read_text() == "the user's"


def test_a_run_whose_checkpoints_cannot_be_listed_does_not_begin_again(tmp_path, settings):
    _save(tmp_path, settings)
    checkpoints = tmp_path / "checkpoints"
    checkpoints.rename(tmp_path / "elsewhere")
    checkpoints.symlink_to(checkpoints.name)
    with pytest.raises(ValueError, match="Too many levels of symbolic links"):
        workdir.open_workdir(tmp_path, settings)


def test_a_step_can_be_damaged_again(tmp_path, settings):
    """A quarantined step does not prevent the run from saving the same step again."""
    copies = _save(tmp_path, settings)
    _flip(_files(tmp_path, 2, "opt_state/manifest.ocdbt")[0])
    _assert_same(_restore(tmp_path, settings)[0], copies[1])
    _save(tmp_path, settings, numbers=(2,))
    _assert_same(_restore(tmp_path, settings)[0], copies[2])
    _flip(_files(tmp_path, 2, "opt_state/manifest.ocdbt")[0])
    _assert_same(_restore(tmp_path, settings)[0], copies[1])
    assert len(list((tmp_path / "damaged_checkpoints").iterdir())) == 2


def test_another_position_in_the_data_falls_back(tmp_path, settings):
    # One bit turns a 2 into a 3, and the file can still be read.
    copies = _save(tmp_path, settings)
    (path,) = _files(tmp_path, 2, "_CHECKPOINT_METADATA")
    text = path.read_text()
    assert text.count('"next_index": 2') == 1
    path.write_text(text.replace('"next_index": 2', '"next_index": 3'))
    state, position = _restore(tmp_path, settings)
    _assert_same(state, copies[1])
    assert position == {"next_index": 1}


def test_an_emptied_step_falls_back(tmp_path, settings):
    copies = _save(tmp_path, settings)
    shutil.rmtree(tmp_path / "checkpoints" / "2" / "params")
    _assert_same(_restore(tmp_path, settings)[0], copies[1])


def test_all_damaged_is_an_error(tmp_path, settings):
    _save(tmp_path, settings)
    for number in (1, 2):
        for path in _files(tmp_path, number, "params/ocdbt.process_0/d/*"):
            _flip(path)
    with pytest.raises(ValueError, match=r"steps 2 and 1 in .* are damaged.*; move both elsewhere"):
        _restore(tmp_path, settings)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def _assert_not_restored(folder: pathlib.Path, settings: config.Config, capfd, match: str) -> None:
    """Checks that restoring ends with an error of one line, and that both steps stay where they are."""
    capfd.readouterr()
    with pytest.raises(ValueError, match=match) as caught:
        _restore(folder, settings)
    assert "the checkpoint of step 2 in " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["1", "2"]
    assert not (folder / "damaged_checkpoints").exists()


@pytest.mark.parametrize("target", ["itself", pytest.param("nowhere", marks=pytest.mark.robust)])
@pytest.mark.parametrize(
    "pattern",
    [
        "params/ocdbt.process_0/d/*",
        pytest.param("opt_state/manifest.ocdbt", marks=pytest.mark.slow),
        pytest.param("params/_METADATA", marks=pytest.mark.slow),
        pytest.param("_CHECKPOINT_METADATA", marks=pytest.mark.robust),
    ],
)
def test_a_file_that_cannot_be_read_is_not_damage(tmp_path, settings, capfd, pattern, target):
    # A link to itself cannot be opened even by root.
    copies = _save(tmp_path, settings)
    path = _files(tmp_path, 2, pattern)[0]
    away = path.rename(tmp_path / "away")
    path.symlink_to(path if target == "itself" else tmp_path / "nowhere")
    _assert_not_restored(tmp_path, settings, capfd, f"{path}: (Too many levels|No such file)")
    away.rename(path)
    _assert_same(_restore(tmp_path, settings)[0], copies[2])


@pytest.mark.parametrize(
    "call", ["load_checkpointables", pytest.param("checkpointables_metadata", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("error", "match"),
    [
        pytest.param(MemoryError(), "MemoryError", marks=pytest.mark.robust),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"), "Out of memory"),
        (ValueError("RESOURCE_EXHAUSTED: Error opening zarr3 driver"), "RESOURCE_EXHAUSTED"),
        pytest.param(
            ValueError("UNAVAILABLE: Error reading a file"), "UNAVAILABLE", marks=pytest.mark.robust
        ),
        (OSError(5, "Input/output error", "manifest.ocdbt"), "Input/output error: 'manifest.ocdbt'"),
    ],
)
def test_too_little_memory_and_passing_errors_are_not_damage(
    tmp_path, settings, capfd, monkeypatch, call, error, match
):
    copies = _save(tmp_path, settings)

    def fail(*_):
        try:
            raise error
        except Exception as cause:
            raise KeyError("as Orbax wraps errors") from cause

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.ocp, call, fail)
        _assert_not_restored(tmp_path, settings, capfd, match)
    _assert_same(_restore(tmp_path, settings)[0], copies[2])


def test_too_little_memory_for_the_fingerprints_is_not_damage(tmp_path, settings, capfd, monkeypatch):
    _save(tmp_path, settings)

    def fail(_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(checkpoint, "_fingerprints", fail)
    _assert_not_restored(tmp_path, settings, capfd, "Out of memory")


@pytest.mark.parametrize("move", [pathlib.Path.rename, lambda path, other: other.symlink_to(path.name)])
def test_a_step_under_the_name_of_another_falls_back(tmp_path, settings, capfd, move):
    copies = _save(tmp_path, settings)
    checkpoints = tmp_path / "checkpoints"
    move(checkpoints / "2", checkpoints / "7")
    capfd.readouterr()
    number = 2 if (checkpoints / "2").exists() else 1
    _assert_same(_restore(tmp_path, settings)[0], copies[number])
    assert "step 7 in" in (said := capfd.readouterr().err)
    assert "it was saved as step 2, and renamed or linked" in said
    assert os.path.lexists(tmp_path / "damaged_checkpoints" / "7")
    assert sorted(path.name for path in checkpoints.iterdir()) == ["1", "2"][:number]


@pytest.fixture
def small_files():
    """Simulates a full disk: no file may grow beyond 64 KiB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, previous)


def _large() -> training.TrainState:
    params = {"noise": jax.random.normal(jax.random.key(0), (256, 256))}
    return dataclasses.replace(next(_states(1)), params=params)


_NOT_SAVED = r"a checkpoint could not be saved in .*File too large.*; earlier ones are kept"


def test_a_failed_save_surfaces(tmp_path, settings, small_files):
    with (
        pytest.raises(ValueError, match=_NOT_SAVED),
        checkpoint.Checkpoints(tmp_path, settings) as checkpoints,
    ):
        checkpoints.save(0, _large(), {"next_index": 0})
    assert _restore(tmp_path, settings) is None


def test_a_failed_save_is_noticed_before_the_next(tmp_path, settings, small_files):
    with (  # noqa: PT012
        pytest.raises(ValueError, match=_NOT_SAVED),
        checkpoint.Checkpoints(tmp_path, settings) as checkpoints,
    ):
        checkpoints.save(0, _large(), {"next_index": 0})
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            checkpoints.check()
            time.sleep(0.01)
        pytest.fail("the save has not failed")


def _save_model(folder: pathlib.Path, settings: config.Config, numbers=(1,)) -> training.TrainState:
    workdir.open_workdir(folder, settings)
    state = training.Program(settings, sharding.whole_mesh()).init_state()
    with checkpoint.Checkpoints(folder, settings) as checkpoints:
        for number in numbers:
            checkpoints.save(number, state, {"next_index": number})
    return state


def test_restore_model(tmp_path, settings):
    state = _save_model(tmp_path, settings)
    restored, model, number = training.restore_model(str(tmp_path))
    assert restored == settings
    assert number == 1
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    apply = jax.jit(lambda module: module(tokens))
    np.testing.assert_array_equal(
        apply(model), apply(training.Program(settings, sharding.whole_mesh()).merge(state.params))
    )


def test_restore_model_skips_a_damaged_step_and_leaves_it(tmp_path, settings, capfd):
    _save_model(tmp_path, settings, numbers=(1, 2))
    for path in _files(tmp_path, 2, "params/ocdbt.process_0/d/*"):
        _flip(path)
    assert training.restore_model(tmp_path)[2] == 1
    assert "step 2" in capfd.readouterr().err
    assert (tmp_path / "checkpoints" / "2").is_dir()


def test_restore_model_without_a_checkpoint(tmp_path, settings):
    with pytest.raises(ValueError, match="not the workdir of a run"):
        training.restore_model(tmp_path)
    workdir.open_workdir(tmp_path, settings)
    with pytest.raises(ValueError, match="no checkpoint yet"):
        training.restore_model(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())
    assert not (tmp_path / "checkpoints").exists()


def test_restore_model_while_training_replaces_checkpoints(tmp_path, with_training, capfd, monkeypatch):
    """Training deletes every step that was listed while the newest of them is loaded."""
    settings = with_training(keep_checkpoints=5)
    _save_model(tmp_path, settings, numbers=(1, 2, 3))
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "3").rename(tmp_path / "3")
    load = checkpoint.ocp.load_checkpointables

    def replace_first(*arguments):
        if (tmp_path / "3").exists():
            (tmp_path / "3").rename(checkpoints / "3")
            shutil.rmtree(checkpoints / "1")
            shutil.rmtree(checkpoints / "2" / "params")  # half deleted
        return load(*arguments)

    monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", replace_first)
    capfd.readouterr()
    assert training.restore_model(tmp_path)[2] == 3
    assert capfd.readouterr().err == ""


def test_restore_model_after_all_checkpoints_are_deleted(tmp_path, settings, monkeypatch):
    _save_model(tmp_path, settings)

    def delete(*_):
        shutil.rmtree(tmp_path / "checkpoints" / "1")
        raise FileNotFoundError

    monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", delete)
    with pytest.raises(ValueError, match="no checkpoint yet"):
        training.restore_model(tmp_path)
