"""Tests that incompatible kernels, decays and positions are rejected."""

import dataclasses
import re

import pytest

from sympow_jax import config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kernel": "linear", "decay": "channel_learned"},
            "attention.decay is 'channel_learned', which the kernel 'power' has and 'linear' has not; use 'learned'",
        ),
        (
            {"kernel": "power", "decay": "channel_fixed", "form": "attention"},
            "attention.decay is 'channel_fixed', which has the chunked form alone, and attention.form 'attention'",
        ),
        (
            {"kernel": "power", "decay": "none", "causal": False},
            "attention.causal is False, which the kernel 'power' has not; use kernel 'linear' with feature_map",
        ),
        (
            {"kernel": "softmax", "decay": "alibi", "causal": False},
            "attention.causal is False and attention.decay 'alibi'; decays run in one direction: use 'none'",
        ),
        ({"kernel": "power", "power": 3}, "attention.power is 3; it must be positive and even"),
        (
            {"kernel": "linear", "decay": "none", "feature_map": "symmetric", "power": 0},
            "attention.power is 0; it must be at least 1",
        ),
        (
            {"form": "recurrent", "chunk_size": 64},
            "attention.chunk_size is 64 and attention.form 'recurrent', which updates the state one token at a time",
        ),
        ({"kernel": "sliding_window", "window": 0}, "attention.window is 0; it must be at least 1"),
        (
            {"kernel": "sliding_window", "decay": "none", "causal": False},
            "attention.causal is False, which the kernel 'sliding_window' has not; use kernel 'linear' with "
            "feature_map 'symmetric', or kernel 'softmax'",
        ),
        ({"feature_map": "exp"}, "attention.feature_map is 'exp'; it must be one of elu, relu"),
        ({"normalizer": "none"}, "attention.normalizer is 'none'; it must be one of unrotated, rotated"),
    ],
)
def test_attention_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        config.AttentionConfig(**settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base": 1.0}, "attention.rope.base is 1.0; it must be above 1"),
        (
            {"scaling": "llama3"},
            "attention.rope.scaling is 'llama3' and attention.rope.base None; set the base of the rates",
        ),
        ({"factor": 0.5}, "attention.rope.factor is 0.5; it must be at least 1"),
        (
            {"low_frequency_factor": 4.0},
            "attention.rope.low_frequency_factor is 4.0 and attention.rope.high_frequency_factor 4.0; they must",
        ),
        (
            {"layout": "thirds"},
            "attention.rope.layout is 'thirds'; it must be one of pairs, halves",
        ),
    ],
)
def test_rope_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        config.RopeConfig(**settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("causal", "task"), [(False, "next_token"), (True, "masked_token")])
def test_a_task_and_a_direction_go_together(causal, task):
    attention = config.preset("softmax", causal=causal)
    model = config.ModelConfig(**config.MODEL_SIZES["quickstart"], attention=attention)
    with pytest.raises(ValueError, match=f"model.attention.causal is {causal} and task.name '{task}'"):
        config.Config(model=model, task=config.TaskConfig(name=task))


def test_odd_powers_are_feature_maps():
    attention = config.preset("linear", feature_map="symmetric", power=3)
    assert dataclasses.replace(attention, position="lrpe").power == 3
