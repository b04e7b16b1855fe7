"""Settings of tests that run kernels, interpreted (`pytest -m interpret`) or on a GPU (`pytest -m gpu`)."""

import os

import jax
import pytest


def pytest_configure(config):
    """Provides enough threads for the warpgroups of interpreted tests, and leaves GPU memory to other processes."""
    chosen = config.getoption("markexpr")
    if "gpu" in chosen and "not gpu" not in chosen:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if "interpret" not in chosen or "not interpret" in chosen:
        return
    # The interpreter runs each warpgroup of a block on a thread of XLA's pool, which by default has one thread per
    # core. Warpgroups that wait for each other need a thread each.
    os.environ.setdefault("PJRT_NPROC", "8")
    # Without this, arrays that a kernel does not depend on are computed at the same time, on the same threads.
    jax.config.update("jax_cpu_enable_async_dispatch", False)


@pytest.fixture(autouse=True)
def _no_races(capfd):
    """Fails if the interpreter reports a race; not all versions raise an error for it."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out
