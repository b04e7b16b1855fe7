"""Compiles a step with a donated state for H100s, by the kernels, and prints the program.

    python -m tests.pallas_kernels.donated plain|segments|divided

Runs in a separate process, since LLVM may crash it.
"""

import dataclasses
import os
import sys

import jax
import jax.numpy as jnp

from sympow_jax import ops
from tools import h100

# Whether there are documents, and the sizes of the mesh axes over which batch and heads are sharded.
PROGRAMS = {"plain": (False, (1,)), "segments": (True, (1,)), "divided": (True, (4, 2))}


def program(segments: bool, devices: tuple[int, ...]) -> str:
    """Returns the optimized program of a step with p = 2, D = E = 64 and 64 x 8 heads whose state is donated.

    devices: sizes of the mesh axes over which batch and heads are sharded.
    """

    def call(state, query, key, value, log_decay, *segment_ids):
        return ops.power_attention_step(
            query,
            key,
            value,
            state,
            log_decay=log_decay,
            segment_ids=segment_ids[0] if segments else None,
            implementation="mosaic_gpu",
        )

    batch, kv_heads, width = 64, 8, 64
    on = h100.mesh(devices, ("data", "model")[: len(devices)])

    def placed(shape, dtype, heads_axis=None):
        axes = [None] * len(shape)
        axes[0] = "data"
        if heads_axis and len(devices) > 1:
            axes[heads_axis] = "model"
        sharding = jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    state = jax.eval_shape(lambda: ops.PowerState.zeros(batch, kv_heads, width, width, power=2))
    heads_axes = {"kv": 1, "norm": 1, "keys": 2, "values": 2, "log_decays": 2}
    fields = {
        field.name: placed(x.shape, x.dtype, heads_axes.get(field.name))
        for field in dataclasses.fields(state)
        for x in [getattr(state, field.name)]
    }
    token = [placed((batch, kv_heads, width), jnp.bfloat16, 1)] * 3
    token.append(placed((batch, kv_heads), jnp.float32, 1))
    if segments:
        token.append(placed((batch,), jnp.int32))
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
        traced = jax.jit(call, donate_argnums=0).trace(ops.PowerState(**fields), *token)
    return traced.lower().compile().as_text()


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(program(*PROGRAMS[sys.argv[1]]))
