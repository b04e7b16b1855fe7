"""Tests of the files that a setting selects, and of those held out."""

import glob
import os
import shutil

import numpy as np
import pytest

from sympow_jax.data import files
from tests.data import builders


@pytest.fixture
def folder(tmp_path):
    names = (
        "b.txt",
        "a.txt",
        "deep/er/c.txt",
        "deep/d.bin",
        ".hidden.txt",
        ".git/e.txt",
        "__pycache__/f.pyc",
    )
    builders.write_files(tmp_path / "corpus", {name: b"text" for name in names})
    return tmp_path / "corpus"


def keys(files_read):
    return [file.key for file in files_read]


def test_folders_files_and_globs(folder):
    visible = ["a.txt", "b.txt", "deep/d.bin", "deep/er/c.txt"]
    assert keys(files.find("data.paths", [str(folder)])) == visible
    assert keys(files.find("data.paths", [str(folder)], suffix=".bin")) == ["deep/d.bin"]
    assert keys(files.find("data.paths", [f"{folder}/**/*.txt"])) == ["a.txt", "b.txt", "deep/er/c.txt"]
    assert keys(files.find("data.paths", [f"{folder}/*.txt"])) == ["a.txt", "b.txt"]
    assert keys(files.find("data.paths", [f"{folder}/deep/er/c.txt"])) == ["c.txt"]


@pytest.mark.parametrize(
    "pattern",
    [
        "**",
        "*",
        "*/*",
        "**/*",
        "**/er/**",
        "d**/*.bin",
        "[ab].txt",
        "?.txt",
        ".*",
        "**/.git/*",
        "dee*/../*.txt",
    ],
)
def test_globs_are_those_of_the_standard_library(folder, pattern):
    expected = sorted(
        os.path.realpath(path)
        for path in glob.glob(f"{folder}/{pattern}", recursive=True)
        if os.path.isfile(path)
    )
    assert expected
    found = files.find("data.paths", [f"{folder}/{pattern}"])
    assert sorted(os.path.realpath(file.path) for file in found) == expected


@pytest.mark.parametrize(("path", "count"), [("", 4), ("**", 5), ("**/*.*", 5), ("**/*.txt", 3)])
def test_loops_of_links_to_folders_are_not_followed(folder, path, count):
    for name in ("x", "y"):
        os.symlink(folder, folder / "deep" / name)
    assert len(files.find("data.paths", [str(folder / path)])) == count


def test_relative_paths_and_home(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    assert keys(files.find("data.paths", ["deep"])) == ["d.bin", "er/c.txt"]
    assert keys(files.find("data.paths", ["*.txt"])) == ["a.txt", "b.txt"]
    assert keys(files.find("data.paths", ["a.txt"])) == ["a.txt"]
    assert keys(files.find("data.paths", ["~/deep"])) == ["d.bin", "er/c.txt"]


def test_a_file_named_twice_is_read_once(folder):
    os.symlink(folder / "a.txt", folder / "link.txt")
    matches = files.find("data.paths", [f"{folder}/*.txt", str(folder / "a.txt"), str(folder)])
    assert len(matches) == 4


def test_dangling_links_are_left_out(folder):
    os.symlink(folder / "nowhere", folder / "link.txt")
    assert len(files.find("data.paths", [str(folder)])) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", "there is no file or folder .*none.txt'; correct the path"),
        ("*.rst", "no file matches .*rst'; correct the path or the pattern"),
        ("empty", "no file matches .*empty'; correct the path or the pattern"),
    ],
)
def test_no_matching_files(folder, name, message):
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=f"^data.paths: {message}"):
        files.find("data.paths", [str(folder / "a.txt"), str(folder / name)])


def test_hold_out_does_not_depend_on_the_path_of_the_folder(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    hashes = [
        files.key_hashes(keys(files.find("data.paths", [str(root)])))
        for root in (folder, tmp_path / "elsewhere" / "copy")
    ]
    np.testing.assert_array_equal(*hashes)


@pytest.mark.parametrize(
    "hashes", [files.index_hashes(20_000), files.key_hashes([f"{i}.py" for i in range(20_000)])]
)
def test_hashes_are_uniform(hashes):
    # Four standard deviations of a tenth of 20,000 draws.
    counts, _ = np.histogram(hashes, bins=10, range=(0, 1))
    assert abs(counts - 2000).max() < 4 * np.sqrt(20_000 * 0.1 * 0.9)
    assert abs(np.corrcoef(hashes[1:], hashes[:-1])[0, 1]) < 4 / np.sqrt(20_000)


def test_hashes_are_those_of_earlier_releases():
    # A change here would move documents from held-out to training in existing runs.
    np.testing.assert_allclose(files.key_hashes(["abc.py"]), [0.769194722847125], rtol=1e-12)
    np.testing.assert_allclose(files.index_hashes(2), [0.8833108082136427, 0.43152799704851], rtol=1e-12)


def test_small_corpora_have_both_sides():
    for count in range(2, 30):
        mask = files.held_out(files.index_hashes(count), 0.1)
        assert 0 < mask.sum() < count
    assert not files.held_out(files.index_hashes(1), 0.9).any()
    assert not files.held_out(files.index_hashes(30), 0.0).any()
    assert files.held_out(files.index_hashes(0), 0.1).shape == (0,)


def test_other_documents_do_not_move_a_document():
    few, many = (files.held_out(files.index_hashes(count), 0.1) for count in (1000, 5000))
    assert (few != many[:1000]).sum() <= 2  # the lowest and the highest hash of the few
