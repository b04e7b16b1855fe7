"""Tests of quantities that are carried along chunks, against a loop over chunks in float64."""

import numpy as np
import pytest

from pallas_kernels.power_state import prepare as preparation


# Up to 128 chunks are summed at once, more in runs.
@pytest.mark.parametrize("chunks", [1, 2, 40, 128, 129, 150])
def test_normalizers(chunks):
    random = np.random.default_rng(chunks)
    carry = random.uniform(-3, 0, size=(2, chunks)).astype("float32")
    carry[:, chunks // 2] = -1e5
    new, start = (random.normal(size=(2, *shape, 3, 3)).astype("float32") for shape in ((chunks,), ()))
    states = [start.astype("float64")]
    for chunk in range(chunks):
        states.append(np.exp2(carry[:, chunk, None, None], dtype="float64") * states[-1] + new[:, chunk])
    found = np.asarray(preparation.norms(carry, new, start))
    np.testing.assert_allclose(found, np.stack(states, 1), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("chunks", [1, 40, 129])
def test_scales_keep_states_in_range(chunks):
    random = np.random.default_rng(chunks)
    strength = random.uniform(-20, 20, size=(1, chunks, 4)).astype("float32")
    over_chunk = random.uniform(-3, 0, size=(1, chunks)).astype("float32")
    size = random.uniform(size=(1, chunks, 4)).astype("float32")
    carried = preparation.carry_along(strength, size, over_chunk, np.full(1, 5.0, "float32"))
    largest = [5.0]
    for chunk in range(chunks):
        new = (np.exp2(strength[0, chunk], dtype="float64") * size[0, chunk]).sum()
        largest.append(np.exp2(over_chunk[0, chunk], dtype="float64") * largest[-1] + new)
    scaled = np.array(largest) / np.exp2(np.asarray(carried.shift[0], "float64"))
    # Not above the limit, and no further below it than a power of two.
    assert np.all(scaled <= 2.0**preparation.HEADROOM * (1 + 1e-5))
    assert np.all(scaled > 2.0 ** (preparation.HEADROOM - 1) * (1 - 1e-5))
    shift = np.asarray(carried.shift[0])
    np.testing.assert_allclose(carried.carry[0], np.exp2(over_chunk[0] + shift[:-1] - shift[1:]), rtol=1e-6)
