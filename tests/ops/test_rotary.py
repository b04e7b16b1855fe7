"""Tests of rotary encodings against float64, over long documents and any split."""

import fractions
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax.ops import rotary
from tests.ops import exact_angles as rational

LONGEST = 65_536

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
    reached = np.cumsum(rate.astype(np.float64), 1)[:, ::every, :, None]
    return 2 * np.pi * np.mod(reached * rates_in_turns(head_dim), 1)


def largest_error(angles, exact):
    angles = np.asarray(angles, np.float64)
    return max(np.abs(np.cos(angles) - np.cos(exact)).max(), np.abs(np.sin(angles) - np.sin(exact)).max())


@pytest.mark.parametrize("head_dim", [2, 32])
def test_learned_angles_after_a_million_tokens(head_dim):
    rate = random_rates((1, 2**20, 1))
    angles, _ = learned_angles(rate, head_dim)
    exact = exact_angles(rate, head_dim, every=31)
    assert largest_error(angles[:, ::31], exact) < 1e-6
    # This is why integers are used: the same sum in float32 has lost the angle.
    plain = np.cumsum(rate, 1, dtype=np.float32)[:, ::31, :, None] * np.float32(
        2 * np.pi * rates_in_turns(head_dim)
    )
    assert largest_error(plain, exact) > 0.1


def test_fastest_rates_after_a_million_tokens():
    rate = np.full((1, 2**20, 1), 2, np.float32)
    angles, state = learned_angles(rate, 8)
    assert largest_error(angles[:, ::31], exact_angles(rate, 8, every=31)) < 1e-6
    assert (state.whole[0, 0], state.fraction[0, 0]) == (2**21, 0)


def test_rope_after_a_million_tokens():
    positions = np.arange(0, 2**20, 31)[None]
    exact = 2 * np.pi * np.mod(positions[..., None, None] * rates_in_turns(64), 1)
    assert largest_error(rope_angles(positions, 64), exact) < 1e-6


def test_sinusoidal_after_a_million_tokens():
    positions = np.arange(2**20)[None, ::1000]
    rates = 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    exact = positions[..., None] * rates
    encoded = np.asarray(rotary.sinusoidal(positions, 16), np.float64)
    assert np.abs(encoded[..., 0::2] - np.sin(exact)).max() < 1e-6
    assert np.abs(encoded[..., 1::2] - np.cos(exact)).max() < 1e-6


def test_a_fixed_rate_of_one_is_rope_to_the_bit():
    learned, _ = learned_angles(jnp.ones((2, 1000, 3)), 16)
    fixed = rope_angles(jnp.broadcast_to(jnp.arange(1, 1001), (2, 1000)), 16)
    np.testing.assert_array_equal(learned, jnp.broadcast_to(fixed, learned.shape))


def test_any_split_is_identical_to_the_bit():
    rate = random_rates((2, 300, 3))
    segment_ids = np.array([[0] * 100 + [-1] * 20 + [0] * 30 + [1] * 150, [5] * 299 + [6]], np.int32)

    @jax.jit
    def angles(rate, segment_ids, state):
        return rotary.learned_angles(rate, 8, segment_ids=segment_ids, initial_state=state)

    whole, end = angles(rate, segment_ids, rotary.RotaryState.zeros(2, 3))
    for splits in ((1,), (110, 150)):
        state, parts = rotary.RotaryState.zeros(2, 3), []
        for start, stop in zip((0, *splits), (*splits, 300), strict=True):
            part, state = angles(rate[:, start:stop], segment_ids[:, start:stop], state)
            parts.append(part)
        np.testing.assert_array_equal(jnp.concatenate(parts, 1), whole)
        jax.tree.map(np.testing.assert_array_equal, state, end)


def test_documents_restart_and_padding_does_not_rotate():
    rate = random_rates((1, 9, 2))
    segment_ids = jnp.array([[3, 3, -1, -1, 3, 1, 1, 3, 3]])
    angles, _ = learned_angles(rate, 8, segment_ids=segment_ids)
    for tokens in ([0, 1, 4], [5, 6], [7, 8]):  # the second 3 is another document
        assert largest_error(angles[:, np.array(tokens)], exact_angles(rate[:, tokens], 8)) < 1e-6


def test_equal_rates_of_pairs_are_rates_of_heads_to_the_bit():
    rate = random_rates((2, 300, 3))
    segment_ids = np.repeat([[0, -1, 0, 1], [5, 5, 5, 6]], 75, 1)
    by_pair = np.repeat(rate[..., None], 4, -1)
    angles, end = learned_angles(rate, 8, segment_ids=segment_ids)
    actual, end_of_pairs = learned_angles(by_pair, 8, segment_ids=segment_ids)
    np.testing.assert_array_equal(actual, angles)
    for name in ("whole", "fraction"):
        np.testing.assert_array_equal(
            getattr(end_of_pairs, name), np.repeat(getattr(end, name)[..., None], 4, -1)
        )


def test_rates_of_pairs_after_a_million_tokens():
    rate = random_rates((1, 2**20, 1, 2))
    angles, _ = learned_angles(rate, 4)
    reached = np.cumsum(rate.astype(np.float64), 1)[:, ::31]
    assert largest_error(angles[:, ::31], 2 * np.pi * np.mod(reached * rates_in_turns(4), 1)) < 1e-6


def test_a_split_of_pairs_is_identical_to_the_bit():
    rate = random_rates((2, 200, 3, 4))
    segment_ids = np.repeat([[0, -1, 0, 1], [5, 5, 5, 6]], 50, 1)
    parts, state = [], rotary.RotaryState.zeros(2, 3, pairs=4)
    for begin in (0, 100):
        own = slice(begin, begin + 100)
        part, state = learned_angles(rate[:, own], 8, segment_ids=segment_ids[:, own], initial_state=state)
        parts.append(part)
    whole, end = learned_angles(rate, 8, segment_ids=segment_ids)
    np.testing.assert_array_equal(jnp.concatenate(parts, 1), whole)
    jax.tree.map(np.testing.assert_array_equal, state, end)


def test_documents_restart_for_each_pair():
    rate = random_rates((1, 9, 2, 4))
    segment_ids = jnp.array([[3, 3, -1, -1, 3, 1, 1, 3, 3]])
    angles, _ = learned_angles(rate, 8, segment_ids=segment_ids)
    for tokens in ([0, 1, 4], [5, 6], [7, 8]):
        reached = np.cumsum(rate[:, tokens].astype(np.float64), 1)
        exact = 2 * np.pi * np.mod(reached * rates_in_turns(8), 1)
        assert largest_error(angles[:, np.array(tokens)], exact) < 1e-6


def test_rotates_pairs_of_dimensions():
    x = jnp.array([1.0, 0.0, 0.0, 2.0]).reshape(1, 1, 1, 4)
    turned = rotary.rotate(x, jnp.array([0.3, 0.5]).reshape(1, 1, 1, 2))
    expected = [np.cos(0.3), np.sin(0.3), -2 * np.sin(0.5), 2 * np.cos(0.5)]
    np.testing.assert_allclose(turned.ravel(), expected, rtol=1e-6)


def test_scores_depend_on_the_distance_only():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 2, 16))

    def score(i, j):
        at = lambda x, position: rotary.rope(x, jnp.array([[position]]))  # noqa: E731
        return (at(query, i) * at(key, j)).sum(-1)

    np.testing.assert_allclose(score(1007, 1000), score(7, 0), rtol=1e-5)
    assert np.abs(score(8, 0) - score(7, 0)).max() > 0.1


def test_groups_share_the_angles_of_their_key():
    x = jax.random.normal(jax.random.key(0), (1, 5, 4, 8))
    angles, _ = learned_angles(random_rates((1, 5, 2)), 8)
    np.testing.assert_array_equal(rotary.rotate(x, angles), rotary.rotate(x, jnp.repeat(angles, 2, axis=2)))


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
        angles = jnp.repeat(2 * np.pi * mu * rates_in_turns(8), 2, axis=2)
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = [
            even * jnp.cos(angles) - odd * jnp.sin(angles),
            even * jnp.sin(angles) + odd * jnp.cos(angles),
        ]
        return (jnp.stack(turned, -1).reshape(x.shape) * weight).sum()

    with jax.enable_x64(True):
        gradient_of = jax.jit(jax.grad(exact_loss, argnums=(0, 1)))
        exact = jax.device_get(gradient_of(jnp.asarray(rate, jnp.float64), jnp.asarray(x)))
    for gradient, expected in zip(gradients, exact, strict=True):
        error = np.asarray(gradient, np.float64) - np.asarray(expected)
        assert np.sqrt((error**2).mean() / (expected**2).mean()) < 1e-6
    assert not gradients[0][0, 10:14].any()  # padding


def test_float32_angles_are_the_same_with_x64():
    rate = random_rates((1, 20, 1))
    expected, _ = learned_angles(rate, 8)
    fixed = rope_angles(np.arange(20)[None], 8)
    with jax.enable_x64(True):
        angles, state = learned_angles(rate, 8)
        assert (state.whole.dtype, state.fraction.dtype, angles.dtype) == (jnp.int32, jnp.uint32, jnp.float32)
        np.testing.assert_array_equal(angles, expected)
        np.testing.assert_array_equal(rope_angles(np.arange(20)[None], 8), fixed)


def rational_angles(reached, head_dim):
    """Returns the angles, in [-pi, pi], at positions that are fractions, in rational arithmetic, [positions, D/2]."""
    turn = 2 * rational.PI
    turns = [
        [position * fractions.Fraction(rate) / turn for rate in rotary.rope_rates(head_dim).tolist()]
        for position in reached
    ]
    return np.array([[float((x - round(x)) * turn) for x in row] for row in turns])


@pytest.mark.parametrize("split", [None, 1000])
def test_learned_angles_of_float64_rates(split):
    rate = 1 + np.tanh(np.random.default_rng(0).standard_normal((1, 2**14, 1)))
    reached = list(itertools.accumulate(map(fractions.Fraction, rate.ravel().tolist())))
    with jax.enable_x64(True):
        if split is None:
            angles, state = learned_angles(rate, 8)
        else:
            # Of the float32 kind, as a layer makes it.
            first, state = learned_angles(rate[:, :split], 8, initial_state=rotary.RotaryState.zeros(1, 1))
            rest, state = learned_angles(rate[:, split:], 8, initial_state=state)
            angles = jnp.concatenate([first, rest], 1)
        assert (state.fraction.dtype, angles.dtype) == (jnp.uint64, jnp.float64)
    exact = rational_angles(reached[::97], 8)
    assert rational.largest_difference(angles[0, ::97, 0], exact) < 1e-14


def test_rope_of_float64_vectors():
    positions = np.array([0, 1, 77, 2**20 + 77], np.int32)
    x = np.random.default_rng(0).standard_normal((1, 4, 1, 8))
    exact = rational_angles(positions.tolist(), 8)
    with jax.enable_x64(True):
        rotated = np.asarray(jax.jit(rotary.rope)(x, positions[None]))
    assert rotated.dtype == np.float64
    expected = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * exact)[:, None]
    np.testing.assert_allclose(rotated[..., 0::2] + 1j * rotated[..., 1::2], expected, atol=1e-14)


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


def test_rates_with_a_base():
    expected = 500_000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(rotary.rope_rates(64, base=500_000), expected, rtol=1e-15)
    with pytest.raises(ValueError, match=r"base is 1; it must be a finite number above 1"):
        rotary.rope_rates(64, base=1)


def test_llama3_scales_by_wavelength():
    """Compares with the published formula, which is in wavelengths and has three cases."""
    theta = rotary.rope_rates(128, base=500_000)
    expected, cases = [], set()
    for rate in theta:
        wavelength = 2 * np.pi / rate
        if wavelength < 8192 / 4.0:
            expected.append(rate)
            cases.add("kept")
        elif wavelength > 8192 / 1.0:
            expected.append(rate / 32.0)
            cases.add("divided")
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * rate / 32.0 + smooth * rate)
            cases.add("between")
    assert len(cases) == 3
    np.testing.assert_allclose(rotary.llama3_rates(theta, **LLAMA3), expected, rtol=1e-14)


@pytest.mark.parametrize("layout", rotary.LAYOUTS)
def test_rates_and_layout_of_llama(layout):
    """Compares with complex numbers in float64, at positions where float32 products would be wrong."""
    positions = np.array([0, 1, 77, 2**20 + 77], np.int32)
    theta = rotary.llama3_rates(rotary.rope_rates(8, base=500_000), **LLAMA3)
    exact = rational.angles(positions, theta)
    x = np.random.default_rng(0).standard_normal((1, 4, 3, 8))

    def as_complex(x):
        return x[..., 0::2] + 1j * x[..., 1::2] if layout == "pairs" else x[..., :4] + 1j * x[..., 4:]

    expected = as_complex(x) * np.exp(1j * exact)[:, None]
    with jax.enable_x64(True):
        rotated = np.asarray(rotary.rope(x, positions[None], theta=theta, layout=layout))
    np.testing.assert_allclose(as_complex(rotated), expected, atol=1e-14)
    single = rotary.rope(x.astype(np.float32), positions[None], theta=theta, layout=layout)
    np.testing.assert_allclose(as_complex(np.asarray(single)), expected, atol=2e-6)


def test_learned_rates_of_one_are_rope_with_a_base_to_the_bit():
    theta = rotary.rope_rates(16, base=10_000)
    learned, _ = rotary.learned_angles(jnp.ones((2, 1000, 3)), 16, theta=theta)
    fixed = rotary.rope_angles(jnp.broadcast_to(jnp.arange(1, 1001), (2, 1000)), 16, theta=theta)
    np.testing.assert_array_equal(learned, jnp.broadcast_to(fixed, learned.shape))


@pytest.mark.parametrize("theta", [[1.0, 0.1], [1.0, 0.1, 0.01, 7.0], [1.0, 0.1, 0.01, np.nan]])
def test_rates_that_do_not_fit_are_an_error(theta):
    with pytest.raises(ValueError, match=r"it must be 4 rates from 0 to 2 pi; make it with rope_rates\(8\)"):
        rotary.learned_angles(jnp.ones((1, 2, 3)), 8, theta=np.array(theta))


def test_an_unknown_layout_is_an_error():
    with pytest.raises(ValueError, match="layout is 'thirds'; it must be one of 'pairs', 'halves'"):
        rotary.rotate(jnp.ones((1, 2, 1, 8)), jnp.zeros((1, 2, 1, 4)), layout="thirds")


def test_an_odd_head_size_is_an_error():
    with pytest.raises(ValueError, match="head size is 7; it must be even"):
        rotary.rope(jnp.ones((1, 2, 1, 7)), jnp.zeros((1, 2), jnp.int32))


def test_rates_of_other_shapes_are_an_error():
    with pytest.raises(ValueError, match=r"\(1, 2, 3, 5\); it must be \[B, T, K\].* or \[B, T, K, 4\]"):
        rotary.learned_angles(jnp.ones((1, 2, 3, 5)), 8)
    with pytest.raises(
        ValueError, match=r"positions \(1, 3\); make the state with RotaryState.zeros\(1, 3, 4\)"
    ):
        rotary.learned_angles(jnp.ones((1, 2, 3, 4)), 8, initial_state=rotary.RotaryState.zeros(1, 3))
