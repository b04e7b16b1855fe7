"""Cases of the p = 4 state kernels that are compiled for an H100, and the time predicted for them."""

import functools
from collections.abc import Sequence

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state.quartic import layout as layouts
from pallas_kernels.power_state.quartic import query as quartic_query
from pallas_kernels.power_state.quartic import update as quartic_update
from tools import h100
from tools import state_cases as cases

# Kernel, head size, value size, chunk: multiples of 192, of 128 and of 64 give a query three, two and one warpgroups.
CASES = [
    "update-d16-e16-c960",
    "update-d32-e32-c3072",
    "update-d32-e16-c3072",
    "query-d16-e16-c1152",
    "query-d16-e16-c1024",
    "query-d16-e16-c64",
    "query-d16-e32-c960",
    "query-d32-e32-c3072",
    "query-d32-e32-c4096",
    "query-d32-e32-c64",
]
SIZES = cases.sizes((16, 32), (16, 32))
RARE = [f"update-{size}-c960" for size in SIZES]
RARE += [f"query-{size}-c{chunk}" for size in SIZES for chunk in (64, 128, 192)]


def build(case: str):
    """Returns the kernel, and the shapes of its inputs from plain JAX."""
    kernel, head_dim, value_dim, chunk, config = found = cases.parse(case, power=4)
    layout, time, heads = layouts.Layout(head_dim, value_dim), found.time, cases.HEADS * cases.GROUP
    options = {"layout": layout, "config": config, "chunk": chunk}
    if kernel == "update":
        stack = (layout.stacks, configs.BLOCK, layouts.COLUMNS)
        return functools.partial(quartic_update.update, **options), [
            cases.half(cases.HEADS, layout.rows, time),
            cases.half(cases.HEADS, layout.scalar_rows, time),
            cases.half(cases.HEADS, configs.BLOCK, time),
            cases.exact(cases.HEADS, cases.CHUNKS),
            cases.exact(cases.HEADS, *stack),
            cases.exact(*stack),
        ]
    options |= {"exact_window": cases.WINDOW, "batch_time": (1, time)}
    return cases.with_and_without_remainder(quartic_query.query_states, options), [
        cases.brief(heads, time, head_dim),
        cases.half(heads, time, layout.rows),
        cases.half(heads, layout.scalar_rows, time),
        cases.half(cases.HEADS, cases.CHUNKS, layout.stacks, value_dim, layout.width),
        cases.exact(heads, time // configs.BLOCK, configs.BLOCK),
        cases.brief(1, time, cases.HEADS, head_dim),
        cases.brief(1, time, cases.HEADS, value_dim),
        cases.exact(cases.HEADS, cases.CHUNKS, 3, (cases.WINDOW + chunk) // configs.BLOCK, configs.BLOCK),
        cases.exact(cases.HEADS, time // configs.BLOCK, configs.BLOCK),
    ]


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str]:
    """Returns the main loops, and the time for 65,536 tokens of 8 heads.

    A step of the update is 6 stacks and 64 tokens, one of the query 3 stacks and 64 rows. A multiprocessor takes the
    longer of its tensor cycles and the instructions of one of its four schedulers, which have a warp of every warpgroup
    each. The same holds for a query's blocks of 64 keys.
    """
    kind, head_dim, value_dim, chunk, *_ = cases.parse(case, power=4)
    layout = layouts.Layout(head_dim, value_dim)
    found = [loop for loop in kernel.loops if loop["HGMMA"]]
    # A stack is 48 columns of 64 tokens, N / 2 cycles for each of four m64nNk16; 64 queries take the same time.
    stack = 2 * layouts.COLUMNS
    if kind == "update":
        loops = [h100.Loop("tokens", found[0], layouts.UNIT // 2 * stack)]
        steps: list[float] = [layout.stacks // (layouts.UNIT // 2)]
    else:
        states = next(loop for loop in found if loop["HMUL2"])
        loops, steps = [h100.Loop("states", states, layouts.STEP * stack)], [layout.steps[:, 1].sum()]
        if chunk > configs.BLOCK:  # a single block of keys has no loop of its own
            products = layout.head_dim // 16 + 8
            keys = next(loop for loop in found if loop["HGMMA"] == products and loop["MUFU"])
            # Scores, then two products with values; half the chunk, and the window.
            loops.append(h100.Loop("keys", keys, 2 * layout.head_dim + 4 * layout.value_dim))
            steps.append(chunk / 128 + cases.WINDOW / 64 + 0.5)
    return loops, duration(steps, loops)


def duration(steps: Sequence[float], loops: Sequence[h100.Loop]) -> str:
    """Formats the time of the predicted shape, from the steps of each loop for 64 tokens."""
    cycles = sum(
        count * max(loop.tensor, loop.counts["instructions"])
        for count, loop in zip(steps, loops, strict=True)
    )
    return cases.milliseconds(
        cases.PREDICTED_HEADS * cases.PREDICTED_TIME / 64 * cycles / h100.MULTIPROCESSORS
    )
