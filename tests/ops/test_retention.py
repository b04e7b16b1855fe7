"""Tests of power attention against `retention`'s reference on the CPU, an independent implementation in PyTorch.

Runs if it is installed (`uv run --with retention pytest tests/ops/test_retention.py`). Its own epsilons allow agreement
to 1e-5.
"""

import numpy as np
import pytest

from sympow_jax import ops
from tests.ops import cases

torch = pytest.importorskip("torch")
retention = pytest.importorskip("retention.reference")


@pytest.mark.parametrize(
    ("power", "chunk_size"),
    [(2, None), (4, None), (6, None), (2, 32)],
    ids=["p2", "p4", "p6", "p2 in chunks"],
)
@pytest.mark.parametrize("decay", ["none", "gentle"])
@pytest.mark.parametrize("group", [1, 2])
def test_values_and_gradients(power, chunk_size, decay, group):
    drawn = cases.arrays(cases.Case(power=power, time=128, decay=decay, group=group), kv_heads=2)
    tensors = {
        name: torch.tensor(np.float32(drawn[name]), requires_grad=True)
        for name in cases.GRADIENTS
        if drawn[name] is not None
    }
    arrays = [tensors[name] for name in ("query", "key", "value")]
    log_g = tensors.get("log_decay")
    expected = retention.power_retention(*arrays, log_G=log_g, deg=power, chunk_size=chunk_size)
    expected.backward(torch.tensor(np.float32(drawn["dout"])))
    actual = cases.outputs_and_gradients(ops.power_attention, drawn, "float32", power=power)
    assert cases.error(actual["out"], expected.detach().numpy()) <= 1e-5
    for name, tensor in tensors.items():
        assert cases.error(actual[name], tensor.grad.numpy()) <= 1e-5, name
