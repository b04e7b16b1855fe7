"""Tests of the gradient of keys and values at p = 2, interpreted, against plain JAX."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_state
from pallas_kernels.hopper import numerics
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state.square import key_vjp as kernels
from pallas_kernels.power_state.square import layout as layouts
from tests.ops import cases
from tests.pallas_kernels import plain, state_vjp

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(600)]

HEADS, GROUP, CHUNKS, CHUNK = 1, 2, 2, 128
# Most of it is the rounding of the bfloat16 result.
ERROR = 2.0**-9


class Sizes(NamedTuple):
    """Sizes of a case. `extra`: whether there are keys after the last query's chunk; dtype: that of states."""

    head_dim: int = 64
    value_dim: int = 64
    dtype: str = "float16"
    exact_window: int = 64
    extra: bool = True


def exponents(x):
    """Returns powers of two [H, Y] that bring the largest entry of each row into [1/2, 1)."""
    return numerics.exponent(jnp.abs(x.astype(jnp.float32)).max(-1))


def terms_of(x, dtype, terms):
    """Returns x [..., A, B] as the concatenation of `terms` arrays of that dtype, [..., terms A, B]."""
    parts = []
    for _ in range(terms):
        parts.append(x.astype(dtype))
        x = x - parts[-1].astype(x.dtype)
    return jnp.concatenate(parts, -2)


def frames(random, exact_window):
    """Returns decays as in the forward pass, and by keys.

    The latter are in the frames of their chunk and of the previous one, [H, Y, 2] each.
    """
    log_decay = -random.exponential(0.02, (HEADS, CHUNKS * CHUNK + exact_window)).astype("float32")
    seen = np.arange(CHUNKS)[:, None] * CHUNK + np.arange(exact_window + CHUNK)
    decay = np.stack(numerics.running_sums(jnp.asarray(log_decay)[:, seen], 150.0), -1)
    own, before = np.zeros((2, HEADS, CHUNKS + 1, CHUNK, 2), "float32")
    own[:, :CHUNKS] = decay[:, :, :CHUNK]
    before[:, 1:, :exact_window] = decay[:, :, CHUNK:]
    in_line = [x.reshape(HEADS, -1, 2) for x in (own, before)]
    return decay, *in_line


def in_blocks(vectors):
    """Stacks vectors [H, X] in blocks, [H, X / 64, their number, 64]."""
    stacked = jnp.stack([jnp.asarray(x, jnp.float32) for x in vectors], 1)
    return jnp.swapaxes(stacked.reshape(*stacked.shape[:2], -1, configs.BLOCK), 1, 2)


def draw(sizes, layout):
    """Draws arguments of the kernel by name, and decays of the forward pass."""
    random = np.random.default_rng(0)
    operand, terms = configs.operands(jnp.dtype(sizes.dtype))
    time, heads = CHUNKS * CHUNK, HEADS * GROUP
    padded = time + sizes.extra * CHUNK

    def normal(*shape, scale=1.0):
        return jnp.asarray((scale * random.normal(size=shape)).astype("float32"))

    key, value = (
        (normal(HEADS, padded, size) * 2.0 ** random.integers(-2, 3, (HEADS, padded, 1))).astype(jnp.bfloat16)
        for size in (sizes.head_dim, sizes.value_dim)
    )
    key_exponent, value_exponent = exponents(key), exponents(value)
    kappa = random.uniform(0.2, 1, (HEADS, padded)) * (random.uniform(size=(HEADS, padded)) < 0.9)
    kappa[:, time:] = 0
    norm = normal(HEADS, CHUNKS, sizes.head_dim, sizes.head_dim, scale=0.2)
    decay, own, before = frames(random, sizes.exact_window)
    rows = kernels.Rows(
        narrow_key=2.0**-key_exponent,
        narrow_value=2.0**-value_exponent,
        state_key=kappa * 2.0 ** (key_exponent + value_exponent),
        state_norm=2 * kappa,
        state_value=kappa * 2.0 ** (2 * key_exponent),
        coarse=own[:, :padded, 0],
        fine=own[:, :padded, 1],
        coarse_before=before[:, :padded, 0],
        fine_before=before[:, :padded, 1],
    )
    inverse = random.uniform(0, 2e-3, (heads, time)) * (random.uniform(size=(heads, time)) < 0.9)
    of_queries = decay[:, :, sizes.exact_window :].reshape(HEADS, time, 2).repeat(GROUP, 0)
    columns = kernels.Columns.of(
        inverse=inverse,
        delta=random.normal(size=(heads, time)),
        coarse=of_queries[..., 0],
        fine=of_queries[..., 1],
    )
    dual = normal(HEADS, CHUNKS, layouts.TILE, sizes.value_dim, layout.width, scale=1 / 32)
    arguments = {
        "key": key,
        "scalars": jnp.swapaxes(numerics.scaled(key, -key_exponent[..., None]), 1, 2).astype(operand),
        "value": value,
        "dual": terms_of(dual, operand, terms),
        "dual_norm": terms_of(norm + jnp.swapaxes(norm, 2, 3), jnp.bfloat16, 2),
        "query": normal(heads, time, sizes.head_dim).astype(jnp.bfloat16),
        "dout": normal(heads, time, sizes.value_dim).astype(jnp.bfloat16),
        "rows": in_blocks(rows),
        "columns": in_blocks(columns),
    }
    decay = jnp.moveaxis(jnp.asarray(decay), -1, 2)
    return arguments, decay.reshape(*decay.shape[:3], -1, configs.BLOCK)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(32, 64),
        Sizes(32, 128),
        Sizes(64, 64),
        Sizes(64, 64, extra=False),
        Sizes(64, 64, dtype="bfloat16"),
        Sizes(64, 64, dtype="float32"),
        Sizes(64, 64, exact_window=0, extra=False),
        pytest.param(Sizes(128, 128), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients(sizes):
    layout = layouts.Layout(sizes.head_dim)
    arguments, decay = draw(sizes, layout)
    options = {"layout": layout, "chunk": CHUNK, "exact_window": sizes.exact_window}
    config = power_state.choose(
        power=2,
        time=65_536,
        heads=8,
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        dtype=jnp.bfloat16,
        chunk=CHUNK,
        exact_window=sizes.exact_window,
        state_dtype=jnp.dtype(sizes.dtype),
    )
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    # The last tokens are padding.
    batch_time = HEADS, arguments["scalars"].shape[2] - sizes.exact_window - 30
    run = functools.partial(kernels.key_vjp, **options, config=config, interpret=interpret)
    dkey, dvalue, sums = jax.jit(functools.partial(run, batch_time=batch_time))(*arguments.values())
    known = {name: x for name, x in arguments.items() if name != "scalars"}
    expected = jax.jit(functools.partial(state_vjp.key_vjp, **options))(**known, decay=decay)
    assert dkey.dtype == dvalue.dtype == jnp.bfloat16
    wanted = [plain.as_arguments(x, batch_time, sizes.exact_window) for x in expected[:2]]
    assert cases.error(dkey, wanted[0]) <= ERROR
    assert cases.error(dvalue, wanted[1]) <= ERROR
    assert sums.dtype == jnp.float32
    assert cases.error(sums[:, 0], expected[2][:, 0]) <= 1e-5
    assert cases.error(sums[:, 1], expected[2][:, 1]) <= 5e-4
