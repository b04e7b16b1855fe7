"""Tests of schedules and optimizers against their formulas."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import config
from sympow_jax.training import optimizer

PARAMS = {"matrix": jnp.full((2, 2), 2.0), "bias": jnp.full((2,), 2.0)}


def _rates(steps: int, **changes) -> list[float]:
    schedule = optimizer.learning_rate(config.OptimizerConfig(learning_rate=0.1, **changes), steps)
    return [float(schedule(jnp.int32(count))) for count in range(steps)]


def _one_update(grad: float, **changes) -> dict[str, np.ndarray]:
    tx = optimizer.make_optimizer(config.OptimizerConfig(learning_rate=0.1, **changes), 10, PARAMS)
    grads = {name: jnp.full_like(leaf, grad) for name, leaf in PARAMS.items()}
    return tx.update(grads, tx.init(PARAMS), PARAMS)[0]


def test_constant_after_warmup():
    np.testing.assert_allclose(_rates(6, warmup_steps=4), [0.025, 0.05, 0.075, 0.1, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(_rates(3), 0.1, rtol=1e-6)


@pytest.mark.parametrize("warmup", [0, 2])
def test_cosine_ends_at_the_final_fraction(warmup):
    rates = _rates(10, schedule="cosine", warmup_steps=warmup, final_fraction=0.2)
    expected = [
        0.1 * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * (update - warmup) / (10 - warmup))))
        for update in range(warmup + 1, 11)
    ]
    np.testing.assert_allclose(rates[warmup:], expected, rtol=1e-5)
    np.testing.assert_allclose(rates[-1], 0.02, rtol=1e-5)


@pytest.mark.parametrize("warmup", [0, 4])
def test_inverse_sqrt(warmup):
    rates = _rates(16, schedule="inverse_sqrt", warmup_steps=warmup)
    assert rates[15] == pytest.approx(0.1 * math.sqrt(max(warmup, 1) / 16), rel=1e-5)
    assert max(rates) == pytest.approx(0.1, rel=1e-6)


def test_adam_moves_by_the_learning_rate():
    for leaf in _one_update(3.0, name="adam").values():
        np.testing.assert_allclose(leaf, -0.1, rtol=1e-5)


def test_adamw_decays_matrices_only():
    changes = _one_update(3.0, name="adamw", weight_decay=0.5)
    np.testing.assert_allclose(changes["matrix"], -0.1 * (1 + 0.5 * 2.0), rtol=1e-5)
    np.testing.assert_allclose(changes["bias"], -0.1, rtol=1e-5)


def test_clipping_bounds_the_global_norm():
    changes = _one_update(3.0, name="sgd", clip_norm=1.0)
    norm = math.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in changes.values()))
    assert norm == pytest.approx(0.1, rel=1e-5)
    np.testing.assert_allclose(_one_update(3.0, name="sgd")["bias"], -0.3, rtol=1e-5)


def test_sgd_has_momentum_b1():
    settings = config.OptimizerConfig(name="sgd", learning_rate=0.1, b1=0.8)
    tx = optimizer.make_optimizer(settings, 10, PARAMS)
    grads = {name: jnp.ones_like(leaf) for name, leaf in PARAMS.items()}
    _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    changes, _ = tx.update(grads, state, PARAMS)
    np.testing.assert_allclose(changes["bias"], -0.1 * 1.8, rtol=1e-5)


def test_weight_decay_needs_adamw():
    with pytest.raises(ValueError, match="use adamw"):
        dataclasses.replace(config.OptimizerConfig(), weight_decay=0.1)
