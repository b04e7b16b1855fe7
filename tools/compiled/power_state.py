"""Cases of the state kernels that are compiled for an H100, and the time predicted for them.

A case names the kernel, head size, value size and, for a query, its chunk: "query-d64-e64-c768".
"""

import functools

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state.square import layout as layouts
from pallas_kernels.power_state.square import norms, query, update
from tools import h100
from tools import state_cases as cases

# Chunks of 64, 128 and 192 give a query one, two and three warpgroups.
CASES = [
    "update-d32-e64",
    "update-d64-e64",
    "update-d64-e128",
    "update-d128-e64",
    "update-d128-e128",
    "norms-d32-e64",
    "norms-d64-e64",
    "norms-d128-e64",
    "query-d32-e64-c384",
    "query-d32-e128-c384",
    "query-d64-e64-c64",
    "query-d64-e64-c128",
    "query-d64-e64-c768",
    "query-d64-e128-c768",
    "query-d128-e64-c1024",
    "query-d128-e128-c64",
    "query-d128-e128-c1024",
]
# Every supported size and number of warpgroups.
SIZES, QUERY_CHUNKS = cases.sizes((32, 64, 128), (64, 128)), (64, 128, 192, 384)
QUERIES = [f"{size}-c{chunk}" for size in SIZES for chunk in QUERY_CHUNKS]
RARE = [f"update-{size}" for size in SIZES] + [f"query-{case}" for case in QUERIES]
RARE = sorted(set(RARE) - set(CASES))


def build(case: str):
    """Returns the kernel of a case without its preparation, which is plain JAX and not compiled.

    A query is compiled twice, without the remainder of its output and with it. Others are compiled forward and
    reversed, with a group of heads.
    """
    kernel, head_dim, value_dim, chunk, config = found = cases.parse(case, power=2)
    layout, time = layouts.Layout(head_dim), found.time

    state = (layouts.TILE, layout.sections, value_dim, layout.section_width)
    options = {"layout": layout, "config": config, "chunk": chunk}
    if kernel == "update":
        return _both_ways(functools.partial(update.update, **options)), [
            cases.half(cases.HEADS * cases.GROUP, layout.head_dim, time),
            cases.half(cases.HEADS * cases.GROUP, value_dim, time),
            cases.exact(cases.HEADS, cases.CHUNKS),
            cases.exact(cases.HEADS, *state),
        ]
    if kernel == "norms":
        return _both_ways(norms.norms), [
            cases.half(cases.HEADS * cases.GROUP, head_dim, time),
            cases.exact(cases.HEADS, cases.CHUNKS, cases.GROUP * chunk // configs.BLOCK, configs.BLOCK),
        ]
    options |= {"exact_window": cases.WINDOW, "batch_time": (1, time)}
    return cases.with_and_without_remainder(query.query_states, options), [
        cases.brief(cases.HEADS * cases.GROUP, time, head_dim),
        cases.half(cases.HEADS * cases.GROUP, head_dim, time),
        cases.half(cases.HEADS, cases.CHUNKS, layouts.TILE, value_dim, layout.width),
        cases.brief(cases.HEADS, cases.CHUNKS, 2 * head_dim, head_dim),
        cases.brief(1, time, cases.HEADS, head_dim),
        cases.brief(1, time, cases.HEADS, value_dim),
        cases.exact(cases.HEADS, cases.CHUNKS, 3, (cases.WINDOW + chunk) // configs.BLOCK, configs.BLOCK),
        cases.exact(cases.HEADS, time // configs.BLOCK, configs.BLOCK),
    ]


def _both_ways(kernel):
    return lambda *arrays: [kernel(*arrays, reverse=reverse) for reverse in (False, True)]


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str]:
    """Returns the main loops, and the time for 65,536 tokens of 8 heads.

    Warpgroups share tensor cores and memory. A step takes the longest of all their tensor cycles; of the time that
    shared memory and the cache need; and of one warpgroup's tensor cycles, instructions and waits in a row. m64nNk16
    takes N / 2 cycles.
    """
    found = [loop for loop in kernel.loops if loop["HGMMA"]]
    predictions = {"update": _predict_update, "norms": _predict_norms, "query": _predict_query}
    parsed = cases.parse(case, power=2)
    loops, cycles = predictions[parsed.kernel](parsed, layouts.Layout(parsed.head_dim), found)
    return loops, cases.milliseconds(cycles)


def _predict_update(case, layout, loops):
    config, counts = case.config, loops[0]
    scalars = config.update_scalars * len(layout.section)
    tensor = config.update_scalars // 2 * 2 * layout.section_width
    # 64 tokens of 16 bits per row. Every warpgroup reads the values, and a vector per scalar in eight parts per warp.
    filled = 128 * (layout.section_rows + configs.BLOCK + scalars)
    shared = (
        2 * tensor * h100.PRODUCT_BYTES
        + filled
        + 2 * 128 * configs.BLOCK
        + scalars * 4 * 8 * h100.SHARED_BYTES
    )
    step = max(
        2 * tensor,
        tensor + counts["instructions"] + h100.STATE_WAITING_CYCLES,
        shared / h100.SHARED_BYTES,
        filled / h100.CACHE_BYTES,
    )
    rounds = -(-cases.PREDICTED_HEADS * config.update_blocks * config.segments // h100.MULTIPROCESSORS)
    cycles = rounds * cases.PREDICTED_TIME / config.segments / configs.BLOCK * step
    return [h100.Loop("tokens", counts, tensor)], cycles


def _predict_norms(case, layout, loops):
    # 64 tokens: a product for each term, and the keys and weights that fill the ring.
    tensor = max(layout.head_dim, configs.BLOCK) // configs.BLOCK * 2 * 4 * layout.head_dim // 2
    filled = 2 * configs.BLOCK * layout.head_dim + 4 * configs.BLOCK
    rounds = cases.PREDICTED_HEADS * cases.PREDICTED_TIME / configs.BLOCK / h100.MULTIPROCESSORS
    return [h100.Loop("tokens", loops[0], tensor)], rounds * max(tensor, filled / h100.CACHE_BYTES)


def _predict_query(case, layout, loops):
    _, _, value_dim, chunk, config = case
    count, waits = config.query_blocks, config.parts * h100.STATE_WAITING_CYCLES
    tensor = layout.width // 16 * value_dim // 2
    state = next(loop for loop in loops if loop["HMUL2"] and not loop["MUFU"])
    cached = 2 * value_dim * layout.width / h100.CACHE_BYTES
    group = max(count * tensor, tensor + state["instructions"] + waits, cached)
    found, row = [h100.Loop("states", state, tensor)], layouts.TILE * group
    if chunk > configs.BLOCK:  # a single block of keys has no loop of its own
        # Scores, then two products with values.
        near = layout.head_dim // 16 * 32 + 2 * 4 * value_dim // 2
        wgmmas = layout.head_dim // 16 + 8
        keys = next(loop for loop in loops if loop["MUFU"] and loop["HGMMA"] == wgmmas)
        block = max(count * near, near + keys["instructions"] + 3 * h100.STATE_WAITING_CYCLES)
        row += ((chunk // configs.BLOCK + count) / 2 + cases.WINDOW // configs.BLOCK) * block
        found.append(h100.Loop("keys", keys, near))
    rows = cases.PREDICTED_HEADS * cases.PREDICTED_TIME / (configs.BLOCK * count)
    return found, rows / h100.MULTIPROCESSORS * row
