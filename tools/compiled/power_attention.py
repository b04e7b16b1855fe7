"""The attention kernels of both passes, compiled for an H100, and the time predicted for them."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import power_attention
from pallas_kernels.power_attention import configs
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
# Cycles that a step of each kernel waits, for the last wgmma of each product, barriers and sums; guesses.
WAITING_CYCLES = {"forward": 250, "query_vjp": 300, "key_vjp": 350, "value_vjp": 250}


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


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str] | None:
    """Returns the loop over full blocks, and the time for 65,536 tokens of 8 heads; None for kernels that prepare.

    Two warpgroups share a multiprocessor's tensor cores and schedulers. A step takes the longest of both their tensor
    cycles, both their instructions in a gradient, and one's tensor cycles, instructions and waits in a row.
    """
    name, sizes = kernel.name.removeprefix("power_attention_"), h100.parsed(case)
    if name not in WAITING_CYCLES:
        return None
    forward = name == "forward"
    choose = configs.choose if forward else configs.choose_vjp
    dtype = jnp.dtype(case.rpartition("-")[2])
    chosen: Any = choose(power=sizes["p"], head_dim=sizes["d"], value_dim=sizes["e"], dtype=dtype)
    # Sizes of the vectors whose products give weights and slopes, and of those that are summed.
    head_dim, value_dim = chosen.head_dim, chosen.value_dim
    together = name == "key_vjp" and len(chosen.key_results) == 1
    scores = head_dim if name in ("forward", "value_vjp") else head_dim + value_dim
    sums = head_dim * (name in ("query_vjp", "key_vjp")) + value_dim * (
        together or name in ("forward", "value_vjp")
    )
    # The shortest loop that multiplies matrices and rounds weights; m64nNk16 takes N / 2 cycles.
    counts = next(loop for loop in kernel.loops if loop["HGMMA"] and loop["F2FP"])
    tensor, instructions = (scores + sums) // 16 * chosen.block // 2, counts["instructions"]
    step = max(2 * tensor, 0 if forward else 2 * instructions, tensor + instructions + WAITING_CYCLES[name])
    # Rows of a thread block in blocks of keys: a forward block has as many, the others have one for each warpgroup.
    rows, blocks = 1 if forward else 2, h100.TIME // chosen.block
    steps = h100.HEADS * blocks * (blocks + rows) / (2 * rows) / h100.MULTIPROCESSORS
    loop = h100.Loop("keys" if forward else "pairs", counts, tensor)
    return [loop], f"{1e3 * steps * step / h100.SUSTAINED_HERTZ:.1f} ms"
