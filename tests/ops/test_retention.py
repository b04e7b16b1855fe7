"""Tests of power attention against `retention`'s reference on the CPU, an independent implementation in PyTorch.

Runs if it is installed (`uv run --with retention pytest tests/ops/test_retention.py`). Its own epsilons allow agreement
to 1e-5.
"""

import jax
import jax.numpy as jnp
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
    drawn = {name: None if x is None else np.float32(x) for name, x in drawn.items()}
    names = [name for name in cases.GRADIENTS if drawn[name] is not None]

    tensors = {name: torch.tensor(drawn[name], requires_grad=True) for name in names}
    expected = retention.power_retention(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        log_G=tensors.get("log_decay"),
        deg=power,
        chunk_size=chunk_size,
    )
    expected.backward(torch.tensor(drawn["dout"]))

    @jax.jit
    def run(arguments):
        def loss(arguments):
            out = ops.power_attention(**arguments, power=power)
            return jnp.vdot(out, drawn["dout"]), out

        return jax.grad(loss, has_aux=True)(arguments)

    gradients, out = run({name: jnp.asarray(drawn[name]) for name in names})
    assert cases.error(out, expected.detach().numpy()) <= 1e-5
    for name in names:
        assert cases.error(gradients[name], tensors[name].grad.numpy()) <= 1e-5, name
