"""Tests that contradictory settings give one clear line of error."""

import dataclasses

import pytest

from sympow_jax import config

ENCODER = config.preset("softmax", causal=False)
CLASSES = config.TaskConfig(name="classification", classes=2)
PAIRS = {"task": config.TaskConfig(name="classification", classes=2, dual_encoder=True)}
LINES = {"source": "tsv", "paths": ("x",), "text_columns": ("one", "two")}
IMAGES = {"source": "images", "paths": ("x",), "image_size": 8, "context_length": 4, "batch_tokens": 8}


def make(model=None, task=None, data=None, **others) -> config.Config:
    """Returns a config of masked tokens with changes."""
    shape = {"vocab_size": 32, "layers": 1, "width": 16, "heads": 2, "attention": ENCODER}
    return config.Config(
        model=config.ModelConfig(**shape | (model or {})),
        task=config.TaskConfig(name="masked_token") if task is None else task,
        data=config.DataConfig(**{"context_length": 16, "batch_tokens": 32} | (data or {})),
        **others,
    )


def test_what_fits():
    assert make().task.outputs is None
    assert make(task=CLASSES).task.outputs == 2
    assert make(task=config.TaskConfig(name="regression")).task.outputs == 1
    images = make({"patch_size": 4, "vocab_size": 0, "norm": "batch"}, CLASSES, IMAGES)
    assert images.data.batch_size == 2


def task(**settings):
    return {"task": config.TaskConfig(**settings)}


def names(*names, **others):
    """Returns settings of two held-out files of these names."""
    return {"data": {"heldout_paths": ("a", "b"), "heldout_names": names}, "task": CLASSES, **others}


PATCHES = {"patch_size": 4}
MISTAKES = (
    ({"model": {"attention": config.preset("softmax")}}, "causal is True and task.name 'masked_token'"),
    (task(), "causal is False and task.name 'next_token'"),
    (
        task() | {"model": {"attention": config.preset("softmax"), "norm": "batch"}},
        "model.norm is 'batch' and task.name 'next_token'",
    ),
    ({"evaluation": config.EvaluationConfig(context_lengths=(8,))}, "(8,) and task.name 'masked_token'"),
    ({"sharding": config.ShardingConfig(context=2)}, "sharding.context is 2 and task.name 'masked_token'"),
    (
        {"task": CLASSES, "optimizer": config.OptimizerConfig(z_loss=1e-4)},
        "optimizer.z_loss is 0.0001 and task.name 'classification'",
    ),
    (
        {
            "optimizer": config.OptimizerConfig(schedule="wsd", warmup_steps=95),
            "training": config.TrainingConfig(steps=100),
        },
        "optimizer.warmup_steps is 95 and optimizer.decay_fraction 0.1, 10 updates, but training.steps is 100",
    ),
    ({"model": PATCHES}, "arrays of images have patches, and tokens have none"),
    ({"data": IMAGES, "task": CLASSES}, "arrays of images have patches, and tokens have none"),
    ({"data": IMAGES, "model": PATCHES}, "images have classes or numbers, not tokens"),
    (
        {"data": IMAGES | {"image_size": 10}, "model": PATCHES, "task": CLASSES},
        "data.image_size is 10, model.patch_size 4 and data.context_length 4; the patches must divide",
    ),
    (
        {"data": IMAGES | {"context_length": 8}, "model": PATCHES, "task": CLASSES},
        "data.context_length 8; the patches must divide the image, and their number be the context length",
    ),
    (
        {"model": {"attention": config.preset("gpt2", causal=False, max_document_length=8)}},
        "data.context_length is 16 and model.attention.max_document_length 8; a document of a row may not be longer",
    ),
    (
        PAIRS,
        "data.source 'text' and data.text_columns (); a dual encoder needs source 'tsv' and the names of two",
    ),
    (PAIRS | {"data": LINES | {"text_columns": ("one",)}}, "'tsv' and data.text_columns ('one',); a dual"),
    (
        PAIRS | {"data": LINES | {"context_length": 15, "batch_tokens": 30}},
        "task.dual_encoder is True and data.context_length 15; each of two texts has half of a row: use an even",
    ),
    (
        names("x"),
        "data.heldout_names is ('x',) and data.heldout_paths ('a', 'b'); give every path a name, or none",
    ),
    *(
        (names("x", y), "; every name must be another one, of letters, digits and _")
        for y in ("x", "", "y z")
    ),
    (
        names("x", "y", **task(name="masked_token")),
        "and task.name 'masked_token'; parts of held-out data are for",
    ),
    (
        {"data": {"batch_tokens": 40}},
        "data.batch_tokens is 40; it must be a multiple of data.context_length 16",
    ),
    ({"data": {"heldout_fraction": 1.0}}, "data.heldout_fraction is 1.0; it must be at least 0 and below 1"),
    (
        {"data": {"document_separator": 2**32}},
        "data.document_separator is 4294967296; it must be at least 0 and",
    ),
    ({"model": {"vocab_size": 0}}, "model.vocab_size is 0; it must be at least 1"),
    (
        {"model": {"mlp_width": 10**9}},
        "model.mlp_width is 1000000000; it must be at least 1 and at most 1048576",
    ),
    ({"model": {"norm_epsilon": 1e-300}}, "model.norm_epsilon is 1e-300; it must be at least 1e-30"),
)


def test_groups_that_do_not_fit_each_other():
    for changes, message in MISTAKES:
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            make(**changes)
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)


def test_values_of_one_group():
    """A wrong type, and values that a group refuses, one line each."""
    for make_one, message in (
        (lambda: config.TrainingConfig(steps=1e5), "is 100000.0, a float; it must be an int: write 100_000"),
        (lambda: config.TrainingConfig(steps=2.5), "training.steps is 2.5, a float; it must be an int"),
        (lambda: config.TrainingConfig(steps=True), "training.steps is True, a bool; it must be an int"),
        (
            lambda: config.EvaluationConfig(prompts="the "),
            "a str; it must be a tuple of str: write ('the ',)",
        ),
        (lambda: config.DataConfig(paths="texts"), "a str; it must be a tuple of str: write ('texts',)"),
        (
            lambda: config.EvaluationConfig(context_lengths=[8, "16"]),
            "a tuple; it must be a tuple of int or None",
        ),
        (lambda: config.EvaluationConfig(context_lengths=(8, 8)), "it must be positive and increasing"),
        (
            lambda: config.OptimizerConfig(clip_norm="1"),
            "clip_norm is '1', a str; it must be a float or None",
        ),
        (lambda: config.ModelConfig(layers=None, width=8, heads=1), "model.layers is None, a NoneType; it"),
        (lambda: config.preset("sympow", form=2), "attention.form is 2, an int; it must be a str or None"),
        (
            lambda: config.LrpeConfig(reference_length="5"),
            "attention.lrpe.reference_length is '5', a str; it must",
        ),
        (lambda: config.Config(model={}), "model is {}, a dict; it must be a ModelConfig"),
        (lambda: config.EvaluationConfig(prompts=("the ", "")), "each must have at least one character"),
        (lambda: config.EvaluationConfig(prompts=("the ", "the ")), "each must occur once"),
        (lambda: config.TaskConfig(name="classification"), "task.classes is 0; it must be at least 2"),
        (
            lambda: config.TaskConfig(name="masked_token", dual_encoder=True),
            "task.dual_encoder is True and task.name 'masked_token'; pairs of texts have classes or numbers",
        ),
    ):
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            make_one()
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)


def test_an_int_is_a_float_and_a_list_is_a_tuple():
    assert config.OptimizerConfig(learning_rate=1, clip_norm=1).clip_norm == 1.0
    assert config.TrainingConfig(profile_steps=[1, 2]).profile_steps == (1, 2)


def test_methods_of_the_paper():
    type1, rope = config.lrpe_method("type1", causal=False), config.lrpe_method("rope")
    assert dataclasses.replace(type1.lrpe, core="orthogonal") == config.lrpe_method("type2").lrpe
    assert not type1.causal
    assert rope.lrpe == config.LrpeConfig()
    rotated = [name for name in config.LRPE_METHODS if config.lrpe_method(name).normalizer == "rotated"]
    assert rotated == ["rope", "permuteformer", "cosformer"]
    assert config.lrpe_method("type2", normalizer="rotated").normalizer == "rotated"
    # PermuteFormer's r needs a direction.
    assert config.lrpe_method("permuteformer").decay == "permuteformer"
    assert config.lrpe_method("permuteformer", causal=False).decay == "none"
    with pytest.raises(ValueError, match="method is 'type4'; it must be one of softmax, base, rope, spe"):
        config.lrpe_method("type4")
