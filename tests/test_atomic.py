"""Tests of the atomic replacement of files."""

import pytest

from sympow_jax import atomic


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
