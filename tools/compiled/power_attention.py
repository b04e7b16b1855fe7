"""Cases of the attention kernels that are compiled for an H100, and the time predicted for them."""

import re

import jax
import jax.numpy as jnp

from pallas_kernels import power_attention
from pallas_kernels.power_attention import config
from tools import h100

WIDTHS = (16, 32, 64, 96, 128)
# Power, head size, value size, dtype.
CASES = [
    f"p{power}-d{head_dim}-e{value_dim}-bfloat16"
    for power in (2, 4)
    for head_dim, value_dim in ((16, 16), (32, 32), (64, 64), (128, 128), (64, 128))
] + ["p6-d64-e64-bfloat16", "p8-d128-e128-bfloat16", "p2-d64-e64-float16", "p2-d80-e40-bfloat16"]

# All widths that the kernel supports, at its highest power.
RARE = [f"p16-d{head_dim}-e{value_dim}-bfloat16" for head_dim in WIDTHS for value_dim in WIDTHS]


def build(case: str):
    """Returns the kernel, with GQA, decay and documents."""
    power, sizes, dtype, _ = _parsed(case)

    def call(query, key, value, log_decay, segment_ids):
        arrays = {"log_decay": log_decay, "segment_ids": segment_ids}
        return power_attention.power_attention(query, key, value, power=power, **arrays)

    time, heads, kv_heads = 1000, 4, 2
    return call, (
        jax.ShapeDtypeStruct((1, time, heads, sizes["head_dim"]), dtype),
        jax.ShapeDtypeStruct((1, time, kv_heads, sizes["head_dim"]), dtype),
        jax.ShapeDtypeStruct((1, time, kv_heads, sizes["value_dim"]), dtype),
        jax.ShapeDtypeStruct((1, time, kv_heads), jnp.float32),
        jax.ShapeDtypeStruct((1, time), jnp.int32),
    )


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str] | None:
    """Returns the loop over full blocks of keys, and the time for 65,536 tokens of 8 heads.

    Kernels that prepare queries, keys and values are left out.

    Two warpgroups share a multiprocessor's tensor cores and schedulers. A step takes the longer of both their tensor
    cycles and one's tensor cycles, instructions and waits in a row.
    """
    if not kernel.hgmma:
        return None
    *_, chosen = _parsed(case)
    # The shortest loop that multiplies matrices and rounds weights; m64nNk16 takes N / 2 cycles.
    counts = next(loop for loop in kernel.loops if loop["HGMMA"] and loop["F2FP"])
    tensor = chosen.head_dim // 16 * chosen.block // 2 + chosen.block // 16 * chosen.value_dim // 2
    step = max(2 * tensor, tensor + counts["instructions"] + h100.ATTENTION_WAITING_CYCLES["forward"])
    blocks = 65_536 // chosen.block
    steps = 8 * blocks * (blocks + 1) / 2 / h100.MULTIPROCESSORS
    return [h100.Loop("keys", counts, tensor)], f"{1e3 * steps * step / h100.SUSTAINED_HERTZ:.1f} ms"


def _parsed(case):
    power, head_dim, value_dim, dtype = re.fullmatch(r"p(\d+)-d(\d+)-e(\d+)-(\w+)", case).groups()
    sizes = {"head_dim": int(head_dim), "value_dim": int(value_dim)}
    dtype = jnp.dtype(dtype)
    return int(power), sizes, dtype, config.choose(power=int(power), dtype=dtype, **sizes)
