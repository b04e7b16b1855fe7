"""Tests that invalid settings of LRPE are rejected."""

import pytest

from sympow_jax import config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"core": "orthogonl"}, "attention.lrpe.core is 'orthogonl'"),
        ({"basis": "dct"}, "attention.lrpe.basis is 'dct'"),
        ({"rates": "d"}, "attention.lrpe.rates is 'd'"),
        ({"reference_length": 0}, "attention.lrpe.reference_length is 0"),
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
    ("core", "head_dim", "message"),
    [
        ("orthogonal", 15, "model.head_dim is 15; attention.lrpe.core 'orthogonal' rotates pairs"),
        ("mixed", 2, "model.head_dim is 2; attention.lrpe.core 'mixed' needs at least 3"),
    ],
)
def test_lrpe_that_cannot_divide_a_head(core, head_dim, message):
    attention = config.AttentionConfig(
        kernel="linear", decay="none", position="lrpe", lrpe=config.LrpeConfig(core=core)
    )
    with pytest.raises(ValueError, match=message):
        config.ModelConfig(
            vocab_size=256, layers=1, width=64, heads=2, head_dim=head_dim, attention=attention
        )
