"""Cases of the gradient of queries, and the time predicted for it.

A case names the head size, value size and chunk: "dq-d64-e64-c768".
"""

import functools

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state.square import layout as layouts
from pallas_kernels.power_state.square import query_vjp
from tools import h100
from tools import state_cases as cases
from tools.compiled import power_state as forward

CASES = [
    "dq-d32-e64-c384",
    "dq-d64-e64-c64",
    "dq-d64-e64-c768",
    "dq-d64-e128-c768",
    "dq-d128-e64-c1024",
    "dq-d128-e128-c1024",
]

# Every supported size and number of warpgroups.
RARE = sorted({f"dq-{case}" for case in forward.QUERIES} - set(CASES))


def build(case: str):
    """Returns the kernel of a case."""
    _, head_dim, value_dim, chunk, config = found = cases.parse(case, power=2)
    layout, time, queries = layouts.Layout(head_dim), found.time, cases.HEADS * cases.GROUP
    options = {"layout": layout, "config": config, "chunk": chunk, "exact_window": cases.WINDOW}
    return functools.partial(query_vjp.query_vjp, **options, batch_time=(1, time)), [
        cases.brief(queries, time, head_dim),
        cases.half(queries, head_dim, time),
        cases.brief(1, time, queries, value_dim),
        cases.half(cases.HEADS, cases.CHUNKS, layouts.TILE, value_dim, layout.width),
        cases.brief(cases.HEADS, cases.CHUNKS, 2 * head_dim, head_dim),
        cases.brief(1, time, cases.HEADS, head_dim),
        cases.brief(1, time, cases.HEADS, value_dim),
        cases.exact(cases.HEADS, cases.CHUNKS, 3, (cases.WINDOW + chunk) // configs.BLOCK, configs.BLOCK),
        cases.exact(queries, time // configs.BLOCK, len(query_vjp.Rows._fields), configs.BLOCK),
    ]


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str]:
    """Returns the main loops, and the time for 65,536 tokens of 8 heads.

    The prediction is that of the query, except that warpgroups also share issue slots.
    """
    _, head_dim, value_dim, chunk, config = cases.parse(case, power=2)
    layout, count, groups = layouts.Layout(head_dim), config.query_vjp_blocks, config.query_vjp_groups
    width = layout.width
    loops = [loop for loop in kernel.loops if loop["HGMMA"]]
    state = next(loop for loop in loops if loop["FFMA"] and not loop["MUFU"])
    tensor, instructions = (
        width // 2 * value_dim // 16,
        state["instructions"] * layout.sections / groups,
    )
    waits = config.query_vjp_parts * h100.STATE_WAITING_CYCLES
    cached = 2 * value_dim * width / h100.CACHE_BYTES
    group = max(count * tensor, count * instructions, tensor + instructions + waits, cached)
    found, row = [h100.Loop("states", state, tensor * groups // layout.sections)], layouts.TILE * group
    near = 2 * (head_dim + value_dim) + 2 * 2 * head_dim
    keys = next(loop for loop in loops if loop["MUFU"])
    busy = max(near, keys["instructions"])
    block = max(count * busy, near + keys["instructions"] + 2 * h100.STATE_WAITING_CYCLES)
    row += ((chunk // configs.BLOCK + count) / 2 + cases.WINDOW // configs.BLOCK) * block
    found.append(h100.Loop("keys", keys, near))
    rows = cases.PREDICTED_HEADS * cases.PREDICTED_TIME / (configs.BLOCK * count)
    return found, cases.milliseconds(rows / h100.MULTIPROCESSORS * row)
