"""Tests of linearized relative positional encoding against its formulas in float64, and of special cases."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import config, ops
from sympow_jax.ops import lrpe, rotary
from tests.ops import cases, exact_angles

POSITIONS = exact_angles.POSITIONS
HEAD_DIM = 10
TOLERANCE = {"float32": 2e-6, "float64": 1e-12}
# Each core and each basis once; the others are slow.
OFTEN = list(zip(lrpe.CORES, lrpe.BASES, strict=True))
VARIANTS = [
    pytest.param(core, basis, marks=() if (core, basis) in OFTEN else pytest.mark.slow)
    for core in lrpe.CORES
    for basis in lrpe.BASES
]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32").astype("float64")


def encode(x, positions, **options):
    return jax.jit(lambda x, positions: lrpe.encode(x, positions, **options))(x, positions)


def basis_matrix(basis, head_dim):
    if basis == "householder":
        v = lrpe.householder(head_dim)[:, None]
        return np.eye(head_dim) - 2 * v @ v.T / (v.T @ v)
    if basis == "odd_even":
        half = head_dim - head_dim // 2
        return np.eye(head_dim)[[i // 2 + i % 2 * half for i in range(head_dim)]]
    if basis == "fourier":
        return np.fft.fft(np.eye(head_dim), norm="ortho")
    return np.eye(head_dim)


def core_matrix(core, head_dim, position, rates):
    """Returns Lambda^(s) of equations 22 to 24."""
    if core == "permutation":
        return np.linalg.matrix_power(np.eye(head_dim, dtype=int)[lrpe.permutation(head_dim)], position)
    angles = exact_angles.angles(position, rates)
    if core == "unitary":
        return np.diag(np.exp(1j * angles))
    matrix = np.eye(head_dim)
    for k, angle in enumerate(angles):
        cos, sin = np.cos(angle), np.sin(angle)
        matrix[2 * k : 2 * k + 2, 2 * k : 2 * k + 2] = [[cos, -sin], [sin, cos]]
    return matrix


def complex_of(encoded, head_dim):
    encoded = np.asarray(encoded, np.float64)
    if encoded.shape[-1] == head_dim:
        return encoded
    return encoded[..., :head_dim] + 1j * encoded[..., head_dim:]


def complex_error(actual, expected):
    return cases.error(*(np.stack([np.real(x), np.imag(x)]) for x in (actual, expected)))


def rates_of(core, kind="a", head_dim=HEAD_DIM):
    return lrpe.rates(core, head_dim, kind=kind)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("core", "basis"), VARIANTS)
def test_is_the_formula_at_any_position(core, basis, dtype):
    """Equations 22 to 24; core permutation is also PermuteFormer's (section 3.2 of Chen 2021), with r = 1."""
    x = normal(1, len(POSITIONS), 2, HEAD_DIM)
    with jax.enable_x64(dtype == "float64"):
        encoded = encode(x.astype(dtype), POSITIONS[None], core=core, basis=basis, rates=rates_of(core))
    assert encoded.dtype == dtype
    assert encoded.shape[-1] == HEAD_DIM * (2 if core == "unitary" or basis == "fourier" else 1)
    transforms = [
        core_matrix(core, HEAD_DIM, int(s), rates_of(core)) @ basis_matrix(basis, HEAD_DIM) for s in POSITIONS
    ]
    expected = np.einsum("tij,btnj->btni", transforms, x)
    assert complex_error(complex_of(encoded, HEAD_DIM), expected) < TOLERANCE[dtype]


def test_rope_is_orthogonal_in_the_basis_identity_to_the_bit():
    positions = np.concatenate([np.arange(2000), POSITIONS]).astype(np.int32)[None]
    for head_dim in (8, 48):
        x = normal(1, positions.size, 2, head_dim).astype(np.float32)
        rates = lrpe.rates("orthogonal", head_dim, kind="rope")
        actual = encode(x, positions, core="orthogonal", basis="identity", rates=rates)
        np.testing.assert_array_equal(actual, jax.jit(rotary.rope)(x, positions))


def test_a_custom_permutation_has_its_own_cycles():
    x = jnp.arange(5.0).reshape(1, 1, 1, 5)
    pi = np.array([1, 2, 0, 4, 3])
    steps = jax.jit(lambda p: lrpe.encode(x, p, core="permutation", basis="identity", permutation=pi))
    at = lambda s: steps(jnp.int32([[s]]))  # noqa: E731
    np.testing.assert_array_equal(at(1).ravel(), [1, 2, 0, 4, 3])
    np.testing.assert_array_equal(at(2).ravel(), [2, 0, 1, 3, 4])
    np.testing.assert_array_equal(at(2**31 - 1).ravel(), pi)  # 1 modulo 3 and modulo 2


def test_permutations_per_group_of_heads():
    x = normal(2, len(POSITIONS), 6, 12).astype(np.float32)
    positions = np.broadcast_to(POSITIONS, x.shape[:2])
    pi = lrpe.permutation(12, heads=3)
    assert len({tuple(row) for row in pi.tolist()}) == 3

    def encode(x, pi):
        return lrpe.encode(x, positions, core="permutation", basis="identity", permutation=pi)

    actual, pull = jax.vjp(jax.jit(lambda x: encode(x, pi)), x)
    # The gradient of a permutation is its inverse.
    np.testing.assert_array_equal(pull(actual)[0], x)
    np.testing.assert_array_equal(encode(x, jnp.asarray(pi)), actual)
    for n in range(6):
        for t, position in enumerate(POSITIONS):
            matrix, steps = np.eye(12, dtype=int)[pi[n // 2]], int(position)
            expected = np.linalg.matrix_power(matrix, steps) @ x[:, t, n].T
            np.testing.assert_array_equal(actual[:, t, n].T, expected)


def test_cosformer_is_its_formula():
    """Equation 35, with relu features and M = 40: sum_t q_s . k_t cos(pi (t - s) / (2 M)) v_t over its weights."""
    method = config.lrpe_method("cosformer")
    assert (method.lrpe.core, method.lrpe.basis, method.lrpe.rates) == ("unitary", "identity", "cosine")
    assert method.lrpe.reference_length == 512
    assert (method.feature_map, method.normalizer) == ("relu", "rotated")
    query, key, value = normal(3, 2, 40, 3, 8)
    rates = lrpe.rates("unitary", 8, kind="cosine", reference_length=40)
    positions = np.broadcast_to(np.arange(40, dtype=np.int32), (2, 40))
    distance = np.arange(40)[:, None] - np.arange(40)
    cosine = np.cos(np.pi / 2 * distance / 40)
    products = np.einsum("bsnd,btnd->bnst", np.maximum(query, 0), np.maximum(key, 0))
    for causal in (True, False):
        weights = products * cosine * ((distance >= 0) if causal else 1)
        total = weights.sum(-1, keepdims=True)
        assert total.min() >= 0
        # The output is zero where all weights are.
        expected = np.einsum("bnst,btnd->bsnd", weights / np.where(total, total, 1), value)
        with jax.enable_x64(True):
            actual = ops.linear_attention(
                query,
                key,
                value,
                feature_map=method.feature_map,
                normalizer=method.normalizer,
                rotate=functools.partial(
                    lrpe.encode, positions=positions, core="unitary", basis="identity", rates=rates
                ),
                causal=causal,
            )
        assert cases.error(actual, expected) < 1e-12


def test_odd_even_is_the_pseudocodes():
    for head_dim, expected in ((6, [0, 3, 1, 4, 2, 5]), (5, [0, 3, 1, 4, 2])):
        x = jnp.arange(float(head_dim)).reshape(1, 1, 1, -1)
        actual = encode(x, jnp.zeros((1, 1), jnp.int32), core="permutation", basis="odd_even")
        np.testing.assert_array_equal(actual.ravel(), expected)


def test_unrotated_dimensions_are_unchanged():
    x, positions = jnp.ones((1, 1, 1, 6)), jnp.int32([[5]])
    rates = lrpe.rates("orthogonal", 6, kind="a", identity_dim=2)
    np.testing.assert_allclose(rates, [1, 0.01])
    actual = encode(x, positions, core="orthogonal", basis="identity", rates=rates, identity_dim=2).ravel()
    np.testing.assert_array_equal(actual[4:], 1)
    assert np.all(np.abs(actual[:4] - 1) > 0.01)
    none = lrpe.rates("orthogonal", 6, kind="a", identity_dim=6)
    actual = encode(x, positions, core="orthogonal", basis="identity", rates=none, identity_dim=6)
    np.testing.assert_array_equal(actual, x)
    for head_dim, turned in ((3, 2), (4, 2), (6, 4), (8, 4), (9, 4)):
        rates = lrpe.rates("mixed", head_dim, kind="a")
        x = jnp.ones((1, 1, 1, head_dim))
        actual = encode(x, positions, core="mixed", basis="identity", rates=rates).ravel()
        np.testing.assert_array_equal(actual != 1, np.arange(head_dim) < turned)


def test_rates_are_the_pseudocodes():
    d = np.array([0, 1, 2, 3])
    for core, head_dim in (("orthogonal", 8), ("unitary", 4), ("mixed", 16)):
        per_pair = 1 if core == "unitary" else 2
        np.testing.assert_allclose(
            lrpe.rates(core, head_dim, kind="a"), 10_000 ** (-2 / (4 * per_pair) * d), rtol=1e-15
        )
        actual = lrpe.rates(core, head_dim, kind="b", reference_length=100)
        np.testing.assert_allclose(actual, np.pi / 2 / 100 / 4 * (d + 1), rtol=1e-15)
        actual = lrpe.rates(core, head_dim, kind="c", reference_length=100)
        np.testing.assert_allclose(actual, np.pi / 2 / 100 / (d + 1), rtol=1e-15)
    actual = lrpe.rates("orthogonal", 8, kind="rope", max_document_length=1024)
    np.testing.assert_allclose(actual, 2 * np.pi / 1024 ** (2 * d / 8), rtol=1e-15)
    actual = lrpe.rates("unitary", 4, kind="cosine", reference_length=100)
    np.testing.assert_allclose(actual, np.pi / 2 / 100 * np.ones(4), rtol=1e-15)
    assert lrpe.rates("permutation", 8, kind="a").shape == (0,)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("core", ["orthogonal", "unitary", "mixed"])
def test_learned_rates_by_group_at_any_position(core, dtype):
    count = {"orthogonal": 5, "unitary": 10, "mixed": 3}[core]
    learned = np.float32(3 * normal(2, count, seed=1)).astype(float)
    x = normal(1, len(POSITIONS), 4, HEAD_DIM)
    with jax.enable_x64(dtype == "float64"):
        encode = jax.jit(lambda x, p, rates: lrpe.encode(x, p, core=core, basis="identity", rates=rates))
        actual = encode(x.astype(dtype), POSITIONS[None], learned.astype(dtype))
    transforms = [[core_matrix(core, HEAD_DIM, int(s), learned[n // 2]) for n in range(4)] for s in POSITIONS]
    expected = np.einsum("tnij,btnj->btni", np.array(transforms), x)
    assert complex_error(complex_of(actual, HEAD_DIM), expected) < TOLERANCE[dtype]


def test_gradients_of_learned_rates_and_reflections():
    x, weight = normal(1, 20, 4, 8), normal(1, 20, 4, 8, seed=2)
    learned, v = normal(2, 4, seed=3), normal(2, 8, seed=4)
    positions = np.arange(100, 120, dtype=np.int32)[None]

    def loss(rates, v, x):
        encoded = lrpe.encode(
            x, positions, core="orthogonal", basis="householder", rates=rates, householder=v
        )
        return (encoded * weight.astype(x.dtype)).sum()

    def formula(rates, v, x):
        v = jnp.repeat(v, 2, axis=0)
        x = x - 2 * (x * v).sum(-1, keepdims=True) * v / (v * v).sum(-1, keepdims=True)
        angles = positions[:, :, None, None] * jnp.repeat(rates, 2, axis=0)
        pairs = x[..., ::2] + 1j * x[..., 1::2]
        turned = pairs * jnp.exp(1j * angles)
        return (turned.real * weight[..., ::2] + turned.imag * weight[..., 1::2]).sum()

    arguments = learned, v, x
    single = jax.jit(jax.grad(loss, (0, 1, 2)))(*(a.astype("float32") for a in arguments))
    with jax.enable_x64(True):
        double = jax.jit(jax.grad(loss, (0, 1, 2)))(*arguments)
        expected = jax.jit(jax.grad(formula, (0, 1, 2)))(*arguments)
    for a, b, c in zip(single, double, expected):
        assert cases.error(a, c) < 2e-6
        assert cases.error(b, c) < 1e-12


@pytest.mark.parametrize(("core", "basis"), [("unitary", "fourier"), ("mixed", "householder")])
def test_bfloat16_is_encoded_in_float32(core, basis):
    x = jnp.asarray(normal(1, 6, 2, HEAD_DIM), jnp.bfloat16)
    options = {"core": core, "basis": basis, "rates": rates_of(core)}
    actual = encode(x, POSITIONS[None], **options)
    assert actual.dtype == jnp.bfloat16
    expected = encode(x.astype(jnp.float32), POSITIONS[None], **options)
    np.testing.assert_array_equal(actual, expected.astype(jnp.bfloat16))


def test_fixed_draws_stay():
    assert lrpe.permutation(8).tolist() == [2, 5, 7, 1, 4, 0, 6, 3]
    assert sorted(lrpe.permutation(64)) == list(range(64))
    # The first head's is that of a single one.
    assert lrpe.permutation(8, heads=2)[0].tolist() == lrpe.permutation(8).tolist()
    np.testing.assert_allclose(
        lrpe.householder(4), [0.30486872, 0.04769313, -0.71892702, 0.62283575], atol=1e-8
    )
    assert abs(np.linalg.norm(lrpe.householder(64)) - 1) < 1e-12


def test_the_settings_have_the_same_names():
    choices = {x.name: x.metadata["choices"] for x in dataclasses.fields(config.LrpeConfig)}
    assert (choices["core"], choices["basis"], choices["rates"]) == (lrpe.CORES, lrpe.BASES, lrpe.KINDS)
