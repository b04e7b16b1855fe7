"""Cases of the p = 4 state kernels that are compiled for an H100, and the time predicted for them."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import power_state
from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state.quartic import layout as layouts
from pallas_kernels.power_state.quartic import query as quartic_query
from pallas_kernels.power_state.quartic import update as quartic_update
from tools import h100

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
_SIZES = [f"d{head_dim}-e{value_dim}" for head_dim in (16, 32) for value_dim in (16, 32)]
RARE = [f"update-{size}-c960" for size in _SIZES]
RARE += [f"query-{size}-c{chunk}" for size in _SIZES for chunk in (64, 128, 192)]
_HEADS, _GROUP, _CHUNKS, _WINDOW = 2, 2, 4, 64
# Times are predicted for 65,536 tokens of 8 heads.
_TOKENS = 8 * 65_536


def build(case: str):
    """Returns the kernel, and the shapes of its inputs from plain JAX."""
    kernel, layout, chunk, config = parsed(case)
    options = {"layout": layout, "config": config, "chunk": chunk}
    if kernel == "update":
        return functools.partial(quartic_update.update, dtype=jnp.float16, **options), _update(layout, chunk)
    options |= {"exact_window": _WINDOW, "batch_time": (1, chunk * _CHUNKS)}
    return functools.partial(quartic_query.query_states, **options), _query(layout, chunk)


def predict(case: str, kernel: h100.Kernel) -> tuple[list[h100.Loop], str]:
    """Returns the main loops, and the time for 65,536 tokens of 8 heads.

    A step of the update is 6 stacks and 64 tokens, one of the query 3 stacks and 64 rows. A multiprocessor takes the
    longer of its tensor cycles and the instructions of one of its four schedulers, which have a warp of every warpgroup
    each. The same holds for a query's blocks of 64 keys.
    """
    kind, layout, chunk, _ = parsed(case)
    found = [loop for loop in kernel.loops if loop["HGMMA"]]
    # A stack is 48 columns of 64 tokens, N / 2 cycles for each of four m64nNk16; 64 queries take the same time.
    stack = 2 * layouts.COLUMNS
    if kind == "update":
        loops = [h100.Loop("tokens", found[0], layouts.UNIT // 2 * stack)]
        steps = [layout.stacks // (layouts.UNIT // 2)]
    else:
        states = next(loop for loop in found if loop["HMUL2"])
        loops, steps = [h100.Loop("states", states, layouts.STEP * stack)], [layout.steps[:, 1].sum()]
        if chunk > configs.BLOCK:  # a single block of keys has no loop of its own
            products = layout.head_dim // 16 + 8
            keys = next(loop for loop in found if loop["HGMMA"] == products and loop["MUFU"])
            # Scores, then two products with values; half the chunk, and the window.
            loops.append(h100.Loop("keys", keys, 2 * layout.head_dim + 4 * layout.value_dim))
            steps.append(chunk / 128 + _WINDOW / 64 + 0.5)
    cycles = sum(
        count * max(loop.tensor, loop.counts["instructions"])
        for count, loop in zip(steps, loops, strict=True)
    )
    milliseconds = 1e3 * _TOKENS / 64 * cycles / h100.MULTIPROCESSORS / h100.SUSTAINED_HERTZ
    return loops, f"{milliseconds:.2f} ms"


def parsed(case):
    kernel, *sizes = case.split("-")
    head_dim, value_dim, chunk = (int(size[1:]) for size in sizes)
    config = power_state.choose(
        power=4,
        time=65_536,
        heads=8,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=jnp.bfloat16,
        chunk=chunk,
        exact_window=_WINDOW,
        state_dtype=jnp.float16,
    )
    return kernel, layouts.Layout(head_dim, value_dim), chunk, config


def half(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float16)


def single(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _update(layout, chunk):
    time, stack = chunk * _CHUNKS, (layout.stacks, configs.BLOCK, layouts.COLUMNS)
    return [
        half(_HEADS, layout.rows, time),
        half(_HEADS, layout.scalar_rows, time),
        half(_HEADS, configs.BLOCK, time),
        single(_HEADS, _CHUNKS),
        single(_HEADS, *stack),
        single(*stack),
    ]


def _query(layout, chunk):
    time, heads = chunk * _CHUNKS, _HEADS * _GROUP
    return [
        jax.ShapeDtypeStruct((heads, time, layout.head_dim), jnp.bfloat16),
        half(heads, time, layout.rows),
        half(heads, layout.scalar_rows, time),
        half(_HEADS, _CHUNKS, layout.stacks, layout.value_dim, layout.width),
        single(heads, time // configs.BLOCK, configs.BLOCK),
        jax.ShapeDtypeStruct((_HEADS, _WINDOW + time, layout.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((_HEADS, _WINDOW + time, layout.value_dim), jnp.bfloat16),
        single(_HEADS, _CHUNKS, 3, (_WINDOW + chunk) // configs.BLOCK, configs.BLOCK),
        single(_HEADS, time // configs.BLOCK, configs.BLOCK),
    ]
