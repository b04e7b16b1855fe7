"""Tests of the names that `import sympow_jax` provides, and of its lazy imports."""

import importlib.metadata
import pathlib
import subprocess
import sys
import typing

import pytest

import sympow_jax
from sympow_jax import data, generation, training


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_version_is_that_of_the_package():
    assert sympow_jax.__version__ == importlib.metadata.version("sympow-jax")


def test_other_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'sympow_jax' has no attribute 'opps'"):
        _ = sympow_jax.opps  # type: ignore[attr-defined]


def test_annotations_are_types():
    assert typing.get_type_hints(training.TrainState)["step"]
    for call in (generation.complete, generation.stream, generation.Transcript.__init__):
        assert typing.get_type_hints(call)["codec"] is data.Codec


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
def test_packages_are_there_after_one_import_and_need_only_what_they_use():
    """Modules that are absent after all these imports are absent after each alone."""
    folder = pathlib.Path(sympow_jax.__file__).parent
    # Only the command line reaches `commands`.
    packages = {path.parent.name for path in folder.glob("*/__init__.py")} - {"commands"}
    assert packages | {"array_types", "loop"} == set(sympow_jax.__all__) - {"__version__"}
    assert set(sympow_jax.__all__) <= set(dir(sympow_jax))
    stages = ["ops"], ["config", "layers", "models", "generation", "weights"], sympow_jax.__all__[1:]
    lines = run(
        "import sys, sympow_jax\n"
        f"for names in {stages}:\n"
        "    print(*(getattr(sympow_jax, name).__name__ for name in names))\n"
        "    print(*sys.modules)"
    ).splitlines()
    assert [line.split() for line in lines[::2]] == [
        [f"sympow_jax.{name}" for name in names] for names in stages
    ]
    ops, models, every = (set(line.split()) for line in lines[1::2])
    # flax imports Pallas itself. jax.extend imports a part of it, in 20 ms.
    kernels = ("jax.experimental.pallas", "pallas_kernels", "flax")
    assert not [name for name in ops if name.startswith(kernels)]
    assert not [name for name in models if name.startswith(("sympow_jax.data", "sympow_jax.training"))]
    # Packages of the extra `train` that neither jax nor flax need, so a plain installation does not have them.
    training = {"grain", "matplotlib", "PIL", "tensorboardX"}
    assert not training & models
    assert {"matplotlib", "PIL"} <= every
    assert not [name for name in models if name.startswith("pallas_kernels")]
