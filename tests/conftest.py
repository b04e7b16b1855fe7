"""Settings of all tests."""

import contextlib
import gc
import os
import pathlib
import shutil
import signal
import tempfile

import jax
import pytest

from tests import devices

# XLA crashes at Linux's limit of 65,530 memory mappings; a program of an op with its gradients has 50 to 200.
_MAPPINGS = 20_000
_CACHE = "JAX_COMPILATION_CACHE_DIR"
_made: list[str] = []
_seen = contextlib.ExitStack()


def pytest_configure(config):
    """Makes CPU devices for meshes, keeps the user's cache of compiled programs out, and reduces the compiler's effort.

    Tests at real sizes compile with the default effort, as users do.
    """
    jax.config.update("jax_num_cpu_devices", devices.COUNT)
    _seen.enter_context(devices.seen(1))
    if _CACHE not in os.environ:
        _made.append(tempfile.mkdtemp(prefix="sympow-jax-tests-"))
        os.environ[_CACHE] = _made[0]
    # The variable is for other processes; this one has imported JAX already. Many tests make the same model.
    jax.config.update("jax_compilation_cache_dir", os.environ[_CACHE])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    # Traces make many objects that stay, which frequent collections visit in vain.
    gc.set_threshold(20_000, 20, 20)
    if _at_real_sizes(config):
        return
    # The suite compiles hundreds of small programs and runs each once: LLVM's costly passes are not worth their time.
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )


def _at_real_sizes(config) -> bool:
    chosen = config.getoption("markexpr")
    return any(mark in chosen and f"not {mark}" not in chosen for mark in ("slow", "gpu"))


def pytest_unconfigure():
    """Removes the cache of compiled programs, in the process that made it."""
    _seen.close()
    for folder in _made:
        shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_finish():
    """Leaves modules, which live as long as the process, out of all later garbage collections."""
    gc.freeze()


def _scope_of_programs(fixture_name, config):
    """Returns "function" for slow tests: one file of these can have more programs than fit."""
    return "function" if _at_real_sizes(config) else "module"


@pytest.fixture(autouse=True, scope=_scope_of_programs)
def _room_for_programs():
    """Clears compiled programs once their memory mappings are many; until then tests share them."""
    yield
    try:
        mappings = pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:  # only Linux has it
        return
    if mappings > _MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def interruptible():
    """Enables SIGINT as in a shell's foreground, in whose background it is ignored, and restores handlers."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
