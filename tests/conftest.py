"""Settings of all tests."""

import os

import jax
import pytest


def pytest_configure(config):
    """Reduces XLA's compilation effort, except for tests at real sizes, which use the default as users do."""
    chosen = config.getoption("markexpr")
    if any(mark in chosen and f"not {mark}" not in chosen for mark in ("slow", "gpu")):
        return
    # The suite compiles hundreds of small programs and runs each once: LLVM's costly passes are not worth their time.
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_module():
    """Clears a module's compiled programs: they are memory mappings, and XLA crashes at Linux's limit of 65,530."""
    yield
    jax.clear_caches()
