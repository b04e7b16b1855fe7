"""Folder of compiled programs."""

import hashlib
import importlib.metadata
import os
import pathlib
import platform

import jax

# Seconds of compilation from which a program is cached. By default of JAX, many small programs are compiled each time.
_LEAST_SECONDS = 0.0
_CPU_INFO = pathlib.Path("/proc/cpuinfo")


def cache_programs() -> None:
    """Makes JAX cache compiled programs in `~/.cache/sympow-jax`, unless it is told where, or not to.

    It is told by `JAX_COMPILATION_CACHE_DIR` and `JAX_ENABLE_COMPILATION_CACHE`, or by its config. A cache is of one
    version of jaxlib and one kind of CPU: XLA loads programs that were compiled for another CPU, as on a cluster whose
    hosts share a home folder, with a warning at best, and they may crash (jax-ml/jax#38445).
    """
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    # The CPU's model and instruction sets.
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    found = [platform.machine()]
    if _CPU_INFO.is_file():
        first = _CPU_INFO.read_text().partition("\n\n")[0]
        found += [line for line in first.splitlines() if line.partition(":")[0].strip() in names]
    cpu = hashlib.sha256("\n".join(found).encode()).hexdigest()[:12]
    try:
        root = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        folder = root / "sympow-jax" / f"jaxlib-{importlib.metadata.version('jaxlib')}-{cpu}"
        # Only for the user, because whoever writes to the cache can run code in the process that reads it.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return  # no home folder, or one that cannot be written, needs no cache
    # JAX would warn for each program. The folder may be another user's, or on a file system that is now read-only.
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
