"""Experiments on a corpus of a few lines."""

import pathlib
from collections.abc import Iterator

import pytest

from experiments import _shared
from tests import programs

# Of a run at test scale, without its plan and variants.
OPTIONS = _shared.Options(
    scale="tiny",
    paper="wikitext103:base",
    plan=_shared.Plan(seeds=(0,), steps=2),
    variants=(),
    power=2,
    results=pathlib.Path("results"),
    runs=pathlib.Path("runs"),
    data=(),
    heldout=(),
    more={},
    command="",
)


@pytest.fixture(autouse=True, scope="package")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Returns a folder in which the tests cache compiled programs, so that each model compiles once."""
    folder = tmp_path_factory.mktemp("compilation_cache")
    with programs.kept_in(folder):
        yield


@pytest.fixture(scope="package")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns a glob of the corpus."""
    folder: pathlib.Path = tmp_path_factory.mktemp("corpus")
    for index in range(40):
        (folder / f"{index}.txt").write_text(f"{index}: the quick brown fox jumps over the lazy dog. " * 2)
    return f"{folder}/*.txt"
