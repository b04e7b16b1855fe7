"""Compiles the op by its kernels for eight H100s, batch and heads divided over them, and prints the program.

    python -m tests.pallas_kernels.sharded chunked

A process of its own, since LLVM may end it.
"""

import os
import sys

import jax
import jax.numpy as jnp

from sympow_jax import ops
from tests.pallas_kernels import h100


def main(form: str) -> None:
    """Values and gradients of the op in that form, or of the step."""

    def loss(query, key, value, log_decay, segment_ids):
        return ops.power_attention(
            query,
            key,
            value,
            log_decay=log_decay,
            segment_ids=segment_ids,
            form=form,
            implementation="mosaic_gpu",
        ).sum(dtype=jnp.float32)

    batch, time, heads, kv_heads, size = 4, 256, 4, 2, 64
    arguments = [
        jax.ShapeDtypeStruct((batch, time, n, size), jnp.bfloat16) for n in (heads, kv_heads, kv_heads)
    ]
    arguments.append(jax.ShapeDtypeStruct((batch, time, kv_heads), jnp.float32))
    arguments.append(jax.ShapeDtypeStruct((batch, time), jnp.int32))
    whole, tokens = (jax.sharding.PartitionSpec(*axes) for axes in (("data", None, "model"), ("data",)))
    on = h100.mesh((4, 2), ("data", "model"))
    gradients = jax.grad(loss, (0, 1, 2, 3))
    print(h100.compile_for(on, gradients, *arguments, specs=[whole] * 4 + [tokens]).as_text())


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    main(*sys.argv[1:])
