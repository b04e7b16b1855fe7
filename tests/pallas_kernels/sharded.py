"""Compiles user programs for H100s by the kernels, and prints the program.

    python -m tests.pallas_kernels.sharded attention|chunked|again|rounded|training-attention|training-chunked
    python -m tests.pallas_kernels.sharded step|step-documents|step-sharded

Runs in a separate process, since LLVM may crash it.
"""

import dataclasses
import functools
import os
import sys

import jax
import jax.numpy as jnp

from sympow_jax import config, ops
from sympow_jax.training import Program
from tools import h100

Spec = jax.sharding.PartitionSpec


# Names that `jax.checkpoint` saves so that the states before chunks are recomputed.
AGAIN = jax.checkpoint_policies.save_only_these_names("power_attention_out")


def op(form: str, policy=None):
    """Returns gradients of the op, batch and heads sharded over a mesh of 4 x 2; with a policy, of its checkpoint."""

    def loss(query, key, value, log_decay, segment_ids):
        out = ops.power_attention(
            query,
            key,
            value,
            log_decay=log_decay,
            segment_ids=segment_ids,
            form=form,
            implementation="mosaic_gpu",
        )
        return out.sum(dtype=jnp.float32)

    loss = loss if policy is None else jax.checkpoint(loss, policy=policy)
    batch, time, heads, kv_heads, size = 4, 256, 4, 2, 64
    arguments = [
        jax.ShapeDtypeStruct((batch, time, n, size), jnp.bfloat16) for n in (heads, kv_heads, kv_heads)
    ]
    arguments.append(jax.ShapeDtypeStruct((batch, time, kv_heads), jnp.float32))
    arguments.append(jax.ShapeDtypeStruct((batch, time), jnp.int32))
    specs = [Spec("data", None, "model")] * 4 + [Spec("data")]
    on = h100.mesh((4, 2), ("data", "model"))
    return h100.compile_for(on, jax.grad(loss, (0, 1, 2, 3)), *arguments, specs=specs)


def rounded():
    """Returns a gradient whose queries, keys and values are rounded from float32 in the same program."""

    def loss(*arrays):
        narrow = [jnp.sin(x).astype(jnp.bfloat16) for x in arrays]
        options = {"form": "attention", "implementation": "mosaic_gpu"}
        return ops.power_attention(*narrow, power=2, **options).astype(jnp.float32).sum()

    arrays = [jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.float32)] * 3
    return h100.compile_for(h100.mesh(), jax.grad(loss, (0, 1, 2)), *arrays)


def step(documents: bool, devices: tuple[int, int] = (1, 1)):
    """Returns a step with p = 2, D = E = 64 and 64 x 8 heads whose state is donated.

    devices: sizes of the mesh axes over which batch and heads are sharded.
    """

    def call(state, query, key, value, log_decay, segment_ids):
        options = {"log_decay": log_decay, "segment_ids": segment_ids, "implementation": "mosaic_gpu"}
        return ops.power_attention_step(query, key, value, state, **options)

    batch, kv_heads, width = 64, 8, 64
    state = jax.eval_shape(lambda: ops.PowerState.zeros(batch, kv_heads, width, width, power=2))
    vector = jax.ShapeDtypeStruct((batch, kv_heads, width), jnp.bfloat16)
    gate = jax.ShapeDtypeStruct((batch, kv_heads), jnp.float32)
    ids = jax.ShapeDtypeStruct((batch,), jnp.int32) if documents else None
    by_row, by_head, of_window = Spec("data"), Spec("data", "model"), Spec("data", None, "model")
    of_state = dataclasses.replace(
        jax.tree.map(lambda _: by_row, state),
        **dict.fromkeys(("kv", "norm"), by_head),
        **dict.fromkeys(("keys", "values", "log_decays"), of_window),
    )
    specs = of_state, *[by_head] * 4, by_row if documents else None
    on = h100.mesh(devices, ("data", "model"))
    return h100.compile_for(on, call, state, vector, vector, vector, gate, ids, specs=specs, donated=(0,))


def training(form: str):
    """Returns an update of one layer of the papers' model by the kernels of a form, sharded over eight devices."""
    context, rows = {"attention": 4096, "chunked": 16_384}[form], 8
    attention = dataclasses.replace(
        config.preset("conformal_paper", power=2), form=form, implementation="mosaic_gpu"
    )
    model = config.ModelConfig(
        **config.MODEL_SIZES["gpt2_124m"] | {"layers": 1, "vocab_size": 512}, attention=attention
    )
    data = config.DataConfig(context_length=context, batch_tokens=rows * context)
    settings = config.Config(model=model, data=data)
    mesh = h100.mesh((8,))
    tokens = jax.ShapeDtypeStruct(
        (rows, context), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, Spec("data"))
    )
    batch = {name: tokens for name in ("inputs", "targets", "segment_ids")}
    program = Program(settings, mesh)
    return program.update.trace(program.abstract, batch).lower().compile()


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    compiled = {
        "attention": functools.partial(op, "attention"),
        "chunked": functools.partial(op, "chunked"),
        "again": functools.partial(op, "chunked", AGAIN),
        "rounded": rounded,
        "step": functools.partial(step, documents=False),
        "step-documents": functools.partial(step, documents=True),
        "step-sharded": functools.partial(step, documents=True, devices=(4, 2)),
        "training-attention": functools.partial(training, "attention"),
        "training-chunked": functools.partial(training, "chunked"),
    }[sys.argv[1]]()
    print(compiled.as_text())
