"""Tests of the names that `import sympow_jax` provides, and of its lazy imports."""

import importlib.metadata
import pathlib
import subprocess
import sys

import pytest

import sympow_jax


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.robust
def test_every_package_is_there_after_one_import():
    folder = pathlib.Path(sympow_jax.__file__).parent
    # Only the command line reaches `commands`.
    packages = {path.parent.name for path in folder.glob("*/__init__.py")} - {"commands"} | {
        "array_types",
        "loop",
    }
    assert packages == set(sympow_jax.__all__) - {"__version__"}
    assert set(sympow_jax.__all__) <= set(dir(sympow_jax))
    code = (
        "import sympow_jax; print(*(getattr(sympow_jax, name).__name__ for name in sympow_jax.__all__[1:]))"
    )
    assert run(code).split() == [f"sympow_jax.{name}" for name in sympow_jax.__all__[1:]]


def test_version_is_that_of_the_package():
    assert sympow_jax.__version__ == importlib.metadata.version("sympow-jax")


def test_other_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'sympow_jax' has no attribute 'opps'"):
        _ = sympow_jax.opps  # type: ignore[attr-defined]


def test_the_import_alone_is_quick():
    seconds, *modules = run(
        "import sys, time\n"
        "start = time.process_time()\n"
        "import sympow_jax\n"
        "print(time.process_time() - start, *sys.modules)"
    ).split()
    assert float(seconds) < 0.1
    packages = {name.partition(".")[0] for name in modules}
    assert not packages & {"jax", "flax", "numpy", "jaxtyping", "pallas_kernels"}
    assert not any(name.startswith("sympow_jax.") for name in modules)


@pytest.mark.robust
def test_packages_import_no_kernels():
    """Modules that are absent after all these imports are absent after each alone."""
    lines = run(
        "import sys, sympow_jax\n"
        "for names in ('ops', 'config'), ('layers', 'models'):\n"
        "    [getattr(sympow_jax, name) for name in names]\n"
        "    print(*sys.modules)"
    )
    plain, every = map(str.split, lines.splitlines())
    assert not any(name.startswith("pallas_kernels") for name in every)
    # flax imports Pallas itself
    assert not any("pallas" in name or name.startswith("flax") for name in plain)
