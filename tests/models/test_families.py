"""Tests of the published families: their sizes, weights, FLOPs, and steps of training."""

import math

import jax
import numpy as np
import pytest
from flax import nnx

from sympow_jax import config, models, training
from sympow_jax.tasks import flops
from sympow_jax.training import sharding
from tests import marked
from tests.models import families

TIME = 30
EACH = pytest.mark.parametrize("name", families.FAMILIES)


def tokens(rows=1):
    return np.random.default_rng(1).integers(0, families.VOCABULARY, (rows, TIME)).astype(np.int32)


def sized(size, preset=None):
    attention = config.preset(preset or size.partition("_")[0])
    return config.ModelConfig(**config.MODEL_SIZES[size], attention=attention)


def bidirectional(**sizes):
    return config.ModelConfig(**sizes, attention=config.lrpe_method("base", causal=False))


@pytest.mark.parametrize(
    ("model", "task", "published"),
    [
        (sized("llama3_8b"), {}, 8_030_261_248),
        (sized("llama32_1b"), {}, 1_235_814_400),
        (sized("qwen2_500m"), {}, 494_032_768),
        (sized("qwen2_7b"), {}, 7_615_616_512),
        (sized("qwen3_600m"), {}, 596_049_920),
        (sized("qwen3_14b"), {}, 14_768_307_200),
        (sized("starcoder2_3b"), {}, 3_030_371_328),
        (config.load("gpt2:gpt2").model, {}, 124_439_808),
        (config.load("gpt2:gpt2-medium").model, {}, 354_823_168),
        (config.load("gpt2:gpt2-large").model, {}, 774_030_080),
        (config.load("gpt2:gpt2-xl").model, {}, 1_557_611_200),
        (sized("gpt2_124m", "sympow"), {}, 123_608_064),
        (sized("gpt2_124m", "sympow_gated_paper"), {}, 123_608_064 + 12 * 12 * 768),
        (sized("gpt2_124m", "conformal_paper"), {}, 123_608_064 + 2 * 12 * 12 * 768),
        (
            bidirectional(vocab_size=50_265, layers=2, width=768, heads=12),
            {"name": "masked_token"},
            2 * (12 * 768**2 + 4 * 768) + 50_265 * 768 + 4 * 768,
        ),
        # Table 3 counts DeiT, which has biases and learned positions.
        (
            bidirectional(patch_size=16, layers=12, width=384, heads=6),
            {"name": "classification", "classes": 1000},
            pytest.approx(22.04e6, rel=0.01),
        ),
    ],
)
def test_parameters_are_as_many_as_published(model, task, published):
    task = config.TaskConfig(**task)
    shapes = nnx.eval_shape(lambda: models.make(model, task, rngs=nnx.Rngs(0), stacked=True))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(shapes, nnx.Param))) == published


def run(name, **changes):
    return config.Config(
        model=families.settings(name, **changes),
        data=config.DataConfig(context_length=TIME, batch_tokens=2 * TIME),
        optimizer=config.OptimizerConfig(name="adamw", learning_rate=0.01, weight_decay=0.0),
    )


@marked.cases("name", ["qwen3"], slow=sorted(families.FAMILIES.keys() - {"qwen3"}))
def test_steps_of_training_lower_the_loss(name):
    """The first changes the embedding of the tokens that are read, and all rows of an untied head."""
    program = training.Program(run(name), sharding.whole_mesh(jax.devices()[:1]))
    state, losses = program.init_state(), []
    before = {
        name: np.array(state.params[name]) for name in ("embedding", "unembedding") if name in state.params
    }
    batch = {"inputs": tokens(2) % 8, "targets": np.roll(tokens(2) % 8, -1, axis=1)}
    for step in range(3):
        state, metrics = program.update(state, sharding.place_batch(batch, program.mesh))
        losses.append(float(metrics["loss"]))
        if step == 0 and "unembedding" in before:
            changed = {name: (np.asarray(state.params[name]) != x).any(1) for name, x in before.items()}
            np.testing.assert_array_equal(changed["embedding"], np.arange(families.VOCABULARY) < 8)
            assert changed["unembedding"].all()
    assert np.isfinite(losses).all()
    assert losses[2] < losses[0]


@EACH
def test_flops_are_6_per_weight_that_multiplies(name):
    model = nnx.eval_shape(lambda: models.DecoderLM(families.settings(name), rngs=nnx.Rngs(0)))
    unread = () if families.FAMILIES[name].tied else ("embedding",)
    shapes = {path: x.shape for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param)) if path != unread}
    matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 2)
    attention = sum(block.attention.kernel.flops_per_token(0) for block in model.blocks)
    assert flops.model_flops_per_token(model.config, 0) == 6 * matrices + 3 * attention


def test_a_name_is_that_of_the_most_specific_preset():
    for name in config.PRESETS:
        assert config.preset_name(config.preset(name)) == name
