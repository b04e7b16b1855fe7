"""The p = 4 state kernels for `h100`: their cases, and how to build and read them."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import quartic_layout as layouts
from pallas_kernels.power_state import quartic_query, quartic_update

# Kernel, head size, value size; for a query also the chunk, of which its rows in a block follow.
CASES = [
    "update-d16-e16",
    "update-d32-e32",
    "query-d16-e16-c1152",
    "query-d16-e16-c1024",
    "query-d32-e32-c4032",
    "query-d32-e32-c4096",
    "query-d32-e32-c64",
]
_HEADS, _GROUP, _CHUNKS, _SEGMENTS, _WINDOW = 2, 2, 4, 2, 64


def _shape(*sizes, dtype=jnp.float16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def build(case: str):
    """The kernel of a case and the shapes of its arguments."""
    kernel, *sizes = case.split("-")
    head_dim, value_dim, *chunk = (int(size[1:]) for size in sizes)
    layout = layouts.Layout(head_dim, value_dim)
    return {"update": _update, "query": _query}[kernel](layout, *chunk)


def _update(layout, chunk=1024):
    time, stack = chunk * _CHUNKS, (layout.stacks, 64, layouts.COLUMNS)
    call = functools.partial(
        quartic_update.update, layout=layout, segments=_SEGMENTS, stages=4, chunk=chunk, dtype=jnp.float16
    )
    return call, [
        _shape(_HEADS, layout.rows, time),
        _shape(_HEADS, layout.scalar_rows, time),
        _shape(_HEADS, 64, time),
        _shape(_HEADS, _CHUNKS, dtype=jnp.float32),
        _shape(_HEADS, _SEGMENTS, *stack, dtype=jnp.float32),
        _shape(*stack, dtype=jnp.float32),
        _shape(layout.units.size, dtype=jnp.int32),
    ]


def _query(layout, chunk):
    time, heads = chunk * _CHUNKS, _HEADS * _GROUP
    config = configs.Config(
        update_scalars=0,
        update_stages=4,
        segments=1,
        query_blocks=next(count for count in (3, 2, 1) if chunk % (count * 64) == 0),
        state_stages=3,
        key_stages=2,
    )
    call = functools.partial(
        quartic_query.query_states, layout=layout, config=config, chunk=chunk, window=_WINDOW
    )
    seen = (_WINDOW + chunk) // 64
    return call, [
        _shape(heads, time, layout.head_dim, dtype=jnp.bfloat16),
        _shape(heads, time, layout.rows),
        _shape(heads, layout.scalar_rows, time),
        _shape(_HEADS, _CHUNKS, layout.stacks, 64, layouts.COLUMNS),
        _shape(heads, time // 64, 64, dtype=jnp.float32),
        _shape(_HEADS, _WINDOW + time, layout.head_dim, dtype=jnp.bfloat16),
        _shape(_HEADS, _WINDOW + time, layout.value_dim, dtype=jnp.bfloat16),
        _shape(_HEADS, _CHUNKS, 2, seen, 64, dtype=jnp.float32),
        _shape(_HEADS, time // 64, 64, dtype=jnp.float32),
        _shape(layout.steps.size, dtype=jnp.int32),
    ]
