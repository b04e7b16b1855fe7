"""Tests of checkpoints: exact, safe under donation, and robust to damage."""

import dataclasses
import functools
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
from flax import nnx

from sympow_jax import config, models, training
from sympow_jax.process import workdir
from sympow_jax.training import checkpoint, sharding
from tests import marked
from tests.training import small


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
    state = jax.device_put(_first(), sharding.replicated(sharding.whole_mesh()))
    for _ in range(count):
        yield state
        state = _advance(state)


def _save(folder: pathlib.Path, settings: config.Config, numbers=(1, 2)) -> dict[int, training.TrainState]:
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
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), jax.eval_shape(_first)
    )
    with checkpoint.Checkpoints(folder, settings) as checkpoints:
        return checkpoints.restore(abstract)


def _assert_same(actual: training.TrainState, expected: training.TrainState) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    small.assert_same(actual, expected)


@pytest.fixture(scope="module")
def saved(settings, tmp_path_factory) -> tuple[pathlib.Path, dict[int, training.TrainState]]:
    folder = tmp_path_factory.mktemp("saved") / "run"
    return folder, _save(folder, settings)


@pytest.fixture
def run(saved, tmp_path, capfd) -> tuple[pathlib.Path, dict[int, training.TrainState]]:
    """Returns a copy of the workdir, and the states, with nothing said yet."""
    capfd.readouterr()
    return shutil.copytree(saved[0], tmp_path / "run"), saved[1]


def _files(folder: pathlib.Path, number: int, pattern: str) -> list[pathlib.Path]:
    return [path for path in (folder / "checkpoints" / str(number)).rglob(pattern) if path.is_file()]


def _truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def test_states_are_restored_to_the_bit_though_donated(tmp_path, with_training):
    # Every state is donated right after its save began.
    folder, settings = tmp_path / "run", with_training(keep_checkpoints=5)
    assert _restore(folder, settings) is None
    copies = _save(folder, settings, numbers=range(4))
    replicated = sharding.replicated(sharding.whole_mesh())
    for number in reversed(range(4)):
        state, position = _restore(folder, settings)
        assert position == {"next_index": number}
        _assert_same(state, copies[number])
        assert {leaf.sharding for leaf in jax.tree.leaves(state)} == {replicated}
        shutil.rmtree(folder / "checkpoints" / str(number))


@marked.cases("name", ["run[1]"], robust=["a*b/run", "what?", "back\\slash/run"])
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


def test_the_newest_are_kept(tmp_path, settings):
    _save(tmp_path, settings, numbers=range(1, 6))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "5"]


def test_a_pipe_in_a_step_is_not_waited_for(run, settings):
    path = _files(run[0], 2, "params/ocdbt.process_0/d/*")[0]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a pipe or a device"):
        _restore(run[0], settings)
    with pytest.raises(ValueError, match=r"step 2 .* cannot be read, .* is a pipe or a device"):
        training.restore_model(run[0])


def _another_position(path: pathlib.Path) -> None:
    # One bit turns a 2 into a 3, and the file can still be read.
    text = path.read_text()
    assert text.count('"next_index": 2') == 1
    path.write_text(text.replace('"next_index": 2', '"next_index": 3'))


# One kind of damage, and a position that can still be read; the rest of the grid is robust.
@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        *(
            pytest.param(damage, pattern, marks=() if i == j == 0 else pytest.mark.robust)
            for i, damage in enumerate((_flip, _truncate, pathlib.Path.unlink))
            for j, pattern in enumerate(
                ("params/ocdbt.process_0/d/*", "opt_state/manifest.ocdbt", "_CHECKPOINT_METADATA")
            )
        ),
        (_another_position, "_CHECKPOINT_METADATA"),
        pytest.param(lambda path: path.unlink(missing_ok=True), "params/**/*", marks=pytest.mark.robust),
    ],
)
def test_a_damaged_step_falls_back(run, settings, capfd, damage, pattern):
    folder, copies = run
    for path in _files(folder, 2, pattern):
        damage(path)
    state, position = _restore(folder, settings)
    _assert_same(state, copies[1])
    assert position == {"next_index": 1}
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 2
    assert "the checkpoint of step 2" in said[0]
    assert "is damaged" in said[0]
    assert (folder / "damaged_checkpoints" / "2").is_dir()


def test_folders_that_are_no_checkpoints_are_ignored_and_kept(run, settings, capfd):
    folder, copies = run
    checkpoints = folder / "checkpoints"
    for name in ("²", "٣", "007", "notes"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "notes.txt").write_text("the user's")
    (checkpoints / "7").write_text("the user's")
    _assert_same(_restore(folder, settings)[0], copies[2])
    assert capfd.readouterr().err == ""
    _save(folder, settings, numbers=(8, 9, 10))
    assert {path.name for path in checkpoints.iterdir()} == {"²", "٣", "007", "notes", "7", "9", "10"}
    for name in ("007/notes.txt", "7"):
        assert (checkpoints / name).read_text() == "the user's"


def test_a_run_whose_checkpoints_cannot_be_listed_does_not_begin_again(run, settings):
    checkpoints = run[0] / "checkpoints"
    checkpoints.rename(run[0] / "elsewhere")
    checkpoints.symlink_to(checkpoints.name)
    with pytest.raises(ValueError, match="Too many levels of symbolic links"):
        workdir.open_workdir(run[0], settings)


@pytest.mark.robust
def test_a_step_can_be_damaged_again(run, settings):
    folder, copies = run
    for again in (True, False):
        _flip(_files(folder, 2, "opt_state/manifest.ocdbt")[0])
        _assert_same(_restore(folder, settings)[0], copies[1])
        if again:
            _save(folder, settings, numbers=(2,))
            _assert_same(_restore(folder, settings)[0], copies[2])
    assert {path.name for path in (folder / "damaged_checkpoints").iterdir()} == {"2", "2.1"}


@pytest.mark.robust
def test_all_damaged_is_an_error(run, settings):
    for number in (1, 2):
        for path in _files(run[0], number, "params/ocdbt.process_0/d/*"):
            _flip(path)
    with pytest.raises(ValueError, match=r"steps 2 and 1 in .* are damaged.*; move both elsewhere"):
        _restore(run[0], settings)
    assert len(list((run[0] / "checkpoints").iterdir())) == 2
    shutil.rmtree(run[0] / "checkpoints" / "1")
    with pytest.raises(ValueError, match=r"the only checkpoint in .* is damaged; use another --workdir"):
        _restore(run[0], settings)


def _assert_not_restored(folder: pathlib.Path, settings: config.Config, capfd, match: str) -> None:
    """Checks that restoring ends with an error of one line, and that both steps stay where they are."""
    with pytest.raises(ValueError, match=match) as caught:
        _restore(folder, settings)
    assert "the checkpoint of step 2 in " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["1", "2"]
    assert not (folder / "damaged_checkpoints").exists()


@pytest.mark.parametrize("target", ["itself", pytest.param("nowhere", marks=pytest.mark.robust)])
@pytest.mark.parametrize(
    "pattern", ["params/ocdbt.process_0/d/*", pytest.param("_CHECKPOINT_METADATA", marks=pytest.mark.robust)]
)
def test_a_file_that_cannot_be_read_is_not_damage(run, settings, capfd, tmp_path, pattern, target):
    # A link to itself cannot be opened even by root.
    folder, copies = run
    path = _files(folder, 2, pattern)[0]
    away = path.rename(tmp_path / "away")
    path.symlink_to(path if target == "itself" else tmp_path / "nowhere")
    _assert_not_restored(folder, settings, capfd, f"{path}: (Too many levels|No such file)")
    away.rename(path)
    _assert_same(_restore(folder, settings)[0], copies[2])


@marked.cases(
    ("error", "match"),
    [(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"), "Out of memory")],
    robust=[
        (OSError(5, "Input/output error", "manifest.ocdbt"), "Input/output error: 'manifest.ocdbt'"),
        (MemoryError(), "MemoryError"),
        (ValueError("UNAVAILABLE: Error reading a file"), "UNAVAILABLE"),
    ],
)
def test_too_little_memory_and_passing_errors_are_not_damage(run, settings, capfd, monkeypatch, error, match):
    def fail(*_):
        try:
            raise error
        except Exception as cause:
            raise KeyError("as Orbax wraps errors") from cause

    def fail_alone(_):
        raise error

    calls = [(checkpoint.ocp, name, fail) for name in ("load_checkpointables", "checkpointables_metadata")]
    for module, name, failing in [*calls, (checkpoint, "_fingerprints", fail_alone)]:
        with monkeypatch.context() as patched:
            patched.setattr(module, name, failing)
            _assert_not_restored(run[0], settings, capfd, match)
    _assert_same(_restore(run[0], settings)[0], run[1][2])


@marked.cases(
    "move",
    [pathlib.Path.rename],
    robust=[lambda path, other: other.symlink_to(path.name)],
    ids=["rename", "link"],
)
def test_a_step_under_the_name_of_another_falls_back(run, settings, capfd, move):
    folder, copies = run
    checkpoints = folder / "checkpoints"
    move(checkpoints / "2", checkpoints / "7")
    number = 2 if (checkpoints / "2").exists() else 1
    _assert_same(_restore(folder, settings)[0], copies[number])
    assert "step 7 in" in (said := capfd.readouterr().err)
    assert "it was saved as step 2, and renamed or linked" in said
    assert os.path.lexists(folder / "damaged_checkpoints" / "7")
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


def test_a_failed_save_surfaces_and_is_noticed_before_the_next(tmp_path, settings, small_files):
    with (
        pytest.raises(ValueError, match=_NOT_SAVED),
        checkpoint.Checkpoints(tmp_path, settings) as checkpoints,
    ):
        checkpoints.save(0, _large(), {"next_index": 0})
    assert _restore(tmp_path, settings) is None
    with (  # noqa: PT012
        pytest.raises(ValueError, match=_NOT_SAVED),
        checkpoint.Checkpoints(tmp_path / "other", settings) as checkpoints,
    ):
        checkpoints.save(0, _large(), {"next_index": 0})
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            checkpoints.check()
            time.sleep(0.01)
        pytest.fail("the save has not failed")


def test_a_model_without_a_checkpoint(tmp_path, settings):
    with pytest.raises(ValueError, match="not the workdir of a run"):
        training.restore_model(tmp_path)
    workdir.open_workdir(tmp_path, settings)
    with pytest.raises(ValueError, match="no checkpoint yet"):
        training.restore_model(tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_matrices_are_rounded_one_after_the_other(tmp_path, settings, capfd):
    hybrid = {"layers": 2, "attention_pattern": ("conformal", "softmax")}
    settings = small.changed(settings, model=hybrid, optimizer={"ema_decay": 0.5})
    workdir.open_workdir(tmp_path, settings)
    state = small.program(settings).init_state()
    state = dataclasses.replace(state, average=jax.tree.map(lambda x: 2 * x, state.average))
    with checkpoint.Checkpoints(tmp_path, settings) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, state, None)
    for path in _files(tmp_path, 2, "params/ocdbt.process_0/d/*"):
        _flip(path)
    _, exact, step = training.restore_model(tmp_path)
    _, rounded, same_step = training.restore_model(tmp_path, weights_dtype="bfloat16")
    assert step == same_step == 1
    assert capfd.readouterr().err.count("the checkpoint of step 2") == 2
    assert (tmp_path / "checkpoints" / "2").is_dir()  # only training moves it away
    expected = nnx.state(models.cast_weights(exact, "bfloat16"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(expected)} == {"float32", "bfloat16"}
    small.assert_same(nnx.state(rounded), expected)
    assert jax.tree.map(lambda x: x.dtype, nnx.state(rounded)) == jax.tree.map(lambda x: x.dtype, expected)


def test_training_may_replace_checkpoints_while_a_model_is_restored(tmp_path, finished, capfd, monkeypatch):
    """Training deletes every step that was listed while the newest of them is loaded, and then all there are."""
    run = finished.copy(tmp_path / "run")
    checkpoints, load = run / "checkpoints", checkpoint.ocp.load_checkpointables
    (checkpoints / "10").rename(tmp_path / "10")

    def replace_first(*arguments):
        if (tmp_path / "10").exists():
            (tmp_path / "10").rename(checkpoints / "10")
            shutil.rmtree(checkpoints / "8" / "params")  # half deleted
        return load(*arguments)

    def delete(*_):
        for path in checkpoints.iterdir():
            shutil.rmtree(path)
        raise FileNotFoundError

    monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", replace_first)
    capfd.readouterr()
    assert training.restore_model(run)[2] == 10
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(checkpoint.ocp, "load_checkpointables", delete)
    with pytest.raises(ValueError, match="no checkpoint yet"):
        training.restore_model(run)
