"""Settings of all tests."""

import os
import shutil
import tempfile

import jax
import pytest

_CACHE = "JAX_COMPILATION_CACHE_DIR"
_made: list[str] = []


def pytest_configure(config):
    """Keeps the user's cache of compiled programs out of the tests, and reduces XLA's compilation effort.

    Tests at real sizes compile with the default effort, as users do.
    """
    if _CACHE not in os.environ:
        _made.append(tempfile.mkdtemp(prefix="sympow-jax-tests-"))
        os.environ[_CACHE] = _made[0]
    # The variable is for other processes; this one has imported JAX already.
    jax.config.update("jax_compilation_cache_dir", os.environ[_CACHE])
    chosen = config.getoption("markexpr")
    if any(mark in chosen and f"not {mark}" not in chosen for mark in ("slow", "gpu")):
        return
    # The suite compiles hundreds of small programs and runs each once: LLVM's costly passes are not worth their time.
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )


def pytest_unconfigure():
    """Removes the cache of compiled programs, in the process that made it."""
    for folder in _made:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_module():
    """Clears a module's compiled programs: they are memory mappings, and XLA crashes at Linux's limit of 65,530."""
    yield
    jax.clear_caches()
