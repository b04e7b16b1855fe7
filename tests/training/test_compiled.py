"""Tests that whole training steps, compiled for eight H100s, fit in memory and exchange the designed data."""

import math

import jax
import pytest
from flax import nnx

from sympow_jax import models, ops
from tests.pallas_kernels import marks
from tests.training import compiled

pytestmark = [pytest.mark.h100, marks.needs_compiler, pytest.mark.timeout(compiled.TIMEOUT)]

FIRST = "124m-p2-4096-data8"
# Gathers for positions and documents over `context`: one element per row, head and device, no activations.
SUMMARY = 8192


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != FIRST)) for name in compiled.CASES]
)
def test_a_training_step(name):
    case, found = compiled.CASES[name], compiled.report(name)
    assert found.peak < compiled.MEMORY
    check_kernels(case, found)
    sent = {(x.kind, x.axes): x for x in found.exchanges if x.sent > compiled.SMALL}
    expected = exchanged(case)
    assert set(sent) == set(expected)
    for key, nbytes in expected.items():
        assert sent[key].sent == pytest.approx(nbytes, rel=2e-3), key
    for x in found.exchanges:
        if x.kind == "all-gather" and x.axes != ("fsdp",):
            assert x.axes == ("context",)
            assert x.largest <= SUMMARY


def is_chunked(case):
    """Returns True if the op takes the chunked kernels, as `cost.faster_kernel` does for heads of 64."""
    return case.power == 2 and case.context > 8192


def check_kernels(case, found):
    layers = case.settings().model.layers
    if is_chunked(case):
        # The states before chunks are saved for the backward pass, or else recomputed.
        folds = 2 if case.remat == "none" else 3
        once = dict.fromkeys(("query", "query_vjp", "key_vjp", "decays_vjp"), 1)
        once |= dict.fromkeys(("units", "decays"), folds - 1)
        once |= dict.fromkeys(("scales", "update", "norms", "recurrence"), folds)
        form, prefix = "chunked", "power_state"
    else:
        names = "units blocks forward vjp_sizes vjp_operands query_vjp key_vjp decays_vjp"
        once = dict.fromkeys(names.split(), 1)
        form, prefix = "attention", "power_attention"
    assert found.forms == [f"{form}_mosaic_gpu"]
    assert found.kernels == {f"{prefix}_{name}": times * layers for name, times in once.items()}


def exchanged(case):
    """Returns the bytes that a device sends by kind and axes, from the shapes of the model only."""
    settings = case.settings()
    ((axis, devices),) = case.sharding.items()
    share = (devices - 1) / devices
    params = nnx.state(nnx.eval_shape(lambda: models.make(settings.model, settings.task, rngs=0)), nnx.Param)
    matrices = sum(math.prod(x.shape) for x in jax.tree.leaves(params) if len(x.shape) == 2)
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    if axis == "fsdp":
        return {
            ("all-gather", (axis,)): share * gathered(settings.model),
            ("reduce-scatter", (axis,)): share * 4 * matrices,
        }
    sums = {("all-reduce", (axis,)): 2 * share * 4 * parameters}
    if axis == "data":
        return sums
    return sums | {("collective-permute", (axis,)): moved(settings, devices)}


def gathered(model):
    """Returns the bytes of gathered parameters over all passes.

    Matrices are in bfloat16; decays, rates and the embedding are in float32.
    """
    width, heads = model.width, model.heads
    again = model.remat != "none"
    # Nothing reads the recomputed output of a block's last matrix.
    products = 2 * 12 * width**2 + again * 8 * width**2
    exact = (2 + again) * 2 * width * heads
    return model.layers * (2 * products + 4 * exact) + 4 * model.vocab_size * width


def moved(settings, devices):
    """Returns the bytes of states and windows that a device sends in all passes."""
    model, rows = settings.model, settings.data.batch_size
    size, exact_window = model.head_size, model.attention.exact_window
    rounds = 1 + math.ceil(math.log2(devices - 1))
    state = 4 * ops.symmetric_power_dim(size, model.attention.power) * (size + 1)
    passes = 2 + (model.remat != "none")
    return passes * model.layers * rows * model.heads * (rounds * state + exact_window * 2 * 2 * size)
