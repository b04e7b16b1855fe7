"""Tests of the extra `train`, and of the messages about missing packages."""

import importlib
import importlib.metadata
import sys

import pytest

from sympow_jax import extras


def test_train_has_what_it_imports():
    required = importlib.metadata.requires("sympow-jax")
    of_train = {line.partition(">")[0].lower() for line in required if "extra == 'train'" in line}
    assert of_train >= {"grain", "matplotlib", "pillow", "tensorboardx", "optax", "rich"}


def test_something_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ModuleNotFoundError) as raised, extras.required("train", "sympow_jax.data"):
        importlib.import_module("grain")
    expected = "sympow_jax.data needs grain, which is not installed: pip install 'sympow-jax[train]'"
    assert str(raised.value) == expected
    assert raised.value.name == "grain"
    # Callers that an argument makes import it document ValueError.
    assert isinstance(raised.value, ValueError)
    # A program replaces the name of the module by its own, and exits without a traceback.
    with pytest.raises(SystemExit) as stopped, extras.required("train", "train.py", exits=True):
        raise raised.value
    assert stopped.value.code == "error: " + expected.replace("sympow_jax.data", "train.py")


def test_the_innermost_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with (
        pytest.raises(SystemExit) as stopped,
        extras.required("train", "train.py", exits=True),
        extras.required("corpora", "sympow_jax.data.corpus"),
    ):
        importlib.import_module("pyarrow")
    assert stopped.value.code.endswith("pip install 'sympow-jax[corpora]'")


def test_a_fault_of_the_package_is_none_of_the_users():
    fault = pytest.raises(ModuleNotFoundError, match=r"^No module named 'sympow_jax\.nothing'$")
    with fault, extras.required("train", "train.py", exits=True):
        importlib.import_module("sympow_jax.nothing")
