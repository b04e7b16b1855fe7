"""Experiments on a corpus of a few lines."""

import pathlib
from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder that lets the tests compile each of the models once."""
    changes = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compilation_cache")),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    before = {name: getattr(jax.config, name) for name in changes}
    for name, value in changes.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="package")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A glob of the corpus."""
    folder: pathlib.Path = tmp_path_factory.mktemp("corpus")
    for index in range(40):
        (folder / f"{index}.txt").write_text(f"{index}: the quick brown fox jumps over the lazy dog. " * 2)
    return f"{folder}/*.txt"
