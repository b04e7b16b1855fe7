"""Tests of schedules and optimizers against their formulas."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sympow_jax import config, models
from sympow_jax.config import optimizer as config_optimizer
from sympow_jax.training import optimizer

PARAMS = {"matrix": jnp.full((2, 2), 2.0), "bias": jnp.full((2,), 2.0)}


@pytest.fixture(autouse=True)
def in_small_matrices(monkeypatch):
    """Lets Adafactor factor the matrices of these tests."""
    monkeypatch.setattr(optimizer, "FACTORED_SIZE", 6)


def _rates(steps: int, **changes) -> list[float]:
    schedule = optimizer.learning_rate(config.OptimizerConfig(learning_rate=0.1, **changes), steps)
    return [float(schedule(jnp.int32(count))) for count in range(steps)]


def _make(settings: config.OptimizerConfig, params):
    trained = jax.tree.map(lambda _: True, params)
    return optimizer.make_optimizer(settings, 10, optimizer.parameter_options(settings, params), trained)


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


@pytest.mark.parametrize("final_fraction", [0.0, 0.2])
@pytest.mark.parametrize("warmup", [0, 3])
def test_wsd_is_constant_and_then_a_straight_line(warmup, final_fraction):
    rates = _rates(10, schedule="wsd", warmup_steps=warmup, decay_fraction=0.4, final_fraction=final_fraction)
    np.testing.assert_allclose(rates[warmup:6], 0.1, rtol=1e-6)
    fractions = 1 - (1 - final_fraction) * np.arange(1, 5) / 4
    np.testing.assert_allclose(rates[6:], 0.1 * fractions, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(rates[:warmup], 0.1 * np.arange(1, warmup + 1) / max(warmup, 1), rtol=1e-6)


def test_linear_ends_at_the_final_fraction():
    rates = _rates(8, schedule="linear", warmup_steps=2, final_fraction=0.5)
    np.testing.assert_allclose(rates[2:], 0.1 * (1 - 0.5 * np.arange(1, 7) / 6), rtol=1e-5)


def _update(params, **changes):
    tx = _make(config.OptimizerConfig(learning_rate=0.1, **changes), params)
    grads = jax.tree.map(lambda leaf: 0.3 * leaf + 0.1, params)
    state = tx.init(params)
    _, state = tx.update(grads, state, params)
    return tx.update(grads, state, params)[0], state


@pytest.mark.parametrize("name", [x for x in config_optimizer.OPTIMIZERS if x != "schedule_free"])
def test_factors_scale_the_updates_of_the_parameters_that_match(name):
    draw = np.random.default_rng(0).standard_normal
    attention = {
        kind: {"kernel": jnp.asarray(draw((3, 2)), jnp.float32)} for kind in ("rate", "decay", "query")
    }
    params = {"blocks": {number: {"attention": attention} for number in (0, 1)}, "rate": jnp.ones(2)}
    options = {"name": name, "clip_norm": 1.0} | ({} if name == "adam" else {"weight_decay": 0.5})
    plain, plain_state = _update(params, **options)
    factors = ("*.attention.rate.kernel=0.25", "blocks.1.*=2", "rate=0")
    scaled, state = _update(params, **options, learning_rate_factors=factors)
    expected = {
        "blocks.0.attention.rate.kernel": 0.25,
        "blocks.1.attention.rate.kernel": 0.5,
        "blocks.1.attention.decay.kernel": 2,
        "blocks.1.attention.query.kernel": 2,
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
            optimizer.parameter_options(settings, params)
        assert str(raised.value) == (
            f"optimizer.learning_rate_factors has the pattern '{pattern}', which matches no parameter; {remedy}"
        )


@pytest.mark.parametrize("item", ["rate", "rate=", "=1", "rate=-1", "rate=nan", "rate=inf", "rate=x"])
def test_factors_are_patterns_with_a_number(item):
    with pytest.raises(ValueError, match="must be PATTERN=FACTOR with a factor of at least 0") as raised:
        config.OptimizerConfig(learning_rate_factors=(item,))
    assert repr(item) in str(raised.value)


DECAY, RATE, EPSILON = 0.3, 0.05, 1e-3
GRADS = 4


def _deep_params(layers: int) -> dict:
    """Returns parameters by layer, with matrices of both orientations, whose layers differ in scale."""
    generator = np.random.default_rng(0)

    def draw(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * generator.normal(size=shape), jnp.float32)

    def block(layer: int) -> dict:
        scale = 3.0**layer
        return {
            "attention": {
                "query": {"kernel": draw(6, 8, scale=scale)},
                "decay": {"kernel": draw(6, 2, scale=scale)},
            },
            "mlp": {"up": {"kernel": draw(6, 20, scale=scale), "bias": draw(20)}},
            "norm": {"scale": draw(6)},
        }

    return {
        "embedding": draw(12, 6),
        "blocks": {layer: block(layer) for layer in range(layers)},
        "final_norm": {"scale": draw(6)},
    }


def _deep_grads(params: dict) -> list[dict]:
    generator = np.random.default_rng(1)
    return [
        jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape), jnp.float32), params)
        for _ in range(GRADS)
    ]


def _options(name: str) -> dict:
    """Returns settings of an optimizer with which everything that it can do has an effect."""
    return {
        "adam": {"epsilon": EPSILON},
        "adamw": {"epsilon": EPSILON, "weight_decay": DECAY},
        "adafactor": {"b1": 0.5, "weight_decay": DECAY},
        "lion": {"weight_decay": DECAY},
        "muon": {"epsilon": EPSILON, "weight_decay": DECAY},
        "schedule_free": {"epsilon": EPSILON, "weight_decay": DECAY},
        "sgd": {"weight_decay": DECAY},
    }[name] | {"name": name, "learning_rate": RATE, "warmup_steps": 2}


def _run(tx: optax.GradientTransformation, params, grads) -> tuple:
    state, update = tx.init(params), jax.jit(tx.update)
    for grad in grads:
        changes, state = update(grad, state, params)
        params = optax.apply_updates(params, changes)
    return params, state


@pytest.mark.parametrize("period", [1, 2])
@pytest.mark.parametrize("name", config_optimizer.OPTIMIZERS)
def test_stacked_layers_have_the_updates_of_single_ones(name, period):
    settings = config.OptimizerConfig(
        **_options(name),
        clip_norm=1.0,
        learning_rate_factors=("blocks.1.*=0.5", "embedding=0.25"),
    )
    params = _deep_params(4)
    grads = _deep_grads(params)

    def run(period):
        stacked = models.stack(params, period)
        options, trained = (
            optimizer.parameter_options(settings, stacked),
            jax.tree.map(lambda _: True, stacked),
        )
        tx = optimizer.make_optimizer(settings, 10, options, trained)
        return _run(tx, stacked, [models.stack(grad, period) for grad in grads])[0]

    # In periods of all layers, each array is of one layer.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        models.unstack(run(period)),
        models.unstack(run(4)),
    )


def _matrices(params) -> dict:
    return jax.tree.map(lambda x: x.ndim == 2, params)


def _optax(name: str, params) -> optax.GradientTransformation:
    """Returns the optimizer as optax composes it, for a constant rate and the settings of `_options`."""
    decay: dict = {"weight_decay": DECAY, "mask": _matrices(params)}
    rate = RATE
    if name == "adam":
        return optax.adam(rate, eps=EPSILON)
    if name == "adamw":
        return optax.adamw(rate, eps=EPSILON, **decay)
    if name == "lion":
        return optax.lion(rate, **decay)
    if name == "sgd":
        return optax.chain(
            optax.trace(0.9), optax.add_decayed_weights(DECAY, _matrices(params)), optax.scale(-rate)
        )
    if name == "adafactor":
        return optax.adafactor(
            rate,
            min_dim_size_to_factor=6,
            momentum=0.5,
            weight_decay_rate=rate * DECAY,
            weight_decay_mask=_matrices(params),
        )
    if name == "schedule_free":
        return optax.contrib.schedule_free_adamw(rate, eps=EPSILON)
    names = jax.tree_util.tree_map_with_path(lambda path, _: models.parameter_name(path), params)
    dimensions = jax.tree.map(
        lambda name: (
            optax.contrib.MuonDimensionNumbers()
            if "query.kernel" in name or "mlp.up.kernel" in name
            else None
        ),
        names,
    )
    return optax.contrib.muon(
        rate,
        eps=EPSILON,
        weight_decay=DECAY,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=dimensions,
    )


def _compared(name: str, params) -> tuple[dict, dict]:
    """Returns the parameters after some updates: ours, and those of optax."""
    options = _options(name) | {"warmup_steps": 0}
    if name == "schedule_free":
        del options["weight_decay"]  # optax's function has no mask
    grads = _deep_grads(params)
    ours, _ = _run(_make(config.OptimizerConfig(**options), params), params, grads)
    theirs, _ = _run(_optax(name, params), params, grads)
    return ours, theirs


@pytest.mark.parametrize("name", [x for x in config_optimizer.OPTIMIZERS if x != "muon"])
def test_parameters_are_those_of_optaxs_function(name):
    ours, theirs = _compared(name, _deep_params(2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), ours, theirs)


def test_muons_matrices_are_those_of_optaxs_function():
    """Optax's function has Nesterov's momentum in Adam too, and no decay there."""
    ours, theirs = _compared("muon", _deep_params(2))
    for layer in (0, 1):
        for part in ("attention.query", "mlp.up"):
            module, name = part.split(".")
            found, expected = (x["blocks"][layer][module][name]["kernel"] for x in (ours, theirs))
            np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


def test_muon_gives_other_parameters_the_updates_of_adamw():
    params = _deep_params(2)
    grads = _deep_grads(params)
    muon, adamw = (
        _run(_make(config.OptimizerConfig(**_options(name)), params), params, grads)[0]
        for name in ("muon", "adamw")
    )
    np.testing.assert_array_equal(muon["embedding"], adamw["embedding"])
    for name in ("norm", "mlp"):
        kinds = ("scale",) if name == "norm" else ("up",)
        found, expected = (x["blocks"][1][name][kinds[0]] for x in (muon, adamw))
        if name == "mlp":
            found, expected = found["bias"], expected["bias"]
        np.testing.assert_array_equal(found, expected)
    gates = (x["blocks"][1]["attention"]["decay"]["kernel"] for x in (muon, adamw))
    np.testing.assert_array_equal(*gates)


def test_muons_updates_have_the_size_of_adams():
    """Singular values between 0.7 and 1.2 after five steps, times 0.2 sqrt(max(M, N)) / sqrt(min(M, N)) per element."""
    params = {"blocks": {0: {"mlp": {"up": {"kernel": jnp.zeros((16, 64))}}}}}
    generator = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: jnp.asarray(generator.normal(size=x.shape), jnp.float32), params)
    settings = config.OptimizerConfig(name="muon", learning_rate=1.0)
    tx = _make(settings, params)
    change = np.asarray(jax.tree.leaves(tx.update(grads, tx.init(params), params)[0])[0], np.float64)
    singular = np.linalg.svd(change, compute_uv=False) / (0.2 * math.sqrt(64))
    assert 0.6 < singular.min() <= singular.max() < 1.3
    assert math.sqrt(np.mean(change**2)) == pytest.approx(0.2, rel=0.3)


def test_vectors_never_decay():
    params = _deep_params(2)
    tx = _make(config.OptimizerConfig(name="sgd", learning_rate=0.5, weight_decay=0.2), params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    changes, _ = tx.update(zeros, tx.init(params), params)
    for change, param in zip(jax.tree.leaves(changes), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(change, -0.1 * (param.ndim >= 2) * np.asarray(param), rtol=1e-6)


def test_schedule_free_is_its_formula():
    """Against "The Road Less Scheduled" (Defazio et al. 2024, equations 3 to 5) in float64, with Adam's scaling."""
    settings = config.OptimizerConfig(
        name="schedule_free",
        learning_rate=0.1,
        warmup_steps=2,
        b1=0.8,
        b2=0.9,
        epsilon=EPSILON,
        learning_rate_factors=("blocks.1.*=0.5",),
    )
    params = _deep_params(2)
    grads = _deep_grads(params)
    found, state = _run(_make(settings, params), params, grads)
    average = optimizer.schedule_free_average(state, found)

    def expected(path, first, *grads):
        factor = 0.5 if models.parameter_name(path).startswith("blocks.1.") else 1.0
        x = z = np.asarray(first, np.float64)
        square, total = np.zeros_like(x), 0.0
        for number, grad in enumerate(grads, 1):
            grad = np.asarray(grad, np.float64)
            rate = 0.1 * min(number / 2, 1)
            square = 0.9 * square + 0.1 * grad**2
            z = z - factor * rate * grad / (np.sqrt(square / (1 - 0.9**number)) + EPSILON)
            total += rate**2
            x = x + rate**2 / total * (z - x)
        return x, 0.2 * z + 0.8 * x

    pairs = jax.tree_util.tree_map_with_path(expected, params, *grads)
    is_pair = lambda node: isinstance(node, tuple)  # noqa: E731
    for tree, index in ((average, 0), (found, 1)):
        wanted = jax.tree.map(lambda pair, index=index: pair[index], pairs, is_leaf=is_pair)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), tree, wanted)


@pytest.mark.parametrize("name", ["muon", "schedule_free", "adafactor"])
def test_parameters_that_are_not_trained_stay(name):
    params = _deep_params(2)
    settings = config.OptimizerConfig(**_options(name), learning_rate_factors=("blocks.0.*=2",))
    trained = jax.tree_util.tree_map_with_path(
        lambda path, _: models.parameter_name(path).startswith("blocks.0."), params
    )
    tx = optimizer.make_optimizer(settings, 10, optimizer.parameter_options(settings, params), trained)
    found, state = _run(tx, params, _deep_grads(params))
    evaluated = optimizer.schedule_free_average(state, found) if name == "schedule_free" else found
    for tree in (found, evaluated):
        jax.tree.map(np.testing.assert_array_equal, tree["blocks"][1], params["blocks"][1])
        np.testing.assert_array_equal(tree["embedding"], params["embedding"])
        assert not np.array_equal(tree["blocks"][0]["norm"]["scale"], params["blocks"][0]["norm"]["scale"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "sgd", "b2": 0.9}, "b2 is 0.9 but optimizer.name is 'sgd', .* or leave it at 0.999"),
        ({"name": "lion", "epsilon": 1e-6}, "use adam, adamw, adafactor, muon"),
        ({"momentum": 0.5}, "use muon, or leave it at 0.95"),
        ({"name": "schedule_free", "schedule": "cosine"}, "use 'constant'"),
        ({"name": "schedule_free", "ema_decay": 0.9}, "has an average of its own"),
        ({"name": "schedule_free", "b1": 1e-30}, "must be at least 0.001"),
        ({"ema_decay": 1.0}, "must be above 0 and below 1"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0; it must be at least 1e-30"),
        ({"clip_norm": 1e-300}, "clip_norm is 1e-300; it must be at least 1e-30"),
        ({"schedule": "polynomial"}, "must be one of constant, cosine"),
    ],
)
def test_settings_that_cannot_be_are_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        config.OptimizerConfig(**changes)
    assert "\n" not in str(raised.value)


def test_what_is_none_is_the_optimizers_own():
    for name, expected in {
        "adam": (6e-4, 0.9, 0.999, 1e-8),
        "lion": (6e-4, 0.9, 0.99, 1e-8),
        "adafactor": (6e-4, 0.0, 0.999, 1e-30),
    }.items():
        made = config.OptimizerConfig(name=name)
        assert (made.learning_rate, made.mean_decay, made.square_decay, made.added_epsilon) == expected
