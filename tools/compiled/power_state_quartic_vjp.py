"""Cases of the backward kernels of p = 4 that are compiled for an H100, and the time predicted for them."""

import functools

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import window_queries
from pallas_kernels.power_state.quartic import key_vjp as quartic_key_vjp
from pallas_kernels.power_state.quartic import layout as layouts
from pallas_kernels.power_state.quartic import query_vjp as quartic_query_vjp
from pallas_kernels.power_state.quartic import state_vjp
from tools import h100
from tools import state_cases as cases
from tools.compiled import power_state_quartic as forward

# Kernel, head size, value size, chunk: multiples of 192, of 128 and of 64 allow three, two and one warpgroups.
CASES = [
    "query-d16-e16-c1152",
    "query-d32-e32-c3072",
    "query-d32-e32-c64",
    "query-d16-e16-c1024",
    "key-d16-e16-c960",
    "key-d16-e16-c1152",
    "key-d32-e32-c3072",
    "key-d32-e32-c64",
]
RARE = [
    f"{kernel}-{size}-c{chunk}"
    for kernel in ("query", "key")
    for size in forward.SIZES
    for chunk in (64, 128, 192, 256)
]


def build(case: str):
    """Returns the kernel, and the shapes of its inputs from plain JAX."""
    kernel, head_dim, value_dim, chunk, config = found = cases.parse(case, power=4)
    layout, time, heads = layouts.Layout(head_dim, value_dim), found.time, cases.HEADS * cases.GROUP
    options = {"layout": layout, "config": config, "chunk": chunk, "exact_window": cases.WINDOW}
    states = cases.half(cases.HEADS, cases.CHUNKS, layout.stacks, value_dim, layout.width)
    if kernel == "query":
        return functools.partial(quartic_query_vjp.query_vjp, **options), [
            cases.brief(heads, time, head_dim),
            cases.half(heads, time, layout.rows),
            cases.half(heads, layout.scalar_rows, time),
            cases.brief(1, time, heads, value_dim),
            states,
            cases.brief(1, time, cases.HEADS, head_dim),
            cases.brief(1, time, cases.HEADS, value_dim),
            cases.exact(cases.HEADS, cases.CHUNKS, 3, (cases.WINDOW + chunk) // configs.BLOCK, configs.BLOCK),
            cases.exact(heads, time // configs.BLOCK, len(quartic_query_vjp.Rows._fields), configs.BLOCK),
        ]
    padded = time + chunk
    return functools.partial(quartic_key_vjp.key_vjp, **options), [
        cases.brief(cases.HEADS, padded, head_dim),
        cases.half(cases.HEADS, padded, layout.rows),
        cases.half(cases.HEADS, layout.scalar_rows, padded),
        cases.brief(cases.HEADS, padded, value_dim),
        states,
        cases.brief(heads, time, head_dim),
        cases.brief(1, time, heads, value_dim),
        cases.exact(cases.HEADS, padded // configs.BLOCK, len(quartic_key_vjp.Rows._fields), configs.BLOCK),
        cases.exact(heads, time // configs.BLOCK, len(window_queries.Columns._fields), configs.BLOCK),
    ]


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str]:
    """Returns the main loops, and the time for 65,536 tokens of 8 heads, with equal numbers of query and key heads.

    A step is 12 scalars and 64 rows, or 64 in-window queries or keys. A multiprocessor takes the longer of its tensor
    cycles and the instructions of one of its four schedulers, which have a warp of every warpgroup each.
    """
    kind, head_dim, value_dim, chunk, *_ = cases.parse(case, power=4)
    layout = layouts.Layout(head_dim, value_dim)
    found = [loop for loop in kernel.loops if loop["HGMMA"]]
    # m64nNk16 takes N / 2 cycles: slopes and means of a block of 48, then selections and their transposes.
    scalar = 2 * layouts.COLUMNS * value_dim // 32
    contracted = head_dim * layouts.SCALAR_COLUMNS * 3 // 16
    states = next(loop for loop in found if loop["HMUL2"])
    loops = [h100.Loop("states", states, layouts.SCALARS * scalar + contracted)]
    steps = [state_vjp.steps(layout)[:, 1].sum()]
    if chunk > configs.BLOCK:  # a single in-window block has no loop of its own
        # Scores and slopes, then two products each for the gradients.
        operands = 2 * (head_dim + value_dim) + 4 * head_dim + (4 * value_dim if kind == "key" else 0)
        loops.append(h100.Loop("rows", next(loop for loop in found if loop["MUFU"]), operands))
        steps.append(chunk / 128 + cases.WINDOW / 64 + 0.5)
    return loops, forward.duration(steps, loops)
