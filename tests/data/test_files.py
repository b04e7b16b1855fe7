"""Tests of the files that a setting selects, and of those held out."""

import glob
import os

import numpy as np
import pytest

from sympow_jax.data import files
from tests.data import builders


@pytest.fixture
def folder(tmp_path):
    names = "b.txt a.txt deep/er/c.txt deep/d.bin .hidden.txt .git/e.txt __pycache__/f.pyc"
    builders.write_files(tmp_path / "corpus", dict.fromkeys(names.split(), b"text"))
    return tmp_path / "corpus"


def keys(files_read):
    return [file.key for file in files_read]


def test_folders_files_and_globs(folder):
    visible = ["a.txt", "b.txt", "deep/d.bin", "deep/er/c.txt"]
    assert keys(files.find("data.paths", [str(folder)])) == visible
    assert keys(files.find("data.paths", [str(folder)], suffix=".bin")) == ["deep/d.bin"]
    assert keys(files.find("data.paths", [f"{folder}/**/*.txt"])) == ["a.txt", "b.txt", "deep/er/c.txt"]
    assert keys(files.find("data.paths", [f"{folder}/deep/er/c.txt"])) == ["c.txt"]


def test_globs_are_those_of_the_standard_library(folder):
    patterns = "** * */* **/* **/er/** d**/*.bin [ab].txt ?.txt .* **/.git/* dee*/../*.txt"
    for pattern in patterns.split():
        paths = glob.glob(f"{folder}/{pattern}", recursive=True)
        expected = sorted(os.path.realpath(path) for path in paths if os.path.isfile(path))
        assert expected
        found = files.find("data.paths", [f"{folder}/{pattern}"])
        assert sorted(os.path.realpath(file.path) for file in found) == expected


def test_links(folder):
    os.symlink(folder / "nowhere", folder / "dangling.txt")
    os.symlink(folder / "a.txt", folder / "link.txt")
    # A file with two names is read once.
    assert len(files.find("data.paths", [f"{folder}/*.txt", str(folder / "a.txt"), str(folder)])) == 4
    # Loops of links to folders are not followed.
    for name in ("x", "y"):
        os.symlink(folder, folder / "deep" / name)
    for path, count in (("", 4), ("**", 5), ("**/*.*", 5), ("**/*.txt", 3)):
        assert len(files.find("data.paths", [str(folder / path)])) == count


def test_relative_paths_and_home(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    assert keys(files.find("data.paths", ["deep"])) == ["d.bin", "er/c.txt"]
    assert keys(files.find("data.paths", ["*.txt"])) == ["a.txt", "b.txt"]
    assert keys(files.find("data.paths", ["a.txt"])) == ["a.txt"]
    assert keys(files.find("data.paths", ["~/deep"])) == ["d.bin", "er/c.txt"]


def test_paths_that_cannot_be_read(folder, monkeypatch):
    (folder / "empty").mkdir()
    for name, message in (
        ("none.txt", "there is no file or folder .*none.txt'; correct the path"),
        ("*.rst", "no file matches .*rst'; correct the path or the pattern"),
        ("empty", "no .bin file is in .*empty'; correct the path or the pattern"),
    ):
        with builders.refused(f"^data.paths: {message}"):
            files.find("data.paths", [str(folder / "a.txt"), str(folder / name)], suffix=".bin")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "open_file", refuse)
    with builders.refused(r"cannot read .*a\.txt: Permission denied; check the file"):
        files.read(str(folder / "a.txt"))


ZERO = np.zeros(1, np.int64)


def test_a_file_that_is_named_and_in_a_folder_has_one_key(folder):
    named = str(folder / "deep/er/c.txt")
    for paths in ([named, str(folder)], [str(folder), named], [f"{folder}/**/*.txt", named]):
        (file,) = (x for x in files.find("data.paths", paths) if x.path.endswith("c.txt"))
        assert (file.key, file.named) == ("c.txt", True)


@pytest.mark.parametrize("keys", [["a.bin"], [f"{i}.py" for i in range(20_000)]])
def test_hashes_are_uniform(keys):
    positions = np.arange(20_000) if len(keys) == 1 else ZERO
    below = np.array([files.held_out(keys, positions, fraction) for fraction in np.arange(1, 10) / 10])
    # Four standard deviations of a tenth of 20,000 draws.
    counts = np.diff(below.sum(1), prepend=0)
    assert abs(counts - 2000).max() < 4 * np.sqrt(20_000 * 0.1 * 0.9)
    ranks = below.sum(0)
    assert abs(np.corrcoef(ranks[1:], ranks[:-1])[0, 1]) < 4 / np.sqrt(20_000)


def test_the_hash_is_what_existing_runs_were_split_by():
    # A change here would move documents from held-out to training in existing runs.
    for position, value in ((0, 0.769194722847125), (1, 0.6525055310607693)):
        masks = [files.held_out(["abc.py"], np.array([position]), value + x) for x in (-1e-12, 1e-12)]
        assert np.concatenate(masks).tolist() == [False, True]


def test_nothing_and_all_may_be_held_out():
    assert not files.held_out(["a"], np.arange(30), 0.0).any()
    assert files.held_out(["abc.py"], ZERO, 0.8).all()
    assert files.held_out([], ZERO, 0.1).shape == (0,)
