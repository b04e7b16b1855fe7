"""Tests that invalid settings of LRPE and SPE are rejected."""

import pytest

from sympow_jax import config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"core": "orthogonl"}, "attention.lrpe.core is 'orthogonl'"),
        ({"basis": "dct"}, "attention.lrpe.basis is 'dct'"),
        ({"rates": "d"}, "attention.lrpe.rates is 'd'"),
        ({"identity_dim": -1}, "attention.lrpe.identity_dim is -1"),
        (
            {"identity_dim": 2, "core": "unitary"},
            "only core 'orthogonal' has an identity part, not 'unitary'",
        ),
        ({"reference_length": 0}, "attention.lrpe.reference_length is 0"),
        ({"learned_basis": True}, "only 'householder' can be learned"),
        (
            {"permutation_per_head": True},
            "permutation_per_head is set but core is 'orthogonal'; only 'permutation' permutes",
        ),
        ({"learned_rates": True, "core": "permutation"}, "core 'permutation' has no rates"),
    ],
)
def test_lrpe_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message) as raised:
        config.LrpeConfig(**settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "head_dim", "message"),
    [
        ({"identity_dim": 18}, 16, "attention.lrpe.identity_dim is 18, larger than model.head_dim 16"),
        ({"identity_dim": 3}, 16, "model.head_dim is 16 and attention.lrpe.identity_dim 3; .* must be even"),
        ({}, 15, "model.head_dim is 15 and attention.lrpe.identity_dim 0; .* must be even"),
        ({"core": "mixed"}, 2, "model.head_dim is 2; attention.lrpe.core 'mixed' needs at least 3"),
    ],
)
def test_lrpe_that_cannot_divide_a_head(settings, head_dim, message):
    attention = config.AttentionConfig(
        kernel="linear", decay="none", position="lrpe", lrpe=config.LrpeConfig(**settings)
    )
    with pytest.raises(ValueError, match=message):
        config.ModelConfig(
            vocab_size=256, layers=1, width=64, heads=2, head_dim=head_dim, attention=attention
        )


def test_spe_that_cannot_be():
    with pytest.raises(ValueError, match=r"attention\.spe\.sines is 0"):
        config.SpeConfig(sines=0)
