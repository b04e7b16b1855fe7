"""Tests of rotary encodings against float64, over long documents and any split."""

import fractions
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax.ops import rotary
from tests.ops import cases
from tests.ops import exact_angles as rational

LONGEST = 65_536
SEGMENTS = np.repeat([[0, -1, 0, 1], [5, 5, 5, 6]], 75, 1)

learned_angles = jax.jit(rotary.learned_angles, static_argnames="head_dim")
rope_angles = jax.jit(rotary.rope_angles, static_argnames="head_dim")


def rates_in_turns(head_dim):
    return LONGEST ** (-2.0 * np.arange(head_dim // 2) / head_dim)


def random_rates(shape, seed=0):
    """Draws 1 + tanh(normal) in float64, so that many rates are not multiples of 2^-24."""
    normal = np.random.default_rng(seed).standard_normal(shape)
    return (1 + np.tanh(normal)).astype(np.float32)


def exact_angles(rate, head_dim, every=1):
    """Returns cumsum(beta) theta in float64, with whole turns removed before the factor of 2 pi."""
    reached = np.cumsum(rate.astype(np.float64), 1)[:, ::every]
    reached = reached if rate.ndim == 4 else reached[..., None]
    return 2 * np.pi * np.mod(reached * rates_in_turns(head_dim), 1)


def largest_error(angles, exact):
    angles = np.asarray(angles, np.float64)
    return max(np.abs(np.cos(angles) - np.cos(exact)).max(), np.abs(np.sin(angles) - np.sin(exact)).max())


@pytest.mark.parametrize("pairs", [(), (2,)])
def test_learned_angles_after_a_million_tokens(pairs):
    for rate in (random_rates((1, 2**20, 1, *pairs)), np.full((1, 2**20, 1, *pairs), 2, np.float32)):
        angles, state = learned_angles(rate, 4)
        exact = exact_angles(rate, 4, every=31)
        assert largest_error(angles[:, ::31], exact) < 1e-6
    # The fastest rates make the longest sum.
    assert (state.whole == 2**21).all()
    assert not state.fraction.any()


def test_positions_of_a_million_tokens():
    positions = np.arange(0, 2**20, 31)[None]
    exact = 2 * np.pi * np.mod(positions[..., None, None] * rates_in_turns(64), 1)
    assert largest_error(rope_angles(positions, 64), exact) < 1e-6
    exact = positions[..., None] * 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    encoded = np.asarray(rotary.sinusoidal(positions, 16), np.float64)
    assert np.abs(encoded[..., 0::2] - np.sin(exact)).max() < 1e-6
    assert np.abs(encoded[..., 1::2] - np.cos(exact)).max() < 1e-6


@pytest.mark.parametrize("theta", [None, rotary.rope_rates(16, base=10_000)], ids=["default", "base"])
def test_a_fixed_rate_of_one_is_rope_to_the_bit(theta):
    learned, _ = rotary.learned_angles(jnp.ones((2, 1000, 3)), 16, theta=theta)
    fixed = rotary.rope_angles(jnp.broadcast_to(jnp.arange(1, 1001), (2, 1000)), 16, theta=theta)
    np.testing.assert_array_equal(learned, jnp.broadcast_to(fixed, learned.shape))


@pytest.mark.parametrize("pairs", [(), (4,)])
def test_any_split_is_identical_to_the_bit(pairs):
    rate = random_rates((2, 300, 3, *pairs))

    def zeros():
        return rotary.RotaryState.zeros(2, 3, *pairs)

    @jax.jit
    def angles(rate, segment_ids, state):
        return rotary.learned_angles(rate, 8, segment_ids=segment_ids, initial_state=state)

    whole, end = angles(rate, SEGMENTS, zeros())
    for splits in ((100, 200),) if pairs else ((1,), (100, 200)):
        state, parts = zeros(), []
        for begin, stop in itertools.pairwise((0, *splits, 300)):
            part, state = angles(rate[:, begin:stop], SEGMENTS[:, begin:stop], state)
            parts.append(part)
        np.testing.assert_array_equal(jnp.concatenate(parts, 1), whole)
        jax.tree.map(np.testing.assert_array_equal, state, end)


@pytest.mark.parametrize("pairs", [(), (4,)])
def test_documents_restart_and_padding_does_not_rotate(pairs):
    rate = random_rates((1, 9, 2, *pairs))
    segment_ids = jnp.array([[3, 3, -1, -1, 3, 1, 1, 3, 3]])
    angles, _ = learned_angles(rate, 8, segment_ids=segment_ids)
    for tokens in ([0, 1, 4], [5, 6], [7, 8]):  # the second 3 is another document
        assert largest_error(angles[:, np.array(tokens)], exact_angles(rate[:, tokens], 8)) < 1e-6


@pytest.mark.parametrize("pairs", [(), (4,)])
def test_a_rate_that_is_not_finite_gives_nan(pairs):
    rate = random_rates((1, 9, 2, *pairs))
    for number in (np.nan, np.inf):
        bad = rate.copy()
        bad[0, 2, 1] = number
        nan = np.isnan(learned_angles(bad, 8)[0])
        assert nan[0, 2, 1].all()
        assert nan.sum() == nan[0, 2, 1].size


def test_bfloat16_is_rotated_in_float32():
    x = jax.random.normal(jax.random.key(0), (1, 50, 2, 8), jnp.bfloat16)
    angles = rope_angles(jnp.arange(50)[None], 8)
    assert angles.dtype == jnp.float32
    turned = rotary.rotate(x, angles)
    assert turned.dtype == jnp.bfloat16
    expected = rotary.rotate(x.astype(jnp.float32), angles).astype(jnp.bfloat16)
    np.testing.assert_array_equal(turned, expected)


@pytest.mark.parametrize("pairs", [(), (4,)])
def test_gradient_is_that_of_the_unrounded_sum(pairs):
    rate = random_rates((2, 33, 2, *pairs))
    segment_ids = np.array([[0] * 10 + [-1] * 4 + [0] * 3 + [2] * 16, [1] * 33])
    x = np.random.default_rng(1).standard_normal((2, 33, 4, 8))
    weight = np.random.default_rng(2).standard_normal(x.shape)

    def loss(rate, x):
        angles, _ = rotary.learned_angles(rate, 8, segment_ids=jnp.asarray(segment_ids))
        return (rotary.rotate(x, angles) * weight.astype(np.float32)).sum()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(rate, x.astype(np.float32))

    def exact_loss(rate, x):
        document = np.array([[0] * 17 + [1] * 16, [0] * 33])
        seen = np.tril(document[:, :, None] == document[:, None, :]) & (segment_ids >= 0)[:, None, :]
        mu = jnp.einsum("bts,bs...->bt...", seen.astype(np.float64), rate)
        mu = mu if pairs else mu[..., None]
        turn = jnp.exp(1j * jnp.repeat(2 * np.pi * mu * rates_in_turns(8), 2, axis=2))
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
        return (jnp.stack([turned.real, turned.imag], -1).reshape(x.shape) * weight).sum()

    with jax.enable_x64(True):
        gradient_of = jax.jit(jax.grad(exact_loss, argnums=(0, 1)))
        exact = jax.device_get(gradient_of(jnp.asarray(rate, jnp.float64), jnp.asarray(x)))
    for gradient, expected in zip(gradients, exact, strict=True):
        assert cases.error(gradient, expected) < 1e-6
    assert not gradients[0][0, 10:14].any()  # padding


def test_float32_angles_are_the_same_with_x64():
    rate, positions = random_rates((1, 20, 1)), np.arange(20)[None]
    expected, fixed = learned_angles(rate, 8)[0], rope_angles(positions, 8)
    with jax.enable_x64(True):
        angles, state = learned_angles(rate, 8)
        assert (state.whole.dtype, state.fraction.dtype, angles.dtype) == (jnp.int32, jnp.uint32, jnp.float32)
        np.testing.assert_array_equal(angles, expected)
        np.testing.assert_array_equal(rope_angles(positions, 8), fixed)


@pytest.mark.parametrize("split", [None, 1000])
def test_learned_angles_of_float64_rates(split):
    rate = 1 + np.tanh(np.random.default_rng(0).standard_normal((1, 2**14, 1)))
    with jax.enable_x64(True):
        if split is None:
            angles, state = learned_angles(rate, 8)
        else:
            # Of the float32 kind, as a layer makes it.
            first, state = learned_angles(rate[:, :split], 8, initial_state=rotary.RotaryState.zeros(1, 1))
            rest, state = learned_angles(rate[:, split:], 8, initial_state=state)
            angles = jnp.concatenate([first, rest], 1)
        assert (state.fraction.dtype, angles.dtype) == (jnp.uint64, jnp.float64)
    reached = list(itertools.accumulate(map(fractions.Fraction, rate.ravel().tolist())))[::97]
    turn = 2 * rational.PI
    turns = [
        [position * fractions.Fraction(theta) / turn for theta in rotary.rope_rates(8).tolist()]
        for position in reached
    ]
    exact = np.array([[float((x - round(x)) * turn) for x in row] for row in turns])
    assert rational.largest_difference(angles[0, ::97, 0], exact) < 1e-14


def test_gradient_of_float64_rates():
    rate = 1 + np.tanh(np.random.default_rng(0).standard_normal((1, 9, 2)))
    weight = np.random.default_rng(1).standard_normal((1, 9, 2, 4))

    def loss(rate):
        return (rotary.learned_angles(rate, 8)[0] * weight).sum()

    with jax.enable_x64(True):
        gradient = np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(rate)))
    expected = np.cumsum((weight * rotary.rope_rates(8)).sum(-1)[:, ::-1], 1)[:, ::-1]
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


LLAMA3 = {"factor": 32.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_length": 8192}


def test_llama3_scales_by_wavelength():
    """Compares with the published formula, which is in wavelengths and has three cases."""
    theta = rotary.rope_rates(128, base=500_000)
    np.testing.assert_allclose(theta, 500_000.0 ** (-np.arange(0, 128, 2) / 128), rtol=1e-15)
    wavelength = 2 * np.pi / theta
    smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
    kept, divided = wavelength < 8192 / 4.0, wavelength > 8192 / 1.0
    assert kept.any()
    assert divided.any()
    assert not (kept | divided).all()
    between = (1 - smooth) * theta / 32.0 + smooth * theta
    expected = np.where(kept, theta, np.where(divided, theta / 32.0, between))
    np.testing.assert_allclose(rotary.llama3_rates(theta, **LLAMA3), expected, rtol=1e-14)


LLAMA = rotary.llama3_rates(rotary.rope_rates(8, base=500_000), **LLAMA3)


@pytest.mark.parametrize(("theta", "layout"), [(None, "pairs"), (LLAMA, "pairs"), (LLAMA, "halves")])
def test_rope_of_any_rates_and_layout(theta, layout):
    """Compares with complex numbers in float64, at positions where float32 products would be wrong."""
    positions = np.array([0, 1, 77, 2**20 + 77], np.int32)
    exact = rational.angles(positions, rotary.rope_rates(8) if theta is None else theta)
    x = np.random.default_rng(0).standard_normal((1, 4, 3, 8))

    def as_complex(x):
        return x[..., 0::2] + 1j * x[..., 1::2] if layout == "pairs" else x[..., :4] + 1j * x[..., 4:]

    expected = as_complex(x) * np.exp(1j * exact)[:, None]
    with jax.enable_x64(True):
        rotated = np.asarray(rotary.rope(x, positions[None], theta=theta, layout=layout))
    assert rotated.dtype == np.float64
    np.testing.assert_allclose(as_complex(rotated), expected, atol=1e-14)
    single = rotary.rope(x.astype(np.float32), positions[None], theta=theta, layout=layout)
    np.testing.assert_allclose(as_complex(np.asarray(single)), expected, atol=2e-6)
