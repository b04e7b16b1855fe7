"""Cache of compiled programs, so that the tests of a package compile each of their models once."""

import contextlib
import pathlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def kept_in(folder: pathlib.Path) -> Iterator[None]:
    """Caches in the folder every program that takes at least a tenth of a second to compile."""
    changes = {"jax_compilation_cache_dir": str(folder), "jax_persistent_cache_min_compile_time_secs": 0.1}
    before = {name: getattr(jax.config, name) for name in changes}
    for name, value in changes.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
