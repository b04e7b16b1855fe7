"""Tests of schedules and optimizers against their formulas."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sympow_jax import config, models
from sympow_jax.config import run as config_run
from sympow_jax.training import optimizer

PARAMS = {"matrix": jnp.full((2, 2), 2.0), "bias": jnp.full((2,), 2.0)}


def _rates(steps: int, **changes) -> list[float]:
    schedule = optimizer.learning_rate(config.OptimizerConfig(learning_rate=0.1, **changes), steps)
    return [float(schedule(jnp.int32(count))) for count in range(steps)]


def _make(settings: config.OptimizerConfig, params):
    trained = jax.tree.map(lambda _: True, params)
    return optimizer.make_optimizer(settings, 10, params, optimizer.factors(settings, params), trained)


def _one_update(grad: float, **changes) -> dict[str, np.ndarray]:
    tx = _make(config.OptimizerConfig(learning_rate=0.1, **changes), PARAMS)
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
    tx = _make(settings, PARAMS)
    grads = {name: jnp.ones_like(leaf) for name, leaf in PARAMS.items()}
    _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    changes, _ = tx.update(grads, state, PARAMS)
    np.testing.assert_allclose(changes["bias"], -0.1 * 1.8, rtol=1e-5)


def test_weight_decay_needs_adamw():
    with pytest.raises(ValueError, match="use adamw"):
        dataclasses.replace(config.OptimizerConfig(), weight_decay=0.1)


def _update(params, **changes):
    tx = _make(config.OptimizerConfig(learning_rate=0.1, **changes), params)
    grads = jax.tree.map(lambda leaf: 0.3 * leaf + 0.1, params)
    state = tx.init(params)
    _, state = tx.update(grads, state, params)
    return tx.update(grads, state, params)[0], state


@pytest.mark.parametrize("name", config_run.OPTIMIZERS)
def test_factors_scale_the_updates_of_the_parameters_that_match(name):
    draw = np.random.default_rng(0).standard_normal
    attention = {
        kind: {"kernel": jnp.asarray(draw((3, 2)), jnp.float32)} for kind in ("rate", "decay", "rates")
    }
    params = {"blocks": {number: {"attention": attention} for number in (0, 1)}, "rate": jnp.ones(2)}
    options = {"name": name, "clip_norm": 1.0} | ({"weight_decay": 0.5} if name == "adamw" else {})
    plain, plain_state = _update(params, **options)
    factors = ("*.attention.rate.kernel=0.25", "blocks.1.*=2", "rate=0")
    scaled, state = _update(params, **options, learning_rate_factors=factors)
    expected = {
        "blocks.0.attention.rate.kernel": 0.25,
        "blocks.1.attention.rate.kernel": 0.5,
        "blocks.1.attention.decay.kernel": 2,
        "blocks.1.attention.rates.kernel": 2,
        "rate": 0,
    }
    for (path, change), one in zip(
        jax.tree_util.tree_leaves_with_path(scaled), jax.tree.leaves(plain), strict=True
    ):
        # Powers of two are exact, so all parameters that do not match are the same to the bit.
        np.testing.assert_array_equal(change, expected.get(models.parameter_name(path), 1) * one)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state), jax.tree.leaves(plain_state))
    ones, _ = _update(params, **options, learning_rate_factors=("*=1",))
    jax.tree.map(np.testing.assert_array_equal, ones, plain)


def test_a_pattern_that_matches_nothing_is_one_line_with_the_nearest_name():
    params = {"blocks": {0: {"attention": {"rate": {"kernel": jnp.ones((2, 2))}}}}, "norm": jnp.ones(2)}
    for pattern, remedy in {
        "blocks.0.attention.rates.kernel": "did you mean blocks.0.attention.rate.kernel?",
        "x": "the names are blocks.*.attention.rate.kernel, norm",
    }.items():
        settings = config.OptimizerConfig(learning_rate_factors=(f"{pattern}=0.1",))
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            optimizer.factors(settings, params)
        assert str(raised.value) == (
            f"optimizer.learning_rate_factors has the pattern '{pattern}', which matches no parameter; {remedy}"
        )


@pytest.mark.parametrize("item", ["rate", "rate=", "=1", "rate=-1", "rate=nan", "rate=inf", "rate=x"])
def test_factors_are_patterns_with_a_number(item):
    with pytest.raises(ValueError, match="must be PATTERN=FACTOR with a factor of at least 0") as raised:
        config.OptimizerConfig(learning_rate_factors=(item,))
    assert repr(item) in str(raised.value)
