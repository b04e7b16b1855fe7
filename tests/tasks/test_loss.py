"""Tests of the sums of the loss of tokens against float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import config
from sympow_jax.tasks import loss
from sympow_jax.training import sharding
from tests import devices

ROWS, TIME, WIDTH, VOCABULARY = 4, 7, 6, 12


def _arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    hidden = generator.normal(size=(ROWS, TIME, WIDTH))
    embedding = 2 * generator.normal(size=(VOCABULARY, WIDTH))
    targets = generator.integers(0, VOCABULARY, (ROWS, TIME))
    targets[0, :3] = -1
    return hidden, embedding, targets


def _expected(hidden, embedding, targets):
    logits = hidden @ embedding.T
    highest = logits.max(-1, keepdims=True)
    normalizers = (np.log(np.exp(logits - highest).sum(-1, keepdims=True)) + highest)[..., 0]
    counts = targets >= 0
    picked = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    probabilities = np.exp(logits - normalizers[..., None])
    one_hot = np.eye(VOCABULARY)[np.maximum(targets, 0)]
    grads = probabilities - one_hot + 0.3 * 2 * normalizers[..., None] * probabilities
    grads = np.where(counts[..., None], grads, 0)
    sums = ((normalizers - picked) * counts).sum(), 0.3 * (normalizers**2 * counts).sum()
    return sums, (grads @ embedding, np.einsum("btv,btm->vm", grads, hidden))


@pytest.mark.parametrize(
    ("logits_bytes", "sizes"),
    [(1 << 28, {}), (4 * ROWS * VOCABULARY * 3, {}), (1 << 28, {"data": 2, "fsdp": 2, "tensor": 2})],
    ids=["whole", "slices", "devices"],
)
def test_z_loss_and_its_gradient(monkeypatch, logits_bytes, sizes):
    monkeypatch.setattr(loss, "_LOGITS_BYTES", logits_bytes)
    hidden, embedding, targets = _arrays()
    expected, expected_grads = _expected(hidden, embedding, targets)

    def total(hidden, embedding):
        sums = loss.token_sums(hidden, embedding, jnp.asarray(targets), "float32", z_loss=0.3)
        return sums[0] + sums[1], sums

    arrays = jnp.asarray(hidden, jnp.float32), jnp.asarray(embedding, jnp.float32)
    with devices.seen(math.prod(sizes.values())):
        mesh = sharding.mesh_of(config.ShardingConfig(**sizes), jax.devices())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        differentiate = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
        grads, found = differentiate(*jax.device_put(arrays, sharding.replicated(mesh)))
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    for grad, wanted in zip(grads, expected_grads):
        np.testing.assert_allclose(grad, wanted, rtol=1e-4, atol=1e-5)
    plain, z = loss.token_sums(*arrays, jnp.asarray(targets), "float32")
    assert z is None
    np.testing.assert_allclose(plain, expected[0], rtol=2e-6)


def test_cotangents_of_both_sums_must_be_equal():
    hidden, embedding, targets = map(jnp.asarray, _arrays())

    def total(hidden, weights):
        sums = loss.token_sums(hidden, embedding, targets, "float32", z_loss=0.3)
        return weights[0] * sums[0] + weights[1] * sums[1]

    grads = [jax.grad(total)(hidden, weights) for weights in ((1, 1), (2, 2), (1, 0))]
    np.testing.assert_array_equal(2 * grads[0], grads[1])
    assert np.isnan(grads[2]).all()


def test_second_derivatives():
    hidden, embedding, targets = map(jnp.asarray, _arrays())

    def formula(hidden, embedding):
        logits = hidden @ embedding.T
        normalizers = jax.nn.logsumexp(logits, -1)
        picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
        return jnp.sum(normalizers - picked + 0.3 * normalizers**2, where=targets >= 0)

    def total(hidden, embedding):
        return sum(loss.token_sums(hidden, embedding, targets, "float32", z_loss=0.3))

    def second(f):
        return jax.grad(lambda *x: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(f, (0, 1))(*x)), (0, 1))

    for found, expected in zip(second(total)(hidden, embedding), second(formula)(hidden, embedding)):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients_of_rounded_products_are_as_exact_as_their_operands():
    """Operands and the gradients of the logits are rounded to bfloat16, with relative errors of at most 2^-9."""
    hidden, embedding, targets = _arrays()
    arrays = [jnp.asarray(x, jnp.bfloat16).astype(jnp.float32) for x in (hidden, embedding)]
    _, expected = _expected(*(np.asarray(x, np.float64) for x in arrays), targets)
    found = jax.grad(
        lambda *x: sum(loss.token_sums(*x, jnp.asarray(targets), "bfloat16", z_loss=0.3)), argnums=(0, 1)
    )(*arrays)
    for grad, wanted in zip(found, expected):
        assert np.linalg.norm(grad - wanted) < 2**-9 * np.linalg.norm(wanted)


@pytest.mark.parametrize("shift", [0, -1e4, 1e4])
def test_maximum_and_sum_in_one_pass(shift):
    logits = 20 * np.random.default_rng(0).normal(size=(2, 3, 1000)).astype(np.float32) + np.float32(shift)
    exact = logits.astype(np.float64)
    highest, total = jax.jit(loss._in_one_pass)(logits)
    np.testing.assert_array_equal(highest, logits.max(-1))
    np.testing.assert_allclose(total, np.exp(exact - exact.max(-1, keepdims=True)).sum(-1), rtol=1e-6)
