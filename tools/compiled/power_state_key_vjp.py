"""Cases of the gradient of keys and values at p = 2, compiled for an H100, and the time predicted for them.

A case names the head size, value size and chunk: "dkv-d64-e64-c768". It has one kernel for both gradients, or one for
each.
"""

import functools

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state.square import key_vjp
from pallas_kernels.power_state.square import layout as layouts
from tools import h100
from tools import state_cases as cases
from tools.compiled import power_state as forward

CASES = [
    "dkv-d32-e64-c384",
    "dkv-d64-e64-c64",
    "dkv-d64-e64-c768",
    "dkv-d64-e128-c768",
    "dkv-d128-e64-c1024",
    "dkv-d128-e128-c1024",
]
# Every supported size and number of warpgroups.
RARE = sorted({f"dkv-{case}" for case in forward.QUERIES} - set(CASES))


def build(case: str):
    """Returns the kernel of a case."""
    _, head_dim, value_dim, chunk, config = found = cases.parse(case, power=2)
    layout, time, padded = layouts.Layout(head_dim), found.time, found.time + chunk
    options = {"layout": layout, "config": config, "chunk": chunk, "exact_window": cases.WINDOW}
    return functools.partial(key_vjp.key_vjp, **options, batch_time=(1, time)), [
        cases.brief(1, time, cases.HEADS, head_dim),
        cases.half(cases.HEADS, head_dim, padded),
        cases.brief(1, time, cases.HEADS, value_dim),
        cases.half(cases.HEADS, cases.CHUNKS, layouts.TILE, value_dim, layout.width),
        cases.brief(cases.HEADS, cases.CHUNKS, 2 * head_dim, head_dim),
        cases.brief(cases.HEADS * cases.GROUP, time, head_dim),
        cases.brief(1, time, cases.HEADS * cases.GROUP, value_dim),
        cases.exact(cases.HEADS, padded // configs.BLOCK, len(key_vjp.Rows._fields), configs.BLOCK),
        cases.exact(
            cases.HEADS * cases.GROUP, time // configs.BLOCK, len(key_vjp.Columns._fields), configs.BLOCK
        ),
    ]


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str]:
    """Returns the main loops, and the time for 65,536 tokens of 8 heads without groups.

    Warpgroups share tensor cores. A step takes the longest of all their tensor cycles; of the time that the cache
    needs; and of one warpgroup's tensor cycles, instructions and waits in a row. m64nNk16 takes N / 2 cycles.
    """
    _, head_dim, value_dim, chunk, config = cases.parse(case, power=2)
    layout = layouts.Layout(head_dim)
    count, parts = config.key_vjp_blocks, config.key_vjp_parts
    # Results of the kernel.
    key, value = "key" in kernel.name, config.key_vjp_together or "key" not in kernel.name
    loops = [loop for loop in kernel.loops if loop["HGMMA"]]
    read = [loop for loop in loops if loop["HMUL2" if value else "FFMA"] and not loop["MUFU"]][:parts]
    far = {kind: sum(loop[kind] for loop in read) for kind in read[0]}
    tensor = (key + value) * layout.width // 16 * value_dim // 2
    waits = parts * (key + value) * h100.STATE_WAITING_CYCLES
    cached = 2 * value_dim * layout.width / h100.CACHE_BYTES
    row = layouts.TILE * max(count * tensor, tensor + far["instructions"] + waits, cached)
    # Scores; slopes; then two products each for values and keys.
    close = 2 * (head_dim + key * value_dim) + 4 * (key * head_dim + value * value_dim)
    near = next(loop for loop in loops if loop["MUFU"])
    block = max(count * close, close + near["instructions"] + 3 * h100.STATE_WAITING_CYCLES)
    row += ((chunk // configs.BLOCK + count) / 2 + cases.WINDOW // configs.BLOCK) * block
    cycles = (
        cases.PREDICTED_HEADS * cases.PREDICTED_TIME / (configs.BLOCK * count) / h100.MULTIPROCESSORS * row
    )
    found = [h100.Loop("dual states", far, tensor), h100.Loop("queries", near, close)]
    return found, cases.milliseconds(cycles)
