"""Tests of the normalizers of chunks, interpreted, against their definition in float64."""

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.power_state.square import norms
from tests.ops import cases

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(120)]


@pytest.mark.parametrize(("head_dim", "blocks"), [(32, 1), (64, 6), (128, 3)])
def test_norms(head_dim, blocks):
    """Keys have the bits of bfloat16; weights have either sign, and six blocks fill the ring twice."""
    heads, chunks = 2, 2
    random = np.random.default_rng(0)
    key = random.uniform(-1, 1, size=(heads, head_dim, chunks, blocks, 64))
    key = np.asarray(jax.numpy.asarray(key, "bfloat16").astype("float16"))
    weights = random.uniform(-1, 1, size=(heads, chunks, blocks, 64)).astype("float32")
    found = norms.norms(
        key.reshape(heads, head_dim, -1), weights, interpret=plgpu.InterpretGPUParams(detect_races=True)
    )
    key = key.astype("float64")
    expected = np.einsum("hincx,hncx,hjncx->hnij", key, weights.astype("float64"), key)
    assert found.shape == expected.shape
    assert cases.error(found, expected) <= 2e-6
