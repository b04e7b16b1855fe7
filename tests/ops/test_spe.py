"""Tests of stochastic positional encoding: its mean over the noise is the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax.ops import spe
from tests.ops import cases, exact_angles

DIM, SINES, HEADS, KV_HEADS = 3, 2, 4, 2
POSITIONS = exact_angles.POSITIONS
encode = jax.jit(spe.encode)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32").astype("float64")


def parameters(dtype="float64"):
    shape = KV_HEADS, DIM, SINES
    # Frequencies up to half a turn, small ones among them.
    frequencies = np.abs(normal(*shape, seed=1)) * [0.2, 1e-4]
    encoded = {
        "frequencies": frequencies.astype("float32"),
        "phases": normal(*shape, seed=2),
        "gains": normal(*shape, seed=3),
    }
    return {name: array.astype(dtype) for name, array in encoded.items()}


def whitened_noise(dtype="float64"):
    """Returns noise whose second moments over the realizations are exactly those of its distribution."""
    count = DIM * 2 * SINES
    rotation, _ = np.linalg.qr(normal(count, count, seed=4))
    noise = np.sqrt(count) * rotation.reshape(DIM, 2 * SINES, count)
    return np.broadcast_to(noise, (KV_HEADS, *noise.shape)).astype(dtype)


def template(frequencies, phases, gains):
    """Returns P_d(t - s) [K, D, T, S], with the angles of each position in rational numbers."""
    turns = exact_angles.angles(POSITIONS, frequencies, turn=1)
    angles = turns[:, None] - turns[None] + phases.astype(np.float64)
    return np.einsum("kds,tukds->kdtu", np.square(gains, dtype=np.float64), np.cos(angles))


def formula(query, key, params):
    query = query.reshape(*query.shape[:2], KV_HEADS, HEADS // KV_HEADS, DIM)
    scores = np.einsum("btkgd,bukd,kdtu->bkgtu", query, key, template(**params))
    return scores.reshape(query.shape[0], HEADS, *scores.shape[-2:])


def scores_of(query, key):
    key = np.repeat(np.asarray(key, np.float64), HEADS // KV_HEADS, axis=2)
    return np.einsum("btnr,bunr->bntu", np.asarray(query, np.float64), key)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("float64", 1e-12)])
def test_second_moments_are_the_formula_at_any_position(dtype, tolerance):
    """The mean over noise is that of its second moments."""
    query = normal(1, len(POSITIONS), HEADS, DIM)
    key = normal(1, len(POSITIONS), KV_HEADS, DIM, seed=5)
    with jax.enable_x64(dtype == "float64"):
        encoded = encode(
            query.astype(dtype),
            key.astype(dtype),
            POSITIONS[None],
            **parameters(dtype),
            noise=whitened_noise(dtype),
        )
    assert {x.dtype.name for x in encoded} == {dtype}
    assert cases.error(scores_of(*encoded), formula(query, key, parameters())) < tolerance


def test_gradients_are_those_of_the_formula():
    query, key = normal(1, 5, HEADS, DIM), normal(1, 5, KV_HEADS, DIM, seed=5)
    positions = np.arange(5, dtype=np.int32)[None]
    weight = normal(1, HEADS, 5, 5, seed=7)

    def loss(params, query, key):
        q, k = spe.encode(query, key, positions, **params, noise=whitened_noise(query.dtype))
        return (jnp.einsum("btnr,bunr->bntu", q, jnp.repeat(k, 2, axis=2)) * weight.astype(q.dtype)).sum()

    def exact(params, query, key):
        distance = (positions[0][:, None] - positions[0]).astype("float64")
        angles = (
            2 * np.pi * params["frequencies"][..., None, None] * distance + params["phases"][..., None, None]
        )
        templates = (params["gains"][..., None, None] ** 2 * jnp.cos(angles)).sum(2)
        templates, key = jnp.repeat(templates, 2, axis=0), jnp.repeat(key, 2, axis=2)
        return (jnp.einsum("btnd,bund,ndtu->bntu", query, key, templates, precision="highest") * weight).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))
    single = gradients(parameters("float32"), query.astype("float32"), key.astype("float32"))
    with jax.enable_x64(True):
        double = gradients(parameters(), query, key)
        expected = jax.jit(jax.grad(exact, (0, 1, 2)))(parameters(), query, key)
    for a, b, c in zip(*map(jax.tree.leaves, (single, double, expected))):
        assert cases.error(a, c) < 2e-6
        assert cases.error(b, c) < 1e-12
