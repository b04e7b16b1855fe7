"""Cases of the gradient of queries, and the time predicted for it.

A case names the head size, value size, chunk, and the dtype of states: "dq-d64-e64-c768-float16".
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import power_state
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state.square import layout as layouts
from pallas_kernels.power_state.square import query_vjp
from tools import h100
from tools.compiled import power_state as forward

CASES = [
    "dq-d32-e64-c384-float16",
    "dq-d64-e64-c64-float16",
    "dq-d64-e64-c768-float16",
    "dq-d64-e64-c768-bfloat16",
    "dq-d64-e64-c768-float32",
    "dq-d64-e128-c768-float16",
    "dq-d128-e64-c1024-float16",
    "dq-d128-e128-c1024-float16",
]

# Every supported size, dtype of states and number of warpgroups.
RARE = [
    f"dq-d{head_dim}-e{value_dim}-c{chunk}-{states}"
    for head_dim in (32, 64, 128)
    for value_dim in (64, 128)
    for chunk in (64, 128, 192, 384)
    for states in ("float16", "bfloat16", "float32")
]
RARE = sorted(set(RARE) - set(CASES))


def build(case: str):
    head_dim, value_dim, chunk, state_dtype = _parsed(case)
    heads, chunks, exact_window = forward.HEADS, forward.CHUNKS, forward.WINDOW
    queries, time = heads * forward.GROUP, chunk * chunks
    operand, terms = configs.operands(state_dtype)
    layout = layouts.Layout(head_dim)
    brief, blocks = jnp.bfloat16, time // configs.BLOCK
    shapes = [
        ((queries, time, head_dim), brief),
        ((queries, head_dim, time), operand),
        ((queries, time, value_dim), brief),
        ((heads, chunks, layouts.TILE, terms * value_dim, layout.width), operand),
        ((heads, chunks, 2 * head_dim, head_dim), brief),
        ((heads, exact_window + time, head_dim), brief),
        ((heads, exact_window + time, value_dim), brief),
        ((heads, chunks, 3, (exact_window + chunk) // configs.BLOCK, configs.BLOCK), jnp.float32),
        ((queries, blocks, len(query_vjp.Rows._fields), configs.BLOCK), jnp.float32),
    ]
    options = {"layout": layout, "config": _config(case), "chunk": chunk, "exact_window": exact_window}
    run = functools.partial(query_vjp.query_vjp, **options, batch_time=(1, time))
    return run, [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str]:
    """Returns the main loops, and the time for 65,536 tokens of 8 heads.

    The prediction is that of the query, except that warpgroups also share issue slots.
    """
    head_dim, value_dim, chunk, state_dtype = _parsed(case)
    config, terms = _config(case), configs.operands(state_dtype)[1]
    layout, count, groups = layouts.Layout(head_dim), config.query_vjp_blocks, config.query_vjp_groups
    width = layout.width
    loops = [loop for loop in kernel.loops if loop["HGMMA"]]
    state = next(loop for loop in loops if loop["FFMA"] and not loop["MUFU"])
    tensor, instructions = (
        width // 2 * value_dim // 16 * terms,
        state["instructions"] * layout.sections / groups,
    )
    waits = config.query_vjp_parts * forward.WAITING_CYCLES
    cached = 2 * value_dim * width * terms / forward.CACHE_BYTES
    group = max(count * tensor, count * instructions, tensor + instructions + waits, cached)
    found, row = [h100.Loop("states", state, tensor * groups // layout.sections)], layouts.TILE * group
    near = 2 * (head_dim + value_dim) + 2 * 2 * head_dim
    keys = next(loop for loop in loops if loop["MUFU"])
    busy = max(near, keys["instructions"])
    block = max(count * busy, near + keys["instructions"] + 2 * forward.WAITING_CYCLES)
    row += ((chunk // configs.BLOCK + count) / 2 + forward.WINDOW // configs.BLOCK) * block
    found.append(h100.Loop("keys", keys, near))
    rows = forward.PREDICTED_HEADS * forward.PREDICTED_TIME / (configs.BLOCK * count)
    return found, f"{1e3 * rows / h100.MULTIPROCESSORS * row / h100.SUSTAINED_HERTZ:.2f} ms"


def _parsed(case):
    _, head_dim, value_dim, chunk, state_dtype = case.split("-")
    return int(head_dim[1:]), int(value_dim[1:]), int(chunk[1:]), jnp.dtype(state_dtype)


def _config(case):
    head_dim, value_dim, chunk, state_dtype = _parsed(case)
    return power_state.choose(
        power=2,
        time=65_536,
        heads=8,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=jnp.bfloat16,
        chunk=chunk,
        exact_window=forward.WINDOW,
        state_dtype=state_dtype,
    )
