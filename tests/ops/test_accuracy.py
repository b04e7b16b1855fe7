"""Measurements that justify the exact window and the exact decays: errors with and without them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from sympow_jax import ops
from sympow_jax.ops._shared import decay as decays
from tests.ops import cases


def test_features_lose_precision_that_the_window_keeps():
    """After strong gates few keys count, and sums over features cancel.

    The error is 1e-3 and worse in float32, 2e-6 with W = 64.
    """
    case = cases.Case(power=4, head_dim=16, time=200, decay="mixed")
    drawn = {name: x for name, x in cases.arrays(case).items() if name != "dout"}
    with jax.enable_x64(True):
        expected = np.asarray(ops.power_attention(**drawn, power=4, implementation="reference"))
    single = {name: None if x is None else jnp.asarray(x, jnp.float32) for name, x in drawn.items()}

    def error(**form):
        return cases.error(
            jax.jit(functools.partial(ops.power_attention, power=4, **form))(**single), expected
        )

    pure = error(implementation="reference", form="recurrent")
    exact = error(implementation="xla", form="chunked")
    assert pure >= 1e-3
    assert exact <= 2e-6


def test_a_running_sum_loses_precision_that_the_split_sum_keeps():
    """A float32 sum past -1e4 rounds later steps to 1e-3.

    The difference of split sums is right to rounding.
    """
    random = np.random.default_rng(0)
    steps = random.choice([-1e-4, -0.3, -1e4], size=192, p=[0.7, 0.25, 0.05]).astype(np.float32)
    exact = np.array(
        [[steps[j + 1 : i + 1].astype(np.float64).sum() for j in range(192)] for i in range(192)]
    )
    visible = np.tri(192, dtype=bool) & (exact > -87)

    running = np.cumsum(steps)
    naive = np.exp(np.where(visible, running[:, None] - running, 0))
    bounded = decays.bounded(jnp.asarray(steps), False)
    coarse, fine = decays.split(bounded)
    split = decays.exp((coarse[:, None] - coarse) + (fine[:, None] - fine))
    expected = np.exp(np.where(visible, exact, 0))
    assert cases.error(naive[visible], expected[visible]) >= 1e-4
    assert cases.error(np.asarray(split)[visible], expected[visible]) <= 2e-7


def test_memory_is_linear_in_time():
    """Neither form holds T x T scores.

    The backward pass of the chunked form holds no states or features.
    """

    def bytes_held(form, time):
        x = jax.ShapeDtypeStruct((1, time, 1, 32), jnp.float32)
        decay = jax.ShapeDtypeStruct((1, time, 1), jnp.float32)

        def loss(query, key, value, log_decay):
            return ops.power_attention(query, key, value, log_decay=log_decay, form=form).sum()

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(x, x, x, decay).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    for form in ("attention", "chunked"):
        short, long = bytes_held(form, 4096), bytes_held(form, 16_384)
        token = (long - short) / (16_384 - 4096)
        # In multiples of one token's query, key, value and output, 512 bytes.
        assert token <= 12 * 512, (form, token)
        assert short <= 4096 * 12 * 512 + 32 * 2**20, (form, short)


def test_chunked_form_gathers_no_features():
    x = jax.ShapeDtypeStruct((1, 512, 1, 32), jnp.float32)

    def loss(query, key, value):
        return ops.power_attention(query, key, value, form="chunked").sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile().as_text()
    assert "while(" in program
    assert " gather(" not in program
    assert " scatter(" not in program
