"""The step kernels as `h100` compiles them: cases, how to build them, and what their bytes predict."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp

from pallas_kernels.power_step import config as configs
from pallas_kernels.power_step import folding, reading

# Kernel, power, head size (of keys and values), batch, key heads, query heads for each.
CASES = [
    *(f"read-p{p}-d{d}-b64-k8-g1" for p, d in ((2, 32), (2, 64), (2, 128), (4, 16), (4, 32))),
    "read-p2-d64-b1-k8-g1",
    "read-p2-d64-b64-k2-g4",
    "read-p2-d64-b1-k1-g16",
    *(f"fold-p{p}-d{d}-b64-k8-g1" for p, d in ((2, 32), (2, 64), (2, 128), (4, 16))),
]
_WINDOW = 64
# Entries of the batch that one call of the fold is given.
_FOLDED = 4
# What copies reach of the data sheet's 3.35 TB/s.
BANDWIDTH = 0.9 * 3.35e12


def build(case: str):
    """The kernel call of a case and the shapes of its arguments."""
    kernel, power, width, batch, kv_heads, group = _sizes(case)
    features, window = math.comb(width + power - 1, power), _WINDOW
    if kernel == "read":
        config = configs.choose(
            heads=batch * kv_heads,
            group=group,
            features=features,
            head_dim=width,
            value_dim=width,
            window=window,
            power=power,
            dtype=jnp.float32,
        )
        shapes = (
            (batch, kv_heads, group, features),
            (batch, kv_heads, features, width),
            (batch, kv_heads, features),
            (batch, kv_heads, group, width),
            (batch, 2 * window, kv_heads, width),
            (batch, 2 * window, kv_heads, width),
            (batch, kv_heads, 2 * window),
        )
        call = functools.partial(reading.read, power=power, config=config)
        return call, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def call(kv, norm, *arrays):
        held = jax.new_ref(kv), jax.new_ref(norm)
        folding.fold(*held, *arrays)
        return tuple(map(jax.freeze, held))

    shapes = (
        ((batch, kv_heads, features, width), jnp.float32),
        ((batch, kv_heads, features), jnp.float32),
        ((_FOLDED,), jnp.int32),
        ((1,), jnp.int32),
        ((_FOLDED, kv_heads, window, features), jnp.float32),
        ((_FOLDED, window, kv_heads, width), jnp.float32),
        ((_FOLDED, kv_heads), jnp.float32),
    )
    return call, [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def predict(case: str, kernels) -> dict:
    """Columns of the table: what the assembler made of a case, and the time that its bytes take."""
    (built,) = kernels
    moved = _bytes(case)
    return {
        "registers": built.registers,
        "shared KB": round(built.shared_bytes / 1024),
        "instructions": built.instructions,
        "MB": f"{moved / 1e6:.1f}",
        "predicted us": f"{1e6 * moved / BANDWIDTH:.1f}",
    }


def _bytes(case):
    """What the kernel has to move: of the fold, the tiles of the entries that are folded, there and back."""
    kernel, power, width, batch, kv_heads, group = _sizes(case)
    features = math.comb(width + power - 1, power)
    state = features * (width + 1)
    if kernel == "read":
        return 4 * batch * kv_heads * (state + group * features + 2 * _WINDOW * 2 * width)
    return 4 * _FOLDED * kv_heads * (2 * state + _WINDOW * (features + width))


def _sizes(case):
    kernel, *sizes = re.fullmatch(r"(\w+)-p(\d+)-d(\d+)-b(\d+)-k(\d+)-g(\d+)", case).groups()
    return kernel, *map(int, sizes)


def step_program(*, segments: bool, devices: tuple[int, ...] = (1,)) -> str:
    """The optimised program of a step with p = 2, D = E = 64 and 64 x 8 heads whose state is donated.

    devices: sizes of the mesh axes over which the batch and the heads are divided.
    """
    from sympow_jax import ops
    from tests.pallas_kernels import h100

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
