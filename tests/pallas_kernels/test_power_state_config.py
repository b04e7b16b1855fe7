"""Tests of the chunks chosen for the state kernels."""

import jax.numpy as jnp
import pytest

from pallas_kernels import power_state


@pytest.mark.parametrize(("power", "size"), [(2, 16), (2, 64), (2, 80), (2, 128), (4, 16), (4, 32)])
@pytest.mark.parametrize("time", [1, 64, 385, 700, 4096, 1_000_000])
def test_a_chunk_for_any_row_is_one_that_the_kernels_take(power, size, time):
    """Short rows are one chunk; the chunks of long rows divide among two or more warpgroups."""
    config = power_state.choose(
        power=power, head_dim=size, value_dim=size, time=time, heads=8, dtype=jnp.bfloat16
    )
    assert config.chunk % (64 * config.query_blocks) == 0
    assert time <= config.chunk < time + 192 or config.chunk >= 384
    assert config.query_blocks >= 2 or time <= 384
    assert config.key_vjp_blocks == 2 or power == 2 or time <= 700


def test_few_heads_walk_segments_of_time_side_by_side():
    """The number of thread blocks is at most that of multiprocessors, and no segment is without a chunk."""
    sizes = {"power": 2, "head_dim": 64, "value_dim": 64, "dtype": jnp.bfloat16}
    assert power_state.choose(**sizes, time=65_536, heads=8).segments == 4
    assert power_state.choose(**sizes, time=65_536, heads=96).segments == 1
    assert power_state.choose(**sizes, time=1000, heads=1).segments == 2


@pytest.mark.parametrize(
    ("power", "size", "chunk", "message"),
    [
        (2, 64, 16_384, "need at most 16384 positions .* not 16448"),
        (4, 16, 16_384, "need at most 16384 positions .* not 16448"),
        (2, 64, 15_360, "need a chunk shorter than 15360, for shared memory"),
    ],
)
def test_chunks_that_are_too_long_are_refused(power, size, chunk, message):
    sizes = {"power": power, "head_dim": size, "value_dim": size, "chunk": chunk, "time": 10**6, "heads": 8}
    with pytest.raises(NotImplementedError, match=message):
        power_state.choose(**sizes, dtype=jnp.bfloat16)
