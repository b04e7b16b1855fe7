"""Tests of the feature maps, and of the papers' propositions about them."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from sympow_jax.ops import feature_maps
from sympow_jax.ops._recurrent import features

SIZES = [(1, 2), (2, 4), (3, 3), (5, 2), (5, 4), (4, 6), (9, 5)]


@pytest.mark.parametrize(("head_dim", "power"), SIZES)
def test_symmetric_power_is_the_definition(head_dim, power):
    """Non-decreasing indices in lexicographic order, each times the root of its multinomial count."""
    x = np.random.default_rng(0).normal(size=head_dim)
    expected = []
    for index in itertools.combinations_with_replacement(range(head_dim), power):
        counts = [index.count(d) for d in range(head_dim)]
        multinomial = math.factorial(power) // math.prod(map(math.factorial, counts))
        expected.append(math.sqrt(multinomial) * math.prod(x[list(index)]))
    with jax.enable_x64(True):
        actual = ops.symmetric_power(jnp.asarray(x), power)
    np.testing.assert_allclose(actual, expected, rtol=1e-13)
    assert len(actual) == ops.symmetric_power_dim(head_dim, power)


@pytest.mark.parametrize("feature_map", [ops.tensor_power, ops.symmetric_power])
@pytest.mark.parametrize(("head_dim", "power"), SIZES)
def test_feature_products_are_powers(feature_map, head_dim, power):
    """phi(q) . phi(k) = (q . k)^p ("Symmetric Power Transformers", result 1 and section 4.2)."""
    query, key = np.random.default_rng(1).normal(size=(2, 3, head_dim))
    with jax.enable_x64(True):
        products = (feature_map(jnp.asarray(query), power) * feature_map(jnp.asarray(key), power)).sum(-1)
    np.testing.assert_allclose(products, ((query * key).sum(-1)) ** power, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("head_dim", "power"), [(2, 2), (4, 2), (4, 3), (4, 4)])
def test_proposition_2_rotating_vectors_rotates_features(head_dim, power):
    """For a rotation P there is a rotation P' of features with phi(P k) = P' phi(k)."""
    random = np.random.default_rng(2)
    rotation, _ = np.linalg.qr(random.normal(size=(head_dim, head_dim)))
    rotation[0] *= np.sign(np.linalg.det(rotation))
    key = random.normal(size=head_dim)
    with jax.enable_x64(True):
        induced = np.asarray(ops.symmetric_power_rotation(jnp.asarray(rotation), power))
        rotated = ops.symmetric_power(jnp.asarray(rotation @ key), power)
        np.testing.assert_allclose(
            induced @ ops.symmetric_power(jnp.asarray(key), power), rotated, atol=1e-12
        )
    np.testing.assert_allclose(induced @ induced.T, np.eye(len(induced)), atol=1e-12)
    assert np.linalg.det(induced) == pytest.approx(1)


def test_equation_3_rotating_the_state_is_equation_2():
    """S (gamma R') + V phi(K)^T read with phi(Q) equals the result of rotated keys and queries.

    (Kumar et al., equations 2 and 3.)
    """
    random = np.random.default_rng(3)
    time, head_dim, power = 12, 4, 2
    query, key, value = random.normal(size=(3, time, head_dim))
    gamma, angle = random.uniform(0.5, 1, time), random.uniform(0, 2, time)
    rates = np.array([1.0, 0.1])

    def rotation(total):
        matrix = np.zeros((head_dim, head_dim))
        for pair, rate in enumerate(rates):
            c, s = np.cos(total * rate), np.sin(total * rate)
            matrix[2 * pair : 2 * pair + 2, 2 * pair : 2 * pair + 2] = [[c, -s], [s, c]]
        return matrix

    with jax.enable_x64(True):
        total = np.cumsum(angle)
        q = np.stack([rotation(t) @ x for t, x in zip(total, query)])
        k = np.stack([rotation(t) @ x for t, x in zip(total, key)])
        expected = ops.power_attention(
            *(jnp.asarray(x)[None, :, None] for x in (q, k, value)),
            power=power,
            log_decay=jnp.log(jnp.asarray(gamma))[None, :, None],
            implementation="reference",
        )[0, :, 0]
        count = ops.symmetric_power_dim(head_dim, power)
        state, norm = np.zeros((head_dim, count)), np.zeros(count)
        for t in range(time):
            turn = gamma[t] * np.asarray(ops.symmetric_power_rotation(jnp.asarray(rotation(angle[t])), power))
            phi = np.asarray(ops.symmetric_power(jnp.asarray(key[t]), power))
            state, norm = state @ turn + np.outer(value[t], phi), norm @ turn + phi
            read = np.asarray(ops.symmetric_power(jnp.asarray(query[t]), power))
            np.testing.assert_allclose(state @ read / (norm @ read), expected[t], atol=1e-12)


@pytest.mark.parametrize(
    ("head_dim", "power"), [(5, 1), (5, 2), (16, 2), (33, 2), (6, 4), (17, 4), (4, 6), (7, 3)]
)
def test_tiled_products_are_those_of_the_features(head_dim, power):
    """Checks the products of the chunked form, their gradient, and the conversion to the canonical state and back."""
    random = np.random.default_rng(4)
    key, query = random.normal(size=(2, head_dim, 7))
    value, cotangent = random.normal(size=(2, 3, 7))

    @jax.jit
    def tiled(key, query, value, cotangent):
        state = features.fold(value, key, power, None)
        weighted = tuple(s * w for s, w in zip(state, features.weights(head_dim, power, jnp.float64)))
        actual = features.query(weighted, query, power, None)
        gradient = features.query_vjp(weighted, query, cotangent, power, None)
        canonical = features.to_canonical(state, head_dim, power)
        back = features.from_canonical(canonical, head_dim, power)
        return actual, gradient, canonical, back, state

    with jax.enable_x64(True):
        actual, gradient, canonical, back, state = tiled(key, query, value, cotangent)
        phi = np.asarray(ops.symmetric_power(jnp.asarray(key.T), power))
    expected = value @ (key.T @ query) ** power
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)
    slope = power * (key.T @ query) ** (power - 1) * (value.T @ cotangent)
    np.testing.assert_allclose(gradient, key @ slope, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(canonical, phi.T @ value.T, rtol=1e-11, atol=1e-11)
    for returned, group in zip(back, state, strict=True):
        np.testing.assert_allclose(returned, group, rtol=1e-11, atol=1e-11)


def test_elu_plus_one_is_positive_and_keeps_small_features():
    x = jnp.array([-30.0, -1.0, 0.0, 2.0])
    np.testing.assert_allclose(ops.elu_plus_one(x), [np.exp(-30.0), np.exp(-1.0), 1, 3], rtol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        ops.tensor_power,
        ops.symmetric_power,
        feature_maps.monomials,
        lambda x, p: feature_maps.multiplicities(len(x), p),
    ],
)
def test_features_that_no_memory_holds_are_refused(function):
    with pytest.raises(ValueError, match=r"power is 1000000 and the vectors have 4 elements; the factors of"):
        function(jnp.ones(4), 10**6)
    with pytest.raises(
        ValueError, match=r"^the features of power 12 of vectors of 64 elements take [\d,]+ bytes"
    ):
        function(jnp.ones(64), 12)


@pytest.mark.parametrize("function", [ops.tensor_power, ops.symmetric_power])
def test_powers_below_one_are_refused(function):
    with pytest.raises(ValueError, match="power is 0; it must be at least 1"):
        function(jnp.ones(3), 0)
    with pytest.raises(ValueError, match="power is -1"):
        feature_maps.symmetric_power_dim(3, -1)


def test_elu_plus_one_has_the_derivative_of_elu():
    x = jnp.array([-200.0, -1.0, -0.0, 0.0, 1e-6, 2.0, 1e4])
    gradient = jax.grad(lambda x: ops.elu_plus_one(x).sum())(x)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: jax.nn.elu(x).sum())(x), rtol=1e-6)


def test_multiplicities_at_the_largest_powers_are_finite():
    counts = feature_maps.multiplicities(2, 1023)
    assert np.isfinite(counts).all()
    np.testing.assert_allclose(np.log2(counts.max()), np.log2(float(math.comb(1023, 511))), rtol=1e-12)


def test_a_rotation_that_is_none_is_refused():
    for rotation, message in (
        (jnp.ones((2, 3)), r"rotation has shape \(2, 3\); it must be square, \[D, D\]"),
        (jnp.eye(2, dtype=jnp.int32), "rotation has dtype int32"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.symmetric_power_rotation(rotation, 2)
