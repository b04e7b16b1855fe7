"""Tests of the feature maps."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import ops
from sympow_jax.ops import feature_maps
from sympow_jax.ops.forms import features
from tests import marked

SIZES = [(1, 2), (2, 4), (3, 3), (5, 2), (4, 6)]


@pytest.mark.parametrize(("head_dim", "power"), SIZES)
def test_symmetric_power_is_the_definition(head_dim, power):
    """Non-decreasing indices in lexicographic order, each times the root of its multinomial count."""
    x = np.random.default_rng(0).normal(size=head_dim)
    expected = []
    for index in itertools.combinations_with_replacement(range(head_dim), power):
        counts = [index.count(d) for d in range(head_dim)]
        multinomial = math.factorial(power) // math.prod(map(math.factorial, counts))
        expected.append(math.sqrt(multinomial) * math.prod(x[list(index)]))
    query, key = np.random.default_rng(1).normal(size=(2, 3, head_dim))
    with jax.enable_x64(True):
        actual = ops.symmetric_power(jnp.asarray(x), power)
        products = [
            (feature_map(jnp.asarray(query), power) * feature_map(jnp.asarray(key), power)).sum(-1)
            for feature_map in (ops.tensor_power, ops.symmetric_power)
        ]
    np.testing.assert_allclose(actual, expected, rtol=1e-13)
    assert len(actual) == ops.symmetric_power_dim(head_dim, power)
    # phi(q) . phi(k) = (q . k)^p ("Symmetric Power Transformers", result 1 and section 4.2).
    for product in products:
        np.testing.assert_allclose(product, ((query * key).sum(-1)) ** power, rtol=1e-11, atol=1e-12)


@marked.cases(
    ("head_dim", "power"),
    [(5, 1), (33, 2), (128, 2), (7, 3), (17, 4)],
    slow=[(5, 2), (16, 2), (6, 4), (4, 6), (7, 6)],
)
def test_products_are_those_of_the_features(head_dim, power):
    """Checks the products of the chunked form, their gradient, and the conversion to the canonical state and back."""
    random = np.random.default_rng(4)
    key, query = random.normal(size=(2, head_dim, 7))
    value, cotangent = random.normal(size=(2, 3, 7))

    @jax.jit
    def grouped(key, query, value, cotangent):
        state = features.fold(value, key, power, None)
        weighted = tuple(s * w for s, w in zip(state, features.weights(head_dim, power, jnp.float64)))
        actual = features.query(weighted, query, power, None)
        gradient = features.query_vjp(weighted, query, cotangent, power, None)
        canonical = features.to_canonical(state, head_dim, power)
        back = features.from_canonical(canonical, head_dim, power)
        return actual, gradient, canonical, back, state

    with jax.enable_x64(True):
        actual, gradient, canonical, back, state = grouped(key, query, value, cotangent)
        phi = np.asarray(ops.symmetric_power(jnp.asarray(key.T), power))
    expected = value @ (key.T @ query) ** power
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)
    slope = power * (key.T @ query) ** (power - 1) * (value.T @ cotangent)
    np.testing.assert_allclose(gradient, key @ slope, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(canonical, phi.T @ value.T, rtol=1e-11, atol=1e-11)
    for returned, group in zip(back, state, strict=True):
        np.testing.assert_allclose(returned, group, rtol=1e-11, atol=1e-11)


def test_elu_plus_one_keeps_small_features_and_has_the_derivative_of_elu():
    x = jnp.array([-30.0, -1.0, 0.0, 2.0])
    np.testing.assert_allclose(ops.elu_plus_one(x), [np.exp(-30.0), np.exp(-1.0), 1, 3], rtol=1e-6)
    x = jnp.array([-200.0, -1.0, -0.0, 0.0, 1e-6, 2.0, 1e4])
    gradient = jax.grad(lambda x: ops.elu_plus_one(x).sum())(x)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: jax.nn.elu(x).sum())(x), rtol=1e-6)


def test_multiplicities_at_the_largest_powers_are_finite():
    counts = feature_maps.multiplicities(2, 1023)
    assert np.isfinite(counts).all()
    np.testing.assert_allclose(np.log2(counts.max()), np.log2(float(math.comb(1023, 511))), rtol=1e-12)
