"""Tests of the atomic replacement of files."""

import fcntl
import shutil

import pytest

from sympow_jax.process import atomic


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "a.txt"
    for text in ("first", "second"):
        with atomic.replace(path) as draft:
            assert draft.name == path.name
            draft.write_text(text)
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_replaced_and_its_target_is_unchanged(tmp_path, exists):
    target, path = tmp_path / "target.txt", tmp_path / "a.txt"
    if exists:
        target.write_text("the user's")
    path.symlink_to(target)
    with atomic.replace(path) as draft:
        draft.write_text("ours")
    assert not path.is_symlink()
    assert path.read_text() == "ours"
    assert target.exists() == exists
    assert not exists or target.read_text() == "the user's"


def test_an_error_changes_nothing(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(RuntimeError), atomic.replace(path) as draft:  # noqa: PT012
        draft.write_text("half")
        raise RuntimeError
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_the_folder_of_a_killed_process_is_removed_and_one_in_use_is_kept(tmp_path):
    path = tmp_path / "a.txt"
    with atomic.draft_folder(path) as used:
        left = tmp_path / f".{path.name}-left"
        shutil.copytree(used, left)
        (tmp_path / f".{path.name}-of_the_user").mkdir()
        with atomic.replace(path) as draft:
            draft.write_text("text")
        assert used.exists()
        assert not left.exists()
    assert {x.name for x in tmp_path.iterdir()} == {path.name, f".{path.name}-of_the_user"}


def test_a_folder_is_kept_before_it_is_locked(tmp_path, monkeypatch):
    path, lock = tmp_path / "a.txt", fcntl.flock

    def write_and_lock(file, operation):
        monkeypatch.setattr(fcntl, "flock", lock)
        with atomic.replace(path) as draft:
            draft.write_text("another process's")
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", write_and_lock)
    with atomic.replace(path) as draft:
        draft.write_text("ours")
    assert path.read_text() == "ours"
    assert list(tmp_path.iterdir()) == [path]
