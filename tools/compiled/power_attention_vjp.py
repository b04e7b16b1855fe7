"""Cases of the gradient kernels that are compiled for an H100, and the time predicted for them.

A case names the kernel's sums, for queries (dq), keys (dk), values (dv) or both (dkv), power, head size, value size and
dtype: "dq-p4-d64-e64-bfloat16".
"""

import itertools
import re

import jax
import jax.numpy as jnp

from pallas_kernels import power_attention
from pallas_kernels.power_attention import config, key_vjp, query_vjp, vjp_operands
from tools import h100
from tools.compiled import power_attention as forward

# The results of a kernel of the pass over keys: if registers are few, it needs two kernels.
RESULTS = {"dkv": ("dkey", "dvalue"), "dk": ("dkey",), "dv": ("dvalue",)}

_SIZES = ((16, 16), (32, 32), (64, 64), (128, 128), (64, 128))


def _cases(powers, sizes):
    """Returns every kernel that gradients of these powers and sizes use."""
    for power in powers:
        for head_dim, value_dim in sizes:
            chosen = config.choose_vjp(
                head_dim=head_dim, value_dim=value_dim, power=power, dtype=jnp.bfloat16
            )
            kernels = [name for name, results in RESULTS.items() if results in chosen.key_results]
            for kernel in ["dq", *kernels]:
                yield f"{kernel}-p{power}-d{head_dim}-e{value_dim}-bfloat16"


CASES = [*_cases((2, 4), _SIZES), *_cases((8,), ((64, 64), (128, 128)))]
# All widths that the kernels support, at their highest power.
RARE = list(_cases((16,), itertools.product(forward.WIDTHS, forward.WIDTHS)))


def build(case: str):
    """Returns the kernel, with GQA, decay and documents; preparation and final steps in plain JAX are not compiled."""
    kernel, power, sizes, dtype, chosen = _parsed(case)
    time, heads, kv_heads = 1000, 4, 2

    def prepare(query, key, value, dout, log_decay, segment_ids):
        arrays = {"log_decay": log_decay, "segment_ids": segment_ids}
        saved = power_attention.power_attention(query, key, value, power=power, **arrays)
        return vjp_operands.prepare(query, key, value, dout, saved, power=power, config=chosen, **arrays)[0]

    def call(*prepared):
        options = {"power": power, "config": chosen, "dtype": dtype}
        prepared = vjp_operands.VjpOperands(*prepared)
        if kernel == "dq":
            return query_vjp.query_vjp(prepared, time=time, **options)
        return key_vjp.sums(prepared, results=RESULTS[kernel], **options)

    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((1, time, *sizes), dtype)

    return call, jax.eval_shape(
        prepare,
        shape(heads, sizes["head_dim"], dtype=dtype),
        shape(kv_heads, sizes["head_dim"], dtype=dtype),
        shape(kv_heads, sizes["value_dim"], dtype=dtype),
        shape(heads, sizes["value_dim"], dtype=dtype),
        shape(kv_heads),
        shape(dtype=jnp.int32),
    )


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str]:
    """Returns the loop over full blocks, and the time for 65,536 tokens of 8 heads.

    Two warpgroups share a multiprocessor's tensor cores and schedulers. A step takes the longest of both their tensor
    cycles, both their instructions, and one's tensor cycles, instructions and waits in a row.
    """
    which, _, _, _, chosen = _parsed(case)
    # The shortest loop that multiplies matrices and rounds slopes; m64nNk16 takes N / 2 cycles.
    counts = next(loop for loop in kernel.loops if loop["HGMMA"] and loop["F2FP"])
    block, count = chosen.block, chosen.compute_warpgroups
    scores = chosen.head_dim + (chosen.value_dim if which != "dv" else 0)
    results = (chosen.head_dim if which != "dv" else 0) + (chosen.value_dim if which in ("dv", "dkv") else 0)
    tensor = scores // 16 * block // 2 + block // 16 * results // 2
    instructions = counts["instructions"]
    step = max(
        count * tensor, count * instructions, tensor + instructions + h100.ATTENTION_WAITING_CYCLES[which]
    )
    blocks = 65_536 // block
    steps = 8 * blocks * (blocks + count) / (2 * count) / h100.MULTIPROCESSORS
    return [h100.Loop("pairs", counts, tensor)], f"{1e3 * steps * step / h100.SUSTAINED_HERTZ:.1f} ms"


def _parsed(case):
    kernel, *parts, dtype = re.fullmatch(r"(\w+)-p(\d+)-d(\d+)-e(\d+)-(\w+)", case).groups()
    power, head_dim, value_dim = map(int, parts)
    sizes = {"head_dim": head_dim, "value_dim": value_dim}
    dtype = jnp.dtype(dtype)
    return kernel, power, sizes, dtype, config.choose_vjp(power=power, dtype=dtype, **sizes)
