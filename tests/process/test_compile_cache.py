"""Tests of the cache of compiled programs."""

import os

import jax
import pytest

from sympow_jax.process import compile_cache


@pytest.fixture
def config(monkeypatch, tmp_path):
    """Makes JAX's config as without settings, and the user's cache a folder of the test."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    yield jax.config
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_cached_for_one_jaxlib_and_cpu(config, tmp_path, monkeypatch):
    compile_cache.cache_programs()
    (folder,) = (tmp_path / "sympow-jax").iterdir()
    assert config.jax_compilation_cache_dir == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert config.jax_persistent_cache_min_compile_time_secs == 0.0
    # Another CPU has another folder.
    other = tmp_path / "cpuinfo"
    other.write_text("processor\t: 0\nflags\t\t: fpu sse\n\nprocessor\t: 1\n")
    monkeypatch.setattr(compile_cache, "_CPU_INFO", other)
    config.update("jax_compilation_cache_dir", None)
    compile_cache.cache_programs()
    assert config.jax_compilation_cache_dir != str(folder)


def test_jax_may_be_told_otherwise(config, tmp_path):
    config.update("jax_compilation_cache_dir", "/elsewhere")
    compile_cache.cache_programs()
    assert config.jax_compilation_cache_dir == "/elsewhere"
    config.update("jax_compilation_cache_dir", None)
    config.update("jax_enable_compilation_cache", False)
    compile_cache.cache_programs()
    config.update("jax_enable_compilation_cache", True)
    assert config.jax_compilation_cache_dir is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cause", ["a file in its place", "no home", "not writable"])
def test_a_cache_that_cannot_be_is_not_used(config, tmp_path, monkeypatch, cause):
    if cause == "a file in its place":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    elif cause == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME", raising=False)
        # A user id that has no account.
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)
    else:
        compile_cache.cache_programs()
        config.update("jax_compilation_cache_dir", None)
        (folder,) = (tmp_path / "sympow-jax").iterdir()
        # In place of its mode, which does not stop root.
        monkeypatch.setattr(os, "access", lambda path, mode: path != folder or not mode & os.W_OK)
    compile_cache.cache_programs()
    assert config.jax_compilation_cache_dir is None
