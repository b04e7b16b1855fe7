"""Tests of the passes of the chunked form by plain stand-ins, and of each kernel, interpreted, on their operands.

These have rows of zeros, padding, documents, keys and cotangents of very different lengths, and segments of time.
"""

import contextlib
import dataclasses
import functools
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_state
from pallas_kernels.power_state import reshaping
from tests.ops import cases
from tests.ops import test_power_attention as suite
from tests.pallas_kernels import plain, plain_quartic
from tests.pallas_kernels import test_op as interpreted

KERNELS = {
    power: {name.__name__: (module, getattr(module, name.__name__)) for module, name, *_ in table}
    for power, table in ((2, plain.KERNELS), (4, (*plain_quartic.KERNELS, *plain.SHARED)))
}
# Largest errors of results relative to the stand-in's: of bfloat16 ones, of float32 sums of 16-bit operands, and of
# such sums whose terms cancel. Those of states are the rounding of float16.
SHORT, SUMS, CANCELED = 2.0**-9, 1e-5, 2.0**-14
FLOAT32 = {"norms", "in_units", "chunk_decays", "decay_gradient", "recurrence", "scales"}
BOUNDS = {
    # A remainder is what the output leaves of a mean with the bound of sums.
    (2, "query_states"): (SHORT, SUMS, SUMS),
    (2, "query_vjp"): (SHORT, CANCELED),
    (2, "key_vjp"): (SHORT, SHORT, 5e-4),
    (4, "query_states"): (SHORT, SUMS, SUMS),
    (4, "query_vjp"): (2**-15, CANCELED),
    (4, "key_vjp"): (2**-15, 2**-15, 2**-15),
}


class Sizes(NamedTuple):
    """Sizes of a case, whose last chunk is in part padding.

    Chunks of 64, 128 and 192 give a block of queries one, two and three warpgroups.
    """

    head_dim: int
    value_dim: int
    chunk: int
    time: int
    power: int = 2
    exact_window: int = 64
    multiprocessors: int = 132


OFTEN = [
    # Of the first two, one has a chunk of keys after the last one of queries.
    Sizes(64, 64, 128, 226),
    Sizes(64, 64, 192, 310),
    Sizes(64, 64, 128, 250, exact_window=0, multiprocessors=1),
    Sizes(32, 64, 64, 190),
    Sizes(32, 128, 128, 226),
    Sizes(16, 16, 64, 190, power=4),
    Sizes(16, 16, 128, 226, power=4, multiprocessors=1),
]
RARE = [
    Sizes(128, 64, 128, 226),
    Sizes(128, 128, 128, 226),
    Sizes(32, 32, 64, 190, power=4),
    Sizes(32, 16, 64, 190, power=4),
]


def drawn_for(sizes):
    """Draws arguments of the op for a case; a document begins at 40, in the first chunk."""
    case = cases.Case(
        power=sizes.power,
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        time=sizes.time,
        decay="gentle",
        group=2,
    )
    drawn = cases.arrays(case, batch=1, dtype="bfloat16")
    drawn["key"] *= cases.lengths(drawn["key"].shape[:3], 2)[..., None]
    drawn["dout"] *= cases.lengths(drawn["dout"].shape[:3], 3, seed=1)[..., None]
    drawn["query"][:, 5:9] = 0
    drawn["key"][:, 20:30] = 0
    drawn["log_decay"][:, 40] = -1000
    return drawn


@functools.cache
def both_passes(sizes):
    """Returns the output and gradients, and the calls of kernels: names, options, operands and plain results."""
    drawn, names, options, recorded = drawn_for(sizes), [], [], []

    def recording(name, function):
        def call(*arrays, **more):
            results = function(*arrays, **more)
            names.append(name)
            options.append(more)
            recorded.append((arrays, jax.tree.leaves(results)))
            return results

        return call

    @jax.jit
    def run(query, key, value, dout, log_decay):
        call = power_state.call_for(
            key, value, power=sizes.power, chunk=sizes.chunk, exact_window=sizes.exact_window
        )
        folds = jnp.arange(sizes.time)[None] < sizes.time - sizes.exact_window
        arguments = power_state.Arguments(query, key, value, log_decay, folds)
        (*means, _), saved = power_state.power_state_fwd(arguments, call=call)
        gradients, _ = power_state.power_state_vjp(arguments, means, saved, dout, call=call)
        return {"out": means[0].astype(value.dtype)} | gradients._asdict(), recorded

    with contextlib.ExitStack() as stack:
        stack.enter_context(plain.kernels(sizes.multiprocessors))
        stack.enter_context(plain_quartic.kernels(sizes.multiprocessors))
        for name, (module, _) in KERNELS[sizes.power].items():
            call = recording(name, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, call))
        arrays = [jnp.asarray(drawn[name], jnp.bfloat16) for name in ("query", "key", "value", "dout")]
        results, traced = jax.device_get(run(*arrays, jnp.asarray(drawn["log_decay"], jnp.float32)))
    return results, [(*call, *arrays) for *call, arrays in zip(names, options, traced, strict=True)]


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(sizes, marks=() if sizes == OFTEN[-2] else pytest.mark.slow) for sizes in OFTEN + RARE],
    ids=str,
)
def test_both_passes_are_the_formula(sizes):
    found, calls = both_passes(sizes)
    drawn, case = drawn_for(sizes), cases.Case(power=sizes.power)
    expected = suite.expected_for(drawn, case)
    options = {"form": "chunked", "power": sizes.power, "chunk_size": sizes.chunk}
    xla = suite.outputs_and_gradients(cases.cast(drawn, "bfloat16"), implementation="xla", **options)
    found, bound = (cases.errors(jax.device_get(x), expected, drawn) for x in (found, xla))
    interpreted.check(found, bound)
    missing = set(KERNELS[sizes.power]) - {name for name, *_ in calls}
    assert missing <= ({"add_arriving"} if sizes.multiprocessors == 1 else set())


@pytest.mark.interpret
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        pytest.param(sizes, name, marks=pytest.mark.slow if sizes in RARE else ())
        for sizes in OFTEN + RARE
        for name in KERNELS[sizes.power]
        if name != "add_arriving" or sizes.multiprocessors > 1
        # The same kernel at all sizes, interpreted for 10 minutes at this one.
        if name != "recurrence" or (sizes.power, sizes.head_dim) != (4, 32)
    ],
    ids=str,
)
def test_a_kernel_is_its_stand_in(sizes, name):
    rounding, interpret = float(jnp.finfo(jnp.float16).eps), plgpu.InterpretGPUParams(detect_races=True)
    calls = [call for call in both_passes(sizes)[1] if call[0] == name]
    assert calls
    for _, options, arrays, expected in calls:
        kernel = KERNELS[sizes.power][name][1]
        arrays = jax.tree.map(jnp.asarray, arrays)
        if "call" in options:
            options = options | {"call": dataclasses.replace(options["call"], interpret=interpret)}
        else:
            options = options | {"interpret": interpret}
        found = jax.tree.leaves(kernel(*arrays, **options))
        if name == "query_states":
            np.testing.assert_array_equal(kernel(*arrays, **options | {"with_remainder": False})[0], found[0])
            found, expected = (
                [out, np.add(out, rest, dtype=np.float32), d] for out, rest, d in (found, expected)
            )
        if name == "recurrence":
            found, expected = ([reshaping.unsplit(parts), last] for parts, last in (found, expected))
        usual = 2e-6 if name in FLOAT32 else rounding
        bounds = BOUNDS.get((sizes.power, name), [usual] * len(expected))
        for actual, wanted, bound in zip(found, expected, bounds, strict=True):
            assert (actual.shape, actual.dtype) == (wanted.shape, wanted.dtype)
            assert np.isfinite(np.asarray(actual, np.float32)).all()
            assert cases.error(actual, wanted) <= bound, name
