"""Tests of the code around the state kernels: tiles and constraints, quantities carried along chunks, and results."""

import contextlib
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import power_state
from pallas_kernels.hopper import results
from pallas_kernels.power_state import preparation, recurrence, reshaping
from tests.pallas_kernels import plain

SIZES = {"power": 2, "head_dim": 64, "value_dim": 64, "time": 128, "heads": 1, "dtype": jnp.bfloat16}


def test_what_the_kernels_cannot_do_is_named():
    quartic = {"power": 4, "head_dim": 16, "value_dim": 16}
    for changes, message in (
        ({"power": 6}, "need power 2 or 4"),
        ({"dtype": jnp.float32}, "need bfloat16 inputs, not float32"),
        ({"head_dim": 144}, "need.*head_dim"),
        ({"value_dim": 136}, "need.*value_dim"),
        ({"chunk": 100}, "need a chunk"),
        ({"chunk": 1 << 16}, "need.*positions in a chunk"),
        ({"chunk": 16_384}, "need at most 10240 positions .* not 16448"),
        (
            {"head_dim": 128, "value_dim": 128, "chunk": 3072},
            "need a chunk shorter than 3072, for shared memory",
        ),
        ({"exact_window": 10}, "need.*exact_window"),
        ({"time": 5_000_000}, "need at most 4194176 positions, not 5000000"),
        (quartic | {"head_dim": 64}, "need.*head_dim.*power 4"),
        (quartic | {"value_dim": 48}, "need.*value_dim.*power 4"),
        (quartic | {"chunk": 16_384}, "need at most 10240 positions .* not 16448"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            power_state.choose(**SIZES | changes)


@pytest.mark.parametrize(("power", "size"), [(2, 16), (2, 64), (2, 80), (2, 128), (4, 16), (4, 32)])
def test_a_chunk_for_any_row_is_one_that_the_kernels_take(power, size):
    """Short rows are one chunk; the chunks of long rows divide among two or more warpgroups."""
    for time in (1, 64, 385, 700, 4096, 1_000_000):
        sizes = {"power": power, "head_dim": size, "value_dim": size, "time": time, "heads": 8}
        config = power_state.choose(**sizes, dtype=jnp.bfloat16)
        assert config.chunk % (64 * config.query_blocks) == 0
        assert time <= config.chunk < time + 192 or config.chunk >= 384
        assert config.query_blocks >= 2 or time <= 384
        assert config.key_vjp_blocks == 2 or power == 2 or time <= 700


def test_few_rows_have_shorter_chunks():
    """But one chunk stays one."""
    for time, heads, chunk in ((4096, 8, 512), (8192, 8, 768), (4096, 16, 768), (768, 8, 768), (769, 8, 512)):
        assert power_state.choose(**SIZES | {"time": time, "heads": heads}).chunk == chunk


def test_few_heads_walk_segments_of_time_side_by_side():
    """The number of thread blocks is at most that of multiprocessors, and no segment is without a chunk."""
    for time, heads, segments in ((65_536, 8, 4), (65_536, 96, 1), (1000, 1, 2)):
        assert power_state.choose(**SIZES | {"time": time, "heads": heads}).segments == segments


def test_results_are_whole_tiles():
    """TMA's tensor maps need whole tiles; the interpreter does not."""
    shapes = [
        results.kind(batch_time, 6, 64, jnp.bfloat16).shape for batch_time in ((2, 304), (3, 301), (1, 5))
    ]
    assert shapes == [(2, 304, 3, 64), (3, 304, 2, 64), (1, 64, 6, 64)]


@pytest.mark.interpret
@pytest.mark.parametrize("chunks", [2, 32, 37])
def test_normalizers(chunks):
    random = np.random.default_rng(chunks)
    carry = np.exp2(random.uniform(-3, 0, size=(2, chunks)).astype("float32"))
    carry[:, chunks // 2] = 0
    log2_unit = random.uniform(-2, 2, size=(2, chunks)).astype("float32")
    shift = random.integers(-2, 2, size=(2, chunks + 1)).astype("int32")
    factor = np.exp2(log2_unit - shift[:, 1:], dtype="float32")
    new = random.normal(size=(2, chunks, 16, 16)).astype("float32")
    states = [np.zeros((2, 16, 16))]
    for carried, added, x in zip(
        *(np.moveaxis(a, 1, 0)[..., None, None] for a in (carry, factor)), np.moveaxis(new, 1, 0)
    ):
        states.append(carried * states[-1] + added * x)
    parts, last = recurrence.recurrence(
        recurrence.Scales(shift, carry, None, None),
        log2_unit,
        new,
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    before = reshaping.unsplit(parts)
    np.testing.assert_allclose(before, np.stack(states[:-1], 1), rtol=2.0**-17, atol=2e-6)
    np.testing.assert_allclose(last, states[-1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("chunks", "interpret"),
    [
        (1, None),
        (129, None),
        pytest.param(37, plgpu.InterpretGPUParams(detect_races=True), marks=pytest.mark.interpret),
    ],
)
def test_scales_keep_states_in_range(chunks, interpret):
    random = np.random.default_rng(chunks)
    strength = random.uniform(-20, 20, size=(1, chunks, 4)).astype("float32")
    over_chunk = random.uniform(-3, 0, size=(1, chunks)).astype("float32")
    size = random.uniform(size=(1, chunks, 4)).astype("float32")
    in_norm = random.normal(size=(1, chunks, 4)).astype("float32")
    in_norm[:, :, 0] = 0
    with plain.kernels() if interpret is None else contextlib.nullcontext():
        call = mock.Mock(config=mock.Mock(segments=1), interpret=interpret)
        carried = preparation.carry_along(strength, size, in_norm, over_chunk, call)
    largest = [0.0]
    for chunk in range(chunks):
        new = (np.exp2(strength[0, chunk], dtype="float64") * size[0, chunk]).sum()
        largest.append(np.exp2(over_chunk[0, chunk], dtype="float64") * largest[-1] + new)
    scaled = np.array(largest) / np.exp2(np.asarray(carried.scales.shift[0], "float64"))
    # Not above the limit, and no further below it than a power of two.
    assert np.all(scaled <= 2.0**recurrence.HEADROOM * (1 + 1e-5))
    assert np.all(scaled[1:] > 2.0 ** (recurrence.HEADROOM - 1) * (1 - 1e-5))
    shift = np.asarray(carried.scales.shift[0])
    wanted = np.exp2(over_chunk[0] + shift[:-1] - shift[1:])
    np.testing.assert_allclose(carried.scales.carry[0, 1:], wanted[1:], rtol=1e-6)
    assert carried.scales.carry[0, 0] == 0
    assert np.all(np.abs(carried.norm_weights) <= 1)
    weights = carried.norm_weights * np.exp2(carried.log2_norm_unit)[..., None]
    np.testing.assert_allclose(weights, np.exp2(strength) * in_norm, rtol=1e-5)
