"""Tests that contradictory settings give one clear line of error."""

import dataclasses

import numpy as np
import pytest

from sympow_jax import config
from tests import mistakes

ENCODER = config.Config(
    model=config.ModelConfig(
        vocab_size=32, layers=1, width=16, heads=2, attention=config.preset("softmax", causal=False)
    ),
    task=config.TaskConfig(name="masked_token"),
    data=config.DataConfig(context_length=16, batch_tokens=32),
)
WORDS = {
    "CLASSES": "task.name=classification task.classes=2",
    "LINES": "data.source=tsv data.paths=x data.text_columns=one,two",
    "PATCHES": "model.patch_size=4 model.vocab_size=0",
    "IMAGES": "data.source=images data.paths=x data.image_size=8 data.context_length=4",
    "A.": "model.attention.",
}
OF_RUNS = """
A.causal=true                          | task.name is 'masked_token' and model.attention.causal True
task.name=next_token                   | task.name is 'next_token' and model.attention.causal False
task.name=next_token A.causal=true model.norm=batch | task.name is 'next_token' and model.norm 'batch'
evaluation.context_lengths=8           | context_lengths (8,); only decoders have losses by position: set it to none
sharding.context=2                     | task.name is 'masked_token' and sharding.context 2
CLASSES optimizer.z_loss=1e-4          | task.name is 'classification' and optimizer.z_loss 0.0001
task.name=classification               | set task.classes: task.name 'classification' needs
task.dual_encoder=true                 | task.dual_encoder is True and task.name 'masked_token'; pairs of texts have
CLASSES task.dual_encoder=true         | data.source 'text' and data.text_columns (); a dual encoder needs source 'tsv'
CLASSES LINES task.dual_encoder=true data.text_columns=one | 'tsv' and data.text_columns ('one',); a dual encoder
PATCHES                                | arrays of images have patches, and tokens have none
IMAGES CLASSES                         | arrays of images have patches, and tokens have none
IMAGES PATCHES CLASSES data.image_size=10 | data.image_size is 10, model.patch_size 4 and data.context_length 4;
IMAGES PATCHES CLASSES data.context_length=8 | data.context_length 8; the patches must divide the image
CLASSES data.heldout_paths=a,b data.heldout_names=x | data.heldout_paths ('a', 'b'); name every path, or none
CLASSES data.heldout_paths=a,b data.heldout_names=x,x | every name must be another one, of letters, digits and _
CLASSES data.heldout_paths=a,b data.heldout_names=x,y-z | every name must be another one, of letters, digits and _
data.heldout_paths=a data.heldout_names=x | these are for tasks with labels
data.batch_tokens=40                   | data.batch_tokens is 40; it must be a multiple of data.context_length 16
data.heldout_fraction=1                | data.heldout_fraction is 1.0; it must be at least 0 and below 1
data.document_separator=-1             | data.document_separator is -1; it must be at least 0 and below 4294967296
data.seed=4294967296                   | data.seed is 4294967296; it must be at least 0 and below 4294967296
training.seed=-1                       | training.seed is -1; it must be at least 0 and below 4294967296
model.vocab_size=0                     | model.vocab_size is 0; it must be at least 1
model.mlp_width=1e9                    | model.mlp_width is 1000000000; it must be at least 1 and at most 1048576
model.norm_epsilon=1e-300              | model.norm_epsilon is 1e-300; it must be at least 1e-30 and at most 1.0
A.position=learned_absolute A.max_document_length=8 | longer than the learned positions: set max_document_length=16
optimizer.schedule=wsd optimizer.warmup_steps=95 training.steps=100 | 0.1, 10 updates, but training.steps is 100
evaluation.context_lengths=8,8         | it must be positive and increasing
evaluation.prompts='the',''            | each must have at least one character
"""
OF_ATTENTION = """
A.kernel=linear A.decay=channel_learned | 'channel_learned', which the kernel 'power' has and 'linear' has not
A.decay=channel_fixed A.form=attention | but attention.form 'attention'; it is chunked
A.decay=none A.causal=false            | attention.causal is False, which the kernel 'power' has not; use kernel
A.decay=none A.causal=false A.kernel=sliding_window | which the kernel 'sliding_window' has not; use kernel
A.kernel=softmax A.decay=alibi A.causal=false | attention.decay 'alibi'; decays run in one direction: use 'none'
A.kernel=power A.power=3               | attention.power is 3; it must be positive and even, so that weights are >= 0
A.kernel=linear A.feature_map=symmetric A.power=0 | attention.power is 0; it must be at least 1
A.kernel=expressive A.implementation=reference | attention.implementation is 'reference'; it must be one of xla
A.form=recurrent A.chunk_size=64       | attention.chunk_size is 64, but attention.form 'recurrent'
A.form=chunked A.implementation=reference | attention.implementation is 'reference', but attention.form 'chunked'
A.implementation=cudnn                 | attention.implementation is 'cudnn'; it must be one of reference, xla
A.window=0                             | attention.window is 0; it must be at least 1
A.decay_bias=101                       | attention.decay_bias is 101.0; it must be at least -100 and at most 100
A.rope.base=1                          | attention.rope.base is 1.0; it must be above 1
A.rope.base=none A.rope.scaling=llama3  | attention.rope.base None; set the base
A.rope.factor=0.5                      | attention.rope.factor is 0.5; it must be at least 1
A.rope.low_frequency_factor=4          | attention.rope.high_frequency_factor 4.0; the second must be larger
A.lrpe.reference_length=0              | attention.lrpe.reference_length is 0; it must be at least 1
A.lrpe.permutation_per_head=true       | but core is 'orthogonal'; only 'permutation' permutes
A.lrpe.learned_rates=true A.lrpe.core=permutation | core 'permutation' has no rates
A.position=lrpe model.head_dim=15      | model.head_dim is 15; attention.lrpe.core 'orthogonal' rotates pairs
A.position=lrpe model.head_dim=2 A.lrpe.core=mixed | attention.lrpe.core 'mixed' needs at least 3
A.position=rope model.head_dim=15      | model.head_dim is 15; position 'rope' rotates pairs
"""


def make(base: config.Config, line: str) -> config.Config:
    """Returns a config with the changes of a line, in which `WORDS` stand for several."""
    for word, meaning in WORDS.items():
        line = line.replace(word, meaning)
    return config.override(base, dict(text.split("=", 1) for text in line.split()))


@pytest.mark.parametrize(
    ("base", "table"),
    [(ENCODER, OF_RUNS), (config.load("quickstart"), OF_ATTENTION)],
    ids=["runs", "attention"],
)
def test_settings_that_contradict_are_one_line(base, table):
    for row in table.strip().splitlines():
        line, message = map(str.strip, row.split("|"))
        with mistakes.refused(message):
            make(base, line)


def test_what_fits():
    for line, outputs in (("", None), ("CLASSES", 2), ("task.name=regression", 1)):
        assert make(ENCODER, line).task.outputs == outputs
    assert make(ENCODER, "IMAGES PATCHES CLASSES model.norm=batch").data.batch_size == 8
    attention = config.preset("linear", feature_map="symmetric", power=3)
    assert dataclasses.replace(attention, position="lrpe").power == 3


def test_values_of_a_wrong_type_are_one_line():
    for make_one, message in (
        (lambda: config.TrainingConfig(steps=1e5), "is 100000.0, a float; it must be an int: write 100_000"),
        (lambda: config.TrainingConfig(steps=2.5), "training.steps is 2.5, a float; it must be an int"),
        (lambda: config.TrainingConfig(steps=True), "training.steps is True, a bool; it must be an int"),
        (lambda: config.DataConfig(paths="texts"), "a str; it must be a tuple of str: write ('texts',)"),
        (lambda: config.EvaluationConfig(context_lengths=[8, "16"]), "a tuple; it must be a tuple of int"),
        (lambda: config.OptimizerConfig(clip_norm="1"), "clip_norm is '1', a str; it must be a float or"),
        (lambda: config.ModelConfig(layers=None, width=8, heads=1), "model.layers is None, a NoneType; it"),
        (lambda: config.preset("sympow", form=2), "attention.form is 2, an int; it must be a str or None"),
        (lambda: config.Config(model={}), "model is {}, a dict; it must be a ModelConfig"),
    ):
        with mistakes.refused(message):
            make_one()


def test_an_int_is_a_float_and_a_list_is_a_tuple():
    assert config.OptimizerConfig(learning_rate=1, clip_norm=1).clip_norm == 1.0
    assert config.TrainingConfig(profile_steps=[1, 2]).profile_steps == (1, 2)
    # A number of NumPy could not be written as JSON.
    assert type(config.TrainingConfig(steps=np.int64(7)).steps) is int


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
