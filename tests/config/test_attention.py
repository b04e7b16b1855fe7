"""Tests that incompatible kernels, decays and positions are rejected."""

import dataclasses

import pytest

from sympow_jax import config

LINEAR = {"kernel": "linear", "decay": "none"}
BOTH_WAYS = {"causal": False, "decay": "none"}


def attention(**settings):
    return lambda: config.AttentionConfig(**settings)


def rope(**settings):
    return lambda: config.RopeConfig(**settings)


def lrpe(**settings):
    return lambda: config.LrpeConfig(**settings)


def model(head_dim, **settings):
    positions = config.AttentionConfig(**LINEAR, position="lrpe", lrpe=config.LrpeConfig(**settings))
    sizes = {"vocab_size": 256, "layers": 1, "width": 64, "heads": 2}
    return lambda: config.ModelConfig(**sizes, head_dim=head_dim, attention=positions)


def task(name, *, causal):
    kind = config.ModelConfig(
        **config.MODEL_SIZES["quickstart"], attention=config.preset("softmax", causal=causal)
    )
    return lambda: config.Config(model=kind, task=config.TaskConfig(name=name))


MISTAKES = (
    (
        attention(kernel="linear", decay="channel_learned"),
        "kernel 'power' has and 'linear' has not; use 'learned'",
    ),
    (
        attention(decay="channel_fixed", form="attention"),
        "which has the chunked form alone, and attention.form 'att",
    ),
    (
        attention(**BOTH_WAYS),
        "attention.causal is False, which the kernel 'power' has not; use kernel 'linear'",
    ),
    (
        attention(**BOTH_WAYS, kernel="sliding_window"),
        "which the kernel 'sliding_window' has not; use kernel 'linear'",
    ),
    (attention(kernel="softmax", decay="alibi", causal=False), "decays run in one direction: use 'none'"),
    (attention(power=3), "attention.power is 3; it must be positive and even"),
    (attention(**LINEAR, feature_map="symmetric", power=0), "attention.power is 0; it must be at least 1"),
    (attention(form="recurrent", chunk_size=64), "attention.chunk_size is 64 and attention.form 'recurrent'"),
    (attention(kernel="sliding_window", window=0), "attention.window is 0; it must be at least 1"),
    (attention(decay_bias=101.0), "attention.decay_bias is 101.0; it must be at least -100 and at most 100"),
    (rope(base=1.0), "attention.rope.base is 1.0; it must be above 1"),
    (rope(scaling="llama3"), "attention.rope.base None; set the base of the rates that are scaled"),
    (rope(factor=0.5), "attention.rope.factor is 0.5; it must be at least 1"),
    (rope(low_frequency_factor=4.0), "high_frequency_factor 4.0; the second must be larger"),
    (lrpe(reference_length=0), "attention.lrpe.reference_length is 0; it must be at least 1"),
    (lrpe(permutation_per_head=True), "but core is 'orthogonal'; only 'permutation' permutes"),
    (lrpe(learned_rates=True, core="permutation"), "core 'permutation' has no rates"),
    (model(15), "model.head_dim is 15; attention.lrpe.core 'orthogonal' rotates pairs of dimensions"),
    (model(2, core="mixed"), "model.head_dim is 2; attention.lrpe.core 'mixed' needs at least 3"),
    (task("next_token", causal=False), "model.attention.causal is False and task.name 'next_token'"),
    (task("masked_token", causal=True), "model.attention.causal is True and task.name 'masked_token'"),
)


def test_attention_that_cannot_be_is_one_line():
    for make, message in MISTAKES:
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            make()
        assert message in str(raised.value)
        assert "\n" not in str(raised.value)


def test_odd_powers_are_feature_maps():
    attention = config.preset("linear", feature_map="symmetric", power=3)
    assert dataclasses.replace(attention, position="lrpe").power == 3
