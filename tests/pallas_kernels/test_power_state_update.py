"""Tests of the update kernel, interpreted, against its definition in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_state
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state.square import layout as layouts
from pallas_kernels.power_state.square import update as kernels
from tests.ops import cases

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(120)]


def expected_states(key, value, carry, start, layout, chunk, segments):
    """Computes S <- carry * S + sum of phi(k) v^T over chunks.

    Returns the state before each, and the last one, [H, n, 16, E, P].
    """
    chunks = key.shape[-1] // chunk
    length = -(-chunks // segments)
    features = key[:, layout.indices].prod(3)
    states, finals = [], []
    for segment in range(segments):
        state = start if segment == 0 else np.zeros_like(start)
        for index in range(segment * length, min(chunks, (segment + 1) * length)):
            states.append(state)
            time = slice(index * chunk, (index + 1) * chunk)
            new = np.einsum("hjpt,het->hjep", features[..., time], value[..., time])
            state = carry[:, index, None, None, None] * state + new
        finals.append(state)
    return np.stack(states, 1), np.stack(finals, 1)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "segments", "dtype"),
    [
        (64, 64, 1, "float16"),
        (64, 64, 2, "bfloat16"),
        (32, 128, 1, "float16"),
        (32, 64, 1, "float32"),
        (128, 64, 1, "float16"),
    ],
)
def test_update(head_dim, value_dim, segments, dtype):
    layout, chunk, chunks = layouts.Layout(head_dim), 64, 2 if head_dim == 128 else 3
    operand, terms = configs.operands(jnp.dtype(dtype))
    random = np.random.default_rng(0)
    key = random.normal(size=(1, head_dim, chunk * chunks)).astype(operand)
    value = random.normal(size=(1, value_dim, chunk * chunks)).astype(operand)
    carry = random.uniform(0.5, 1, size=(1, chunks)).astype("float32")
    start = random.normal(size=(1, layouts.TILE, value_dim, layout.width)).astype("float32")
    config = power_state.choose(
        power=2,
        time=65_536,
        heads=8,
        head_dim=head_dim,
        value_dim=value_dim,
        chunk=chunk,
        exact_window=64,
        dtype=jnp.bfloat16,
        state_dtype=jnp.dtype(dtype),
    )
    run = jax.jit(
        functools.partial(
            kernels.update,
            layout=layout,
            config=dataclasses.replace(config, segments=segments),
            chunk=chunk,
            terms=terms,
            interpret=plgpu.InterpretGPUParams(detect_races=True),
        )
    )
    by_sections = np.swapaxes(start.reshape(*start.shape[:3], layout.sections, -1), 2, 3)
    states, final = run(key, value, carry, by_sections)
    expected, last = expected_states(
        *(x.astype("float64") for x in (key, value, carry, start)), layout, chunk, segments
    )
    assert states.dtype == operand
    states = np.asarray(states, "float64").reshape(*states.shape[:3], terms, value_dim, -1).sum(3)
    final = np.swapaxes(final, 3, 4).reshape(last.shape)
    # A product of a key and a value, and the state that is stored, are rounded once each.
    rounding = float(jnp.finfo(operand).eps)
    assert cases.error(states, expected) <= rounding
    assert cases.error(final, last) <= rounding
    # The initial state is only stored.
    assert cases.error(states[:, 0], start) <= (2**-22 if terms == 2 else rounding)
