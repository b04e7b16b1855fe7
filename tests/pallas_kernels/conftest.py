"""Settings of the tests that run kernels in GPU interpret mode: `pytest -m interpret`."""

import os

import jax
import pytest


def pytest_configure(config):
    """Gives warpgroups the threads they need, where interpreted tests are asked for."""
    chosen = config.getoption("markexpr")
    if "interpret" not in chosen or "not interpret" in chosen:
        return
    # Interpretation runs each warpgroup of a block on a thread of XLA's pool, of as many threads as there are cores
    # unless this says otherwise; warpgroups that wait for each other need a thread each.
    os.environ.setdefault("PJRT_NPROC", "8")
    # Without this, arrays that a kernel does not depend on are computed beside it, on the same threads.
    jax.config.update("jax_cpu_enable_async_dispatch", False)


@pytest.fixture(autouse=True)
def _no_races(capfd):
    """Fails where the interpreter reports a race; not all versions raise an error for it."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out
