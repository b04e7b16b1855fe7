"""Tests of the op by its kernels on a Hopper GPU, at real sizes: `pytest -m gpu`."""

import dataclasses
import functools
import itertools
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from sympow_jax.ops import target
from tests.ops import cases

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

RUNS = 10
# The shortest first, so that the first failure is the simplest.
ATTENTION = [
    cases.Case(
        power=power, head_dim=size, value_dim=size, time=time, segments="padded", decay="gentle", group=2
    )
    for power, size, time in ((4, 16, 777), (2, 128, 1025), (6, 32, 1500), (4, 64, 2000), (2, 64, 4096))
]
CHUNKED = [
    cases.Case(head_dim=48, time=3000),
    *(
        cases.Case(
            power=power, head_dim=size, value_dim=size, time=time, segments="padded", decay="gentle", group=2
        )
        for power, size, time in ((2, 128, 3001), (4, 16, 4096), (2, 32, 5000), (4, 32, 5000), (2, 64, 8192))
    ),
    cases.Case(head_dim=64, value_dim=64, time=20_000, decay="none"),
]


@pytest.fixture(autouse=True)
def _needs_a_hopper_gpu():
    if not target.is_hopper():
        pytest.fail(f"pytest -m gpu needs a Hopper GPU, not {jax.devices()[0].device_kind}")


def drawn(case, seed, dtype):
    """Draws arguments of the op, the same values in any dtype."""
    arrays = cases.arrays(case, kv_heads=2, seed=seed, dtype="bfloat16")
    del arrays["dout"]
    return {
        name: x if x is None or x.dtype == np.int32 else jnp.asarray(x, dtype if x.ndim == 4 else jnp.float32)
        for name, x in arrays.items()
    }


def poison():
    """Fills the memory of future results with NaN, so that elements that a kernel does not write are detected."""
    blocks = [jnp.full((2**n, 2**20), jnp.nan, jnp.float32) for n in range(9)]
    jax.block_until_ready(blocks)
    for block in blocks:
        block.delete()


def identical_runs(f, arrays):
    """Returns the result of f, which must be bitwise identical in every run."""
    results = []
    for _ in range(RUNS):
        poison()
        results.append(jax.device_get(f(arrays)))
    for result in results:
        jax.tree.map(np.testing.assert_array_equal, result, results[0])
    return results[0]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("form", "case"), [("attention", c) for c in ATTENTION] + [("chunked", c) for c in CHUNKED], ids=str
)
def test_outputs(form, case, seed):
    """At most a fifth less exact than the xla form in bfloat16, both compared with the xla form in float32."""

    def call(arrays, implementation):
        return ops.power_attention(**arrays, power=case.power, form=form, implementation=implementation)

    plain = jax.jit(functools.partial(call, implementation="xla"))
    expected = plain(drawn(case, seed, jnp.float32))
    short = drawn(case, seed, jnp.bfloat16)
    out = identical_runs(jax.jit(functools.partial(call, implementation="mosaic_gpu")), short)
    assert cases.error(out, expected) <= 1.2 * cases.error(plain(short), expected)


@pytest.mark.parametrize(
    ("form", "case"),
    [("attention", dataclasses.replace(c, time=min(c.time, 2048))) for c in ATTENTION]
    + [("chunked", dataclasses.replace(c, time=min(c.time, 2048))) for c in CHUNKED],
    ids=str,
)
def test_gradients(form, case):
    """Finite, identical in every run, and at most a fifth less exact than those of plain JAX."""
    dout = jnp.asarray(cases.arrays(case, kv_heads=2, dtype="bfloat16")["dout"], jnp.bfloat16)

    def loss(arrays, implementation):
        out = ops.power_attention(
            **arrays, segment_ids=segment_ids, power=case.power, form=form, implementation=implementation
        )
        return (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum()

    def gradients(implementation):
        return jax.jit(jax.grad(functools.partial(loss, implementation=implementation)))

    full, short = (drawn(case, 0, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    segment_ids = full.pop("segment_ids")
    del short["segment_ids"]
    full, short = ({name: x for name, x in arrays.items() if x is not None} for arrays in (full, short))
    expected, plain = gradients("xla")(full), gradients("xla")(short)
    actual = identical_runs(gradients("mosaic_gpu"), short)
    for name, gradient in actual.items():
        bound = 1.2 * cases.error(plain[name], expected[name])
        # The gradient of the decays is float32; operands of the kernels have 11 bits.
        bound = max(bound, 2.0**-11) if name == "log_decay" else bound
        assert cases.error(gradient, expected[name]) <= bound, name


def test_gradients_of_a_sequence_in_parts():
    """The gradient through the states of four calls equals that of one call, within rounding."""
    case = cases.Case(head_dim=64, value_dim=64, time=3000, decay="gentle", group=2)
    arrays = {name: x for name, x in drawn(case, 0, jnp.bfloat16).items() if x is not None}
    fixed = {"form": "chunked", "implementation": "mosaic_gpu", "return_state": True}

    def loss(arrays, cuts):
        total, state = 0.0, None
        for begin, end in itertools.pairwise(cuts):
            part = {name: x[:, begin:end] for name, x in arrays.items()}
            out, state = ops.power_attention(**part, **fixed, initial_state=state)
            total += jnp.square(out.astype(jnp.float32)).sum()
        return total

    gradients = jax.jit(jax.grad(loss), static_argnums=1)
    expected, actual = (gradients(arrays, cuts) for cuts in ((0, 3000), (0, 1000, 1001, 2500, 3000)))
    for name, gradient in actual.items():
        assert cases.error(gradient, expected[name]) <= float(jnp.finfo(jnp.bfloat16).eps), name


def test_a_sequence_in_parts():
    """With the kernels' states, the outputs of four calls equal those of one, within rounding."""
    case = cases.Case(head_dim=64, value_dim=64, time=4096, segments="padded", decay="gentle", group=2)
    arrays = drawn(case, 0, jnp.bfloat16)
    fixed = {"form": "chunked", "implementation": "mosaic_gpu", "return_state": True}
    call = jax.jit(functools.partial(ops.power_attention, **fixed))
    (whole, _), state, parts = call(**arrays), None, []
    for begin, end in ((0, 1000), (1000, 1001), (1001, 3000), (3000, 4096)):
        part = {name: x[:, begin:end] for name, x in arrays.items()}
        out, state = call(**part, initial_state=state)
        parts.append(out)
    assert cases.error(jnp.concatenate(parts, 1), whole) <= float(jnp.finfo(jnp.bfloat16).eps)


@pytest.mark.parametrize("form", ["attention", "chunked"])
def test_under_compute_sanitizer(form):
    """No kernel reads or writes out of bounds."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    program = (
        "import jax, jax.numpy as jnp; from sympow_jax import ops; x = jnp.ones((1, 300, 2, 64), jnp.bfloat16); "
        f"fixed = {{'form': {form!r}, 'implementation': 'mosaic_gpu'}}; "
        "print(jax.grad(lambda x: ops.power_attention(x, x, x, **fixed).astype(jnp.float32).sum())(x).sum())"
    )
    done = subprocess.run(
        [sanitizer, "--error-exitcode", "1", "--require-cuda-init=no", sys.executable, "-c", program],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("form", ["attention", "chunked"])
def test_gradients_of_arguments_rounded_in_the_same_program(form):
    """XLA keeps the rounding: many first tokens attend to themselves alone, some with scores close to zero."""
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (64, 256, 12, 64)) for key in keys]
    dout = arrays.pop()

    def narrow(x):
        return jnp.sin(x).astype(jnp.bfloat16)

    def loss(query, key, value):
        out = ops.power_attention(query, key, value, power=2, form=form, implementation="mosaic_gpu")
        return (out.astype(jnp.float32) * dout).sum()

    found = jax.jit(jax.grad(lambda *x: loss(*map(narrow, x)), (0, 1, 2)))(*arrays)
    short = jax.jit(lambda x: [narrow(y) for y in x])(arrays)
    apart = jax.jit(jax.grad(loss, (0, 1, 2)))(*short)
    for x, gradient, expected in zip(arrays, found, apart):
        expected = expected.astype(jnp.float32) * jnp.cos(x)
        assert bool(jnp.isfinite(gradient).all())
        assert float(jnp.linalg.norm(gradient - expected) / jnp.linalg.norm(expected)) < 1e-2
