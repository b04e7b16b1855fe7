"""The attention kernels of both passes, compiled for an H100."""

import jax
import jax.numpy as jnp

from pallas_kernels import power_attention
from tools import h100

WIDTHS = (16, 32, 64, 96, 128)
# Power, head size, value size, dtype.
CASES = [
    f"p{power}-d{head_dim}-e{value_dim}-bfloat16"
    for power in (2, 4)
    for head_dim, value_dim in ((16, 16), (32, 32), (64, 64), (128, 128), (64, 128))
] + [
    "p6-d64-e64-bfloat16",
    "p8-d64-e64-bfloat16",
    "p8-d128-e128-bfloat16",
    "p2-d64-e64-float16",
    "p2-d80-e40-bfloat16",
]
# All widths that the kernels support, at their highest power.
RARE = [f"p16-d{head_dim}-e{value_dim}-bfloat16" for head_dim in WIDTHS for value_dim in WIDTHS]


def build(case: str):
    """Returns both passes, with GQA, decay and documents, and the shapes of their arguments."""
    sizes, dtype = h100.parsed(case), jnp.dtype(case.rpartition("-")[2])
    time, heads, kv_heads = 1000, 4, 2

    def both_passes(query, key, value, dout, log_decay, segment_ids):
        options = {"power": sizes["p"], "log_decay": log_decay, "segment_ids": segment_ids}
        saved = power_attention.power_attention(query, key, value, **options)
        return saved, power_attention.power_attention_vjp(query, key, value, dout, saved=saved, **options)

    vectors = [(heads, sizes["d"]), (kv_heads, sizes["d"]), (kv_heads, sizes["e"]), (heads, sizes["e"])]
    return both_passes, (
        *(jax.ShapeDtypeStruct((1, time, *shape), dtype) for shape in vectors),
        jax.ShapeDtypeStruct((1, time, kv_heads), jnp.float32),
        jax.ShapeDtypeStruct((1, time), jnp.int32),
    )
