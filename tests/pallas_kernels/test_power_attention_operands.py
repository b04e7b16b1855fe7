"""Tests that the forward and the backward pass of the attention form multiply the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.power_attention import config as configs
from pallas_kernels.power_attention import operands, vjp_operands


@pytest.mark.parametrize(("power", "dtype"), [(2, "bfloat16"), (4, "float16"), (6, "bfloat16")])
def test_both_passes_have_the_same_queries_and_keys(power, dtype):
    """A weight that is alone in its sum is 1, however small its score, only if both passes round alike."""
    random = np.random.default_rng(0)
    shape = 2, 256, 3, 32
    # Entries of one vector differ by up to 2^20: some are not normal numbers in float16.
    query, key = (random.normal(size=shape) * 2.0 ** random.integers(-20, 1, shape) for _ in range(2))
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, random.normal(size=shape)))
    options = {"power": power, "log_decay": None, "segment_ids": None}
    sizes = {"head_dim": 32, "value_dim": 32, "power": power, "dtype": query.dtype}
    forward, _ = operands.prepare(query, key, value, config=configs.choose(**sizes), **options)
    some = jnp.ones(shape[:3])
    backward, *_ = vjp_operands.prepare(
        query,
        key,
        value,
        jnp.asarray(value, jnp.float32),
        some,
        some.astype(jnp.int32),
        value,
        config=configs.choose_vjp(**sizes),
        **options,
    )
    for name in ("query", "key"):
        found, expected = getattr(backward, name), getattr(forward, name)
        assert found.dtype == expected.dtype == jnp.float16
        np.testing.assert_array_equal(jax.device_get(found), jax.device_get(expected))
