"""Tests of schedules and optimizers against their formulas, with trees of small arrays."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sympow_jax import config, models
from sympow_jax.config import optimizer as optimizer_lib
from sympow_jax.training import optimizer
from tests import marked, mistakes
from tests.training import small

DECAY, RATE, EPSILON = 0.3, 0.05, 1e-3
GRADS = 4
# Optimizers with an update for each element.
ELEMENTWISE = ("adam", "adamw", "lion", "schedule_free", "sgd")


@pytest.fixture(autouse=True)
def in_small_matrices(monkeypatch):
    """Lets Adafactor factor the matrices of these tests."""
    monkeypatch.setattr(optimizer, "FACTORED_SIZE", 6)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("final", [0.0, 0.2])
def test_schedules_are_their_formulas(warmup, final):
    update = np.arange(1, 11)
    progress = (update - warmup) / (10 - warmup)
    for name, formula in {
        "constant": np.ones(10),
        "cosine": final + (1 - final) * (1 + np.cos(math.pi * progress)) / 2,
        "linear": 1 - (1 - final) * progress,
        "wsd": np.where(update <= 6, 1, 1 - (1 - final) * (update - 6) / 4),
        "inverse_sqrt": np.sqrt(max(warmup, 1) / update),
    }.items():
        options = {"final_fraction": final} if name in ("cosine", "linear", "wsd") else {}
        options |= {"decay_fraction": 0.4} if name == "wsd" else {}
        made = config.OptimizerConfig(learning_rate=0.1, schedule=name, warmup_steps=warmup, **options)
        rates = jnp.broadcast_to(optimizer.learning_rate(made, 10)(jnp.arange(10)), (10,))
        expected = 0.1 * np.where(update <= warmup, update / max(warmup, 1), formula)
        np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-9, err_msg=name)


def _params(layers: int) -> dict:
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


def _grads(params: dict) -> list[dict]:
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
    }[name] | {"name": name, "learning_rate": RATE}


def _make(settings: config.OptimizerConfig, params, is_trained=lambda name: True):
    trained = jax.tree_util.tree_map_with_path(
        lambda path, _: is_trained(models.parameter_name(path)), params
    )
    return optimizer.make_optimizer(settings, 10, optimizer.parameter_options(settings, params), trained)


def _run(tx: optax.GradientTransformation, params, grads) -> tuple:
    state, update = tx.init(params), jax.jit(tx.update)
    for grad in grads:
        changes, state = update(grad, state, params)
        params = optax.apply_updates(params, changes)
    return params, state


@functools.cache
def _ours(name: str) -> tuple[dict, list[dict], dict]:
    options = _options(name)
    if name == "schedule_free":
        del options["weight_decay"]  # optax's function has no mask
    params = _params(2)
    grads = _grads(params)
    return params, grads, _run(_make(config.OptimizerConfig(**options), params), params, grads)[0]


def _optax(name: str, params) -> optax.GradientTransformation:
    """Returns the optimizer as optax composes it, for a constant rate and the settings of `_options`."""
    matrices = jax.tree.map(lambda x: x.ndim == 2, params)
    decay: dict = {"weight_decay": DECAY, "mask": matrices}
    match name:
        case "adam":
            return optax.adam(RATE, eps=EPSILON)
        case "adamw":
            return optax.adamw(RATE, eps=EPSILON, **decay)
        case "lion":
            return optax.lion(RATE, **decay)
        case "sgd":
            decayed = optax.add_decayed_weights(DECAY, matrices)
            return optax.chain(optax.trace(0.9), decayed, optax.scale(-RATE))
        case "adafactor":
            decay = {"weight_decay_rate": RATE * DECAY, "weight_decay_mask": matrices}
            return optax.adafactor(RATE, min_dim_size_to_factor=6, momentum=0.5, **decay)
        case "schedule_free":
            return optax.contrib.schedule_free_adamw(RATE, eps=EPSILON)

    def dimensions(path, _):
        is_matrix = models.parameter_name(path).endswith(("query.kernel", "mlp.up.kernel"))
        return optax.contrib.MuonDimensionNumbers() if is_matrix else None

    numbers = jax.tree_util.tree_map_with_path(dimensions, params)
    return optax.contrib.muon(
        RATE, eps=EPSILON, weight_decay=DECAY, consistent_rms=0.2, muon_weight_dimension_numbers=numbers
    )


@pytest.mark.parametrize("name", optimizer_lib.OPTIMIZERS)
def test_parameters_are_those_of_optaxs_function(name):
    """Of muon, the matrices: optax's function has Nesterov's momentum in Adam too, and no decay there.

    Others have the updates of AdamW, to the bit.
    """
    params, grads, ours = _ours(name)
    theirs, _ = _run(_optax(name, params), params, grads)
    if name == "muon":
        # A layer's tree is changed in place below, which the cache must not see.
        ours, adamw = (jax.tree.map(np.asarray, tree) for tree in (ours, _ours("adamw")[2]))
        for layer in (0, 1):
            for module, part in (("attention", "query"), ("mlp", "up")):
                found, expected = (
                    tree["blocks"][layer][module][part].pop("kernel") for tree in (ours, theirs)
                )
                np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)
                adamw["blocks"][layer][module][part].pop("kernel")
        small.assert_same(ours, adamw)
        return
    small.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)


@marked.cases("name", ["adafactor", "muon"], slow=ELEMENTWISE)
def test_stacked_layers_have_the_updates_of_single_ones(name):
    factors = ("blocks.1.*=0.5", "embedding=0.25")
    settings = config.OptimizerConfig(
        **_options(name), warmup_steps=2, clip_norm=1.0, learning_rate_factors=factors
    )
    params = _params(4)
    grads = _grads(params)

    def run(period):
        stacked = models.stack(params, period)
        options = optimizer.parameter_options(settings, stacked)
        trained = jax.tree.map(lambda _: True, stacked)
        tx = optimizer.make_optimizer(settings, 10, options, trained)
        return models.unstack(_run(tx, stacked, [models.stack(grad, period) for grad in grads])[0])

    # In periods of all layers, each array is of one layer.
    small.assert_close(run(2), run(4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("clip_norm", "more"), [(1.0, []), (None, ["embedding=0"])])
def test_factors_scale_the_updates_of_the_parameters_that_match(clip_norm, more):
    """What a factor of 0 freezes does not count for the norm, so that clipping would change the others."""
    params = _params(2)
    grads = _grads(params)[:2]

    def update(*factors):
        options = _options("adamw") | {"clip_norm": clip_norm, "learning_rate_factors": factors}
        tx = _make(config.OptimizerConfig(**options), params)
        state, step = tx.init(params), jax.jit(tx.update)
        _, state = step(grads[0], state, params)
        return step(grads[1], state, params)

    plain, plain_state = update()
    scaled, state = update("*.attention.query.kernel=0.25", "blocks.1.*=2", *more)
    expected = {
        "blocks.0.attention.query.kernel": 0.25,
        "blocks.1.attention.query.kernel": 0.5,
        "embedding": 0 if more else 1,
    }
    for (path, change), one in zip(
        jax.tree_util.tree_leaves_with_path(scaled), jax.tree.leaves(plain), strict=True
    ):
        name = models.parameter_name(path)
        # Powers of two are exact, so all parameters that do not match are the same to the bit.
        factor = expected.get(name, 2 if name.startswith("blocks.1.") else 1)
        np.testing.assert_array_equal(change, factor * one)
    small.assert_same(jax.tree.leaves(state), jax.tree.leaves(plain_state))


@pytest.mark.parametrize("preset", ["sympow", "linear_lrpe"])
def test_only_matrices_and_embeddings_decay(preset):
    """Decays by channel, and LRPE's rates, are vectors of each head."""
    attention = config.preset(preset, **({"decay": "channel_constant"} if preset == "sympow" else {}))
    settings = config.ModelConfig(vocab_size=8, layers=1, width=16, heads=2, attention=attention)
    model = nnx.eval_shape(lambda: models.DecoderLM(settings, rngs=0))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    decays = optimizer.parameter_options(config.OptimizerConfig(), params).weight_decay
    vectors = 0
    for (path, leaf), decay in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(decays)):
        name = models.parameter_name(path)
        assert decay == (name.endswith("kernel") or name == "embedding"), name
        vectors += leaf.ndim == 2 and not decay
    assert vectors == 1


def test_a_pattern_that_matches_nothing_is_one_line_with_the_nearest_name():
    params = {"blocks": {0: {"attention": {"rate": {"kernel": jnp.ones((2, 2))}}}}, "norm": jnp.ones(2)}
    for pattern, remedy in {
        "blocks.0.attention.rates.kernel": "did you mean blocks.0.attention.rate.kernel?",
        "x": "the names are blocks.*.attention.rate.kernel, norm",
    }.items():
        settings = config.OptimizerConfig(learning_rate_factors=(f"{pattern}=0.1",))
        with pytest.raises(ValueError, match="which matches no parameter; ") as raised:
            optimizer.parameter_options(settings, params)
        assert remedy in str(raised.value)


def test_clipping_bounds_the_global_norm_and_sgd_has_momentum_b1():
    params = {"matrix": jnp.full((2, 2), 2.0), "bias": jnp.full((2,), 2.0)}
    grads = jax.tree.map(lambda x: jnp.full_like(x, 3.0), params)
    for clip, bound in ((1.0, 1 / math.sqrt(6)), (None, 3.0)):
        made = config.OptimizerConfig(name="sgd", learning_rate=0.1, b1=0.8, clip_norm=clip)
        tx = _make(made, params)
        first, state = tx.update(grads, tx.init(params), params)
        second, _ = tx.update(grads, state, params)
        for change, momentum in ((first, 1), (second, 1.8)):
            for leaf in jax.tree.leaves(change):
                np.testing.assert_allclose(leaf, -0.1 * momentum * bound, rtol=1e-5)


def test_schedule_free_is_its_formula():
    """Against "The Road Less Scheduled" (Defazio et al. 2024, equations 3 to 5) in float64, with Adam's scaling."""
    factors = ("blocks.1.*=0.5",)
    options = {"b1": 0.8, "b2": 0.9, "warmup_steps": 2, "learning_rate": 0.1, "weight_decay": 0.0}
    made = _options("schedule_free") | options | {"learning_rate_factors": factors}
    params = _params(2)
    grads = _grads(params)
    found, state = _run(_make(config.OptimizerConfig(**made), params), params, grads)
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
        small.assert_close(tree, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["muon", "schedule_free", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_parameters_that_are_not_trained_stay(name):
    params = _params(2)
    settings = config.OptimizerConfig(**_options(name), learning_rate_factors=("blocks.0.*=2",))
    tx = _make(settings, params, lambda name: name.startswith("blocks.0."))
    found, state = _run(tx, params, _grads(params))
    evaluated = optimizer.schedule_free_average(state, found) if name == "schedule_free" else found
    for tree in (found, evaluated):
        small.assert_same(tree["blocks"][1], params["blocks"][1])
        np.testing.assert_array_equal(tree["embedding"], params["embedding"])
        assert not np.array_equal(tree["blocks"][0]["norm"]["scale"], params["blocks"][0]["norm"]["scale"])


def test_settings_that_cannot_be_are_one_line():
    factor = "must be PATTERN=FACTOR with a factor of at least 0"
    for changes, message in (
        ({"weight_decay": 0.1}, "use adamw"),
        ({"name": "sgd", "b2": 0.9}, "b2 is 0.9 but optimizer.name is 'sgd', "),
        ({"name": "lion", "epsilon": 1e-6}, "use adam, adamw, adafactor, muon"),
        ({"momentum": 0.5}, "use muon, or leave it at 0.95"),
        (
            {"schedule": "linear", "decay_fraction": 0.5},
            "optimizer.schedule is 'linear', which does not read it; use",
        ),
        ({"final_fraction": 0.5}, "use cosine, linear, wsd, or leave it at 0.1"),
        ({"name": "schedule_free", "schedule": "cosine"}, "use 'constant'"),
        ({"name": "schedule_free", "ema_decay": 0.9}, "has an average of its own"),
        ({"name": "schedule_free", "b1": 1e-30}, "must be at least 0.001"),
        ({"ema_decay": 1.0}, "must be above 0 and below 1"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0; it must be at least 1e-30"),
        ({"clip_norm": 1e-300}, "clip_norm is 1e-300; it must be at least 1e-30"),
        ({"schedule": "polynomial"}, "must be one of constant, cosine"),
        *(
            ({"learning_rate_factors": (item,)}, f"{item!r}")
            for item in ("rate", "rate=", "=1", "rate=-1", "rate=nan", "rate=inf", "rate=x")
        ),
    ):
        with mistakes.refused(message) as raised:
            config.OptimizerConfig(**changes)
        assert factor in str(raised.value) or "learning_rate_factors" not in changes


def test_what_is_none_is_the_optimizers_own():
    for name, expected in {
        "adam": (6e-4, 0.9, 0.999, 1e-8),
        "lion": (6e-4, 0.9, 0.99, 1e-8),
        "adafactor": (6e-4, 0.0, 0.999, 1e-30),
    }.items():
        made = config.OptimizerConfig(name=name)
        assert (made.learning_rate, made.mean_decay, made.square_decay, made.added_epsilon) == expected
