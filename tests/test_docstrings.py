"""Tests that every public function of the ops and layers has an example, and that the examples are right."""

import doctest
import inspect
import types

import jax
import pytest
from flax import nnx

from sympow_jax import layers, ops


def public_functions(module: types.ModuleType):
    """Yields (name, function or Flax module) of a package's exported names, and of the modules that it exports."""
    for name in module.__all__:
        x = getattr(module, name)
        if isinstance(x, types.ModuleType):
            yield from public_functions(x)
        elif inspect.isfunction(x) or (inspect.isclass(x) and issubclass(x, nnx.Module)):
            yield f"{x.__module__}.{x.__qualname__}", x


EVERY = {"sympow_jax.ops": ops, "sympow_jax.layers": layers}
FUNCTIONS = {name: x for module in EVERY.values() for name, x in public_functions(module)}


@pytest.mark.robust
@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_example(name):
    function = FUNCTIONS[name]
    text = inspect.getdoc(function) or ""
    assert "\nExamples:\n    >>> " in text, f"{name} has no example"
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    output: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.append)
    assert results.attempted > 0
    assert results.failed == 0, "".join(output)


def test_power_attention_names_what_jax_has_and_it_has_not():
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    missing = theirs.keys() - inspect.signature(ops.power_attention).parameters.keys()
    assert "local_window_size" in missing
    assert not [name for name in missing if f"`{name}`" not in ops.power_attention.__doc__]
