"""Tests of the published families: their sizes, the formula in float64, streaming, and a step of training."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, models, training, weights
from sympow_jax.tasks import flops
from sympow_jax.training import sharding
from tests.models import families
from tests.ops import cases

TIME = 30
EACH = pytest.mark.parametrize("name", families.FAMILIES)


def tokens(rows=1):
    return np.random.default_rng(1).integers(0, families.VOCABULARY, (rows, TIME)).astype(np.int32)


@pytest.mark.parametrize(
    ("size", "published"),
    [
        ("llama3_8b", 8_030_261_248),
        ("llama32_1b", 1_235_814_400),
        ("qwen2_500m", 494_032_768),
        ("qwen2_7b", 7_615_616_512),
        ("qwen3_600m", 596_049_920),
        ("qwen3_14b", 14_768_307_200),
        ("starcoder2_3b", 3_030_371_328),
    ],
)
def test_parameters_are_as_many_as_published(size, published):
    attention = config.preset(size.partition("_")[0])
    model = config.ModelConfig(**config.MODEL_SIZES[size], attention=attention)
    shapes = nnx.eval_shape(lambda: models.DecoderLM(model, rngs=nnx.Rngs(0), stacked=True))
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(shapes, nnx.Param))) == published


@EACH
def test_logits_are_those_of_the_formula_in_one_call_and_streamed(name):
    model = families.make(name)
    expected = families.forward(name, families.parameters(model), tokens()[0])
    whole = nnx.jit(lambda model, tokens: model(tokens))(model, tokens())
    assert cases.error(whole[0], expected) < 1e-5
    assert np.std(expected) > 0.5

    @nnx.jit
    def resume(model, tokens, state):
        return model(tokens, initial_state=state, return_state=True)

    state, parts = model.init_state(1, max_length=TIME), []
    for start, stop in itertools.pairwise((0, 14, 28, 29, TIME)):
        part, state = resume(model, tokens()[:, start:stop], state)
        parts.append(part)
    assert cases.error(jnp.concatenate(parts, 1)[0], expected) < 1e-5


def run(name, **changes):
    return config.Config(
        model=families.settings(name, **changes),
        data=config.DataConfig(context_length=TIME, batch_tokens=2 * TIME),
        optimizer=config.OptimizerConfig(name="adamw", learning_rate=0.01, weight_decay=0.1),
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("llama32", "qwen2") else ())
        for name in families.FAMILIES
    ],
)
def test_steps_of_training_lower_the_loss(name):
    program = training.Program(run(name), sharding.whole_mesh(jax.devices()[:1]))
    state, losses = program.init_state(), []
    batch = {"inputs": tokens(2), "targets": np.roll(tokens(2), -1, axis=1)}
    for _ in range(3):
        state, metrics = program.update(state, sharding.place_batch(batch, program.mesh))
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all()
    assert losses[2] < losses[0]


@EACH
def test_weights_keep_their_names_and_bits(name, tmp_path):
    model, settings, path = families.make(name), run(name), tmp_path / "model.safetensors"
    weights.save(path, settings, model)
    loaded = weights.load(path, weights.read_settings(weights.settings_path(path)))
    expected, actual = families.parameters(model), families.parameters(loaded)
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(actual[key], value)


@EACH
def test_flops_are_6_per_weight_that_multiplies(name):
    model = families.make(name)
    tied = families.FAMILIES[name].tied
    matrices = sum(
        value.size
        for key, value in families.parameters(model).items()
        if value.ndim == 2 and (tied or key != "embedding")
    )
    attention = sum(block.attention.kernel.flops_per_token(0) for block in model.blocks)
    assert flops.model_flops_per_token(model.config, 0) == 6 * matrices + 3 * attention


def test_an_untied_head_is_learned_apart_from_the_embedding():
    """A step changes the embedding of the tokens that are read, and all rows of the head."""
    settings = dataclasses.replace(run("llama3"), optimizer=config.OptimizerConfig(name="sgd"))
    program = training.Program(settings, sharding.whole_mesh(jax.devices()[:1]))
    state = program.init_state()
    before = {name: np.array(state.params[name]) for name in ("embedding", "unembedding")}
    batch = {"inputs": tokens(2) % 8, "targets": tokens(2) % 8}
    state, _ = program.update(state, sharding.place_batch(batch, program.mesh))
    changed = {name: (np.asarray(state.params[name]) != before[name]).any(1) for name in before}
    np.testing.assert_array_equal(changed["embedding"], np.arange(families.VOCABULARY) < 8)
    assert changed["unembedding"].all()


def test_a_name_is_that_of_the_most_specific_preset():
    for name in config.PRESETS:
        assert config.preset_name(config.preset(name)) == name
