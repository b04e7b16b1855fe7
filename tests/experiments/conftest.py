"""Experiments on a corpus of a few lines."""

import pathlib

import pytest

from experiments import _shared

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


@pytest.fixture(scope="package")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: pathlib.Path = tmp_path_factory.mktemp("corpus")
    for index in range(40):
        (folder / f"{index}.txt").write_text(f"{index}: the quick brown fox jumps over the lazy dog. " * 2)
    return f"{folder}/*.txt"
