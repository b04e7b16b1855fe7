"""Hashes of the traced programs of ops, their kernels' bodies included: what only moves Python changes none.

    python -m tools.programs > before.txt
    python -m tools.programs | diff before.txt -

A line has the hash of a forward pass and that of both passes. Calls of jitted functions are inlined, so that names and
the order of their arguments do not count. It takes a minute or two on a CPU; no kernel is run.
"""

import argparse
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from sympow_jax import ops
from sympow_jax.ops import target

# Power, form and head sizes of kernels whose code differs.
KERNELS = (
    (2, "attention", 64, 64),
    (4, "attention", 128, 128),
    (2, "chunked", 32, 64),
    (2, "chunked", 64, 64),
    (2, "chunked", 48, 96),
    (2, "chunked", 128, 128),
    (4, "chunked", 16, 32),
    (4, "chunked", 32, 32),
)
# Text that depends on the process or on the lines of source files.
_NOISE = re.compile(
    r"0x[0-9a-f]+| at \S*\.py\S*|<(bound method|function|jax\.custom)[^>]*>|(name|debug_info)=\S+"
)


def main() -> None:
    """Prints the hashes of all programs."""
    argparse.ArgumentParser(description="Hashes of the traced programs of ops.").parse_args()
    for name, f, arrays in programs():
        print(name, _digest(f, *arrays), _digest(_gradient(f), *arrays), flush=True)


def programs() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yields a name, a function of (query, key, value, log_decay) and shapes of these."""
    for power, form, implementation, documents, state in itertools.product(
        (2, 4), ("attention", "chunked", "recurrent"), ("xla", "reference"), (False, True), (False, True)
    ):
        if form == "attention" or implementation == "xla":
            options = {"power": power, "form": form, "implementation": implementation, "exact_window": 8}
            yield _program(96, 16, 16, jnp.float32, documents=documents, state=state, **options)
    for (power, form, head_dim, value_dim), documents, state in itertools.product(
        KERNELS, (False, True), (False, True)
    ):
        if form == "chunked" or not state:
            options = {"power": power, "form": form, "implementation": "mosaic_gpu"}
            yield _program(
                700, head_dim, value_dim, jnp.bfloat16, documents=documents, state=state, **options
            )
    for attend in (ops.softmax_attention, ops.expressive_attention, ops.linear_attention):
        shapes = _shapes(600, 16, 24, jnp.float32)
        yield attend.__name__, lambda q, k, v, g, attend=attend: attend(q, k, v, log_decay=g), shapes


def _program(time, head_dim, value_dim, dtype, *, documents, state, **options):
    kernels = options["implementation"] == "mosaic_gpu"

    def attend(query, key, value, log_decay):
        arrays = {"segment_ids": jnp.zeros((2, time), jnp.int32)} if documents else {}
        if state and not kernels:
            sizes = {"power": options["power"], "exact_window": options["exact_window"]}
            arrays["initial_state"] = ops.PowerState.zeros(2, 2, head_dim, value_dim, **sizes)
        with target.interpreted(plgpu.InterpretGPUParams()):
            return ops.power_attention(
                query, key, value, log_decay=log_decay, return_state=state, **arrays, **options
            )

    kind = "documents" * documents or "-", "state" * state or "-"
    names = options["power"], options["form"], options["implementation"], head_dim, value_dim, *kind
    return " ".join(map(str, names)), attend, _shapes(time, head_dim, value_dim, dtype)


def _shapes(time, head_dim, value_dim, dtype):
    query, key, value = (4, head_dim), (2, head_dim), (2, value_dim)
    arrays = (jax.ShapeDtypeStruct((2, time, *x), dtype) for x in (query, key, value))
    return *arrays, jax.ShapeDtypeStruct((2, time, 2), jnp.float32)


def _gradient(f):
    def total(*arrays):
        floats = [x for x in jax.tree.leaves(f(*arrays)) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(x.astype(jnp.float32).sum() for x in floats)

    return jax.grad(total, (0, 1, 2, 3))


def _digest(f, *arrays) -> str:
    text = "\n".join(_lines(jax.make_jaxpr(f)(*arrays).jaxpr))
    return hashlib.sha256(_NOISE.sub("", text).encode()).hexdigest()[:12]


def _lines(jaxpr: jex.Jaxpr) -> Iterator[str]:
    """Yields the equations of a program, whose variables are numbered in the order in which they get their values."""
    numbers = itertools.count()

    def run(jaxpr, arguments):
        known = dict(zip(jaxpr.invars, arguments)) | {x: next(numbers) for x in jaxpr.constvars}

        def read(x):
            return f"{x.val}:{x.aval}" if isinstance(x, jex.Literal) else known[x]

        for equation in jaxpr.eqns:
            inputs = [read(x) for x in equation.invars]
            if equation.primitive.name in ("jit", "pjit"):
                outputs = yield from run(equation.params["jaxpr"].jaxpr, inputs)
                known.update(zip(equation.outvars, outputs))
                continue
            known.update((x, next(numbers)) for x in equation.outvars)
            outputs = [f"{known[x]}:{x.aval}" for x in equation.outvars]
            options = {name: _described(value) for name, value in sorted(equation.params.items())}
            yield f"{outputs} = {equation.primitive.name} {inputs} {options}"
        return [read(x) for x in jaxpr.outvars]

    results = yield from run(jaxpr, [next(numbers) for _ in jaxpr.invars])
    yield f"{[str(x.aval) for x in jaxpr.invars]} -> {results}"


def _described(value: Any) -> str:
    """Returns a parameter of an equation as text, with the programs that it has."""
    if isinstance(value, jex.ClosedJaxpr):
        value = value.jaxpr
    if isinstance(value, jex.Jaxpr):
        return "\n".join(_lines(value))
    return str([_described(x) for x in value] if isinstance(value, tuple | list) else value)


if __name__ == "__main__":
    main()
