"""Cases of the gradient of keys and values at p = 2, compiled for an H100, and the time predicted for them.

A case names the head size, value size, chunk and dtype of states: "dkv-d64-e64-c768-float16". It has one kernel for
both gradients, or one for each.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import power_state
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state.square import key_vjp
from pallas_kernels.power_state.square import layout as layouts
from tools import h100

CASES = [
    "dkv-d32-e64-c384-float16",
    "dkv-d64-e64-c64-float16",
    "dkv-d64-e64-c768-float16",
    "dkv-d64-e64-c768-float32",
    "dkv-d64-e128-c768-float16",
    "dkv-d128-e64-c1024-float16",
    "dkv-d128-e128-c1024-float16",
    "dkv-d128-e128-c1024-float32",
]
# Every supported size, dtype of states and number of warpgroups.
_SIZES = [f"d{d}-e{e}" for d in (32, 64, 128) for e in (64, 128)]
_STATES = ("float16", "bfloat16", "float32")
RARE = [
    f"dkv-{size}-c{chunk}-{states}" for size in _SIZES for chunk in (64, 128, 192, 384) for states in _STATES
]
RARE = sorted(set(RARE) - set(CASES))
HEADS, GROUP, CHUNKS, WINDOW = 2, 2, 4, 64
# Times are predicted for batch 1.
PREDICTED_HEADS, PREDICTED_TIME = 8, 65_536
# Latency of the last wgmma of each product and of barriers, and bytes per cycle from the L2 cache; guesses.
WAITING_CYCLES, CACHE_BYTES = 120, 25


def build(case: str):
    """Returns the kernel of a case."""
    layout, value_dim, chunk, state_dtype = _parsed(case)
    operand, terms = configs.operands(state_dtype)
    head_dim, time = layout.head_dim, chunk * CHUNKS
    padded = time + chunk
    shape = functools.partial(_shape, dtype=operand)
    exact = functools.partial(_shape, dtype=jnp.float32)
    brief = functools.partial(_shape, dtype=jnp.bfloat16)
    options = {"layout": layout, "config": _config(case), "chunk": chunk, "exact_window": WINDOW}
    return functools.partial(key_vjp.key_vjp, **options, batch_time=(1, time)), [
        brief(HEADS, padded, head_dim),
        shape(HEADS, head_dim, padded),
        brief(HEADS, padded, value_dim),
        shape(HEADS, CHUNKS, layouts.TILE, terms * value_dim, layout.width),
        brief(HEADS, CHUNKS, 2 * head_dim, head_dim),
        brief(HEADS * GROUP, time, head_dim),
        brief(HEADS * GROUP, time, value_dim),
        exact(HEADS, padded // configs.BLOCK, len(key_vjp.Rows._fields), configs.BLOCK),
        exact(HEADS * GROUP, time // configs.BLOCK, len(key_vjp.Columns._fields), configs.BLOCK),
    ]


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str]:
    """Returns the main loops, and the time for 65,536 tokens of 8 heads without groups.

    Warpgroups share tensor cores. A step takes the longest of all their tensor cycles; of the time that the cache
    needs; and of one warpgroup's tensor cycles, instructions and waits in a row. m64nNk16 takes N / 2 cycles.
    """
    layout, value_dim, chunk, state_dtype = _parsed(case)
    config, terms, head_dim = _config(case), configs.operands(state_dtype)[1], layout.head_dim
    count, parts = config.key_vjp_blocks, config.key_vjp_parts
    # Results of the kernel.
    key, value = "key" in kernel.name, config.key_vjp_together or "key" not in kernel.name
    loops = [loop for loop in kernel.loops if loop["HGMMA"]]
    read = [loop for loop in loops if loop["HMUL2" if value else "FFMA"] and not loop["MUFU"]][:parts]
    far = {kind: sum(loop[kind] for loop in read) for kind in read[0]}
    tensor = (key + value) * layout.width // 16 * value_dim // 2 * terms
    waits = parts * (key + value * terms) * WAITING_CYCLES
    cached = 2 * value_dim * layout.width * terms / CACHE_BYTES
    row = layouts.TILE * max(count * tensor, tensor + far["instructions"] + waits, cached)
    # Scores; slopes; then two products each for values and keys.
    close = 2 * (head_dim + key * value_dim) + 4 * (key * head_dim + value * value_dim)
    near = next(loop for loop in loops if loop["MUFU"])
    block = max(count * close, close + near["instructions"] + 3 * WAITING_CYCLES)
    row += ((chunk // configs.BLOCK + count) / 2 + WINDOW // configs.BLOCK) * block
    cycles = PREDICTED_HEADS * PREDICTED_TIME / (configs.BLOCK * count) / h100.MULTIPROCESSORS * row
    found = [h100.Loop("dual states", far, tensor), h100.Loop("queries", near, close)]
    return found, f"{1e3 * cycles / h100.SUSTAINED_HERTZ:.2f} ms"


def _parsed(case):
    _, head_dim, value_dim, chunk, state_dtype = case.split("-")
    return layouts.Layout(int(head_dim[1:])), int(value_dim[1:]), int(chunk[1:]), jnp.dtype(state_dtype)


def _config(case):
    layout, value_dim, chunk, state_dtype = _parsed(case)
    return power_state.choose(
        power=2,
        time=65_536,
        heads=8,
        head_dim=layout.head_dim,
        value_dim=value_dim,
        dtype=jnp.bfloat16,
        chunk=chunk,
        exact_window=WINDOW,
        state_dtype=state_dtype,
    )


def _shape(*sizes, dtype):
    return jax.ShapeDtypeStruct(sizes, dtype)
