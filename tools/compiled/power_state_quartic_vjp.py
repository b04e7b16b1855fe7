"""Cases of the backward kernels of p = 4 that are compiled for an H100, and the time predicted for them."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import window_queries
from pallas_kernels.power_state.quartic import key_vjp as quartic_key_vjp
from pallas_kernels.power_state.quartic import layout as layouts
from pallas_kernels.power_state.quartic import query_vjp as quartic_query_vjp
from pallas_kernels.power_state.quartic import state_vjp
from tools import h100
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
_SIZES = [f"d{head_dim}-e{value_dim}" for head_dim in (16, 32) for value_dim in (16, 32)]
RARE = [
    f"{kernel}-{size}-c{chunk}"
    for kernel in ("query", "key")
    for size in _SIZES
    for chunk in (64, 128, 192, 256)
]
_HEADS, _GROUP, _CHUNKS, _WINDOW = 2, 2, 4, 64
# Times are predicted for 65,536 tokens of 8 heads.
_TOKENS = 8 * 65_536


def build(case: str):
    """Returns the kernel, and the shapes of its inputs from plain JAX."""
    kernel, layout, chunk, config = forward.parsed(case)
    options = {"layout": layout, "config": config, "chunk": chunk, "exact_window": _WINDOW}
    if kernel == "query":
        return functools.partial(quartic_query_vjp.query_vjp, **options), _query(layout, chunk)
    return functools.partial(quartic_key_vjp.key_vjp, **options), _key(layout, chunk)


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str]:
    """Returns the main loops, and the time for 65,536 tokens of 8 heads, with equal numbers of query and key heads.

    A step is 12 scalars and 64 rows, or 64 in-window queries or keys. A multiprocessor takes the longer of its tensor
    cycles and the instructions of one of its four schedulers, which have a warp of every warpgroup each.
    """
    kind, layout, chunk, _ = forward.parsed(case)
    found = [loop for loop in kernel.loops if loop["HGMMA"]]
    head_dim, value_dim = layout.head_dim, layout.value_dim
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
        steps.append(chunk / 128 + _WINDOW / 64 + 0.5)
    cycles = sum(
        count * max(loop.tensor, loop.counts["instructions"])
        for count, loop in zip(steps, loops, strict=True)
    )
    milliseconds = 1e3 * _TOKENS / 64 * cycles / h100.MULTIPROCESSORS / h100.SUSTAINED_HERTZ
    return loops, f"{milliseconds:.2f} ms"


def _brain(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def _query(layout, chunk):
    time, heads = chunk * _CHUNKS, _HEADS * _GROUP
    return [
        _brain(heads, time, layout.head_dim),
        forward.half(heads, time, layout.rows),
        forward.half(heads, layout.scalar_rows, time),
        _brain(heads, time, layout.value_dim),
        forward.half(_HEADS, _CHUNKS, layout.stacks, layout.value_dim, layout.width),
        _brain(_HEADS, _WINDOW + time, layout.head_dim),
        _brain(_HEADS, _WINDOW + time, layout.value_dim),
        forward.single(_HEADS, _CHUNKS, 3, (_WINDOW + chunk) // configs.BLOCK, configs.BLOCK),
        forward.single(heads, time // configs.BLOCK, len(quartic_query_vjp.Rows._fields), configs.BLOCK),
    ]


def _key(layout, chunk):
    time, heads = chunk * _CHUNKS, _HEADS * _GROUP
    padded, blocks = time + chunk, time // configs.BLOCK
    return [
        _brain(_HEADS, padded, layout.head_dim),
        forward.half(_HEADS, padded, layout.rows),
        forward.half(_HEADS, layout.scalar_rows, padded),
        _brain(_HEADS, padded, layout.value_dim),
        forward.half(_HEADS, _CHUNKS, layout.stacks, layout.value_dim, layout.width),
        _brain(heads, time, layout.head_dim),
        _brain(heads, time, layout.value_dim),
        forward.single(_HEADS, padded // configs.BLOCK, len(quartic_key_vjp.Rows._fields), configs.BLOCK),
        forward.single(heads, blocks, len(window_queries.Columns._fields), configs.BLOCK),
    ]
