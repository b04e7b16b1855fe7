"""Cases of the backward kernels of p = 4 that are compiled for an H100, and the time predicted for them."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.power_state import config as configs
from pallas_kernels.power_state import near_key_vjp, quartic_key_vjp, quartic_query_vjp
from pallas_kernels.power_state import quartic_layout as layouts
from tests.pallas_kernels import h100

# Kernel, head size, value size, chunk: multiples of 192, of 128 and of 64 allow three, two and one warpgroups.
CASES = [
    "query-d16-e16-c960",
    "query-d32-e32-c3072",
    "query-d32-e32-c64",
    "key-d16-e16-c960",
    "key-d32-e32-c3072",
    "key-d32-e32-c64",
]
_SIZES = [f"d{head_dim}-e{value_dim}" for head_dim in (16, 32) for value_dim in (16, 32)]
RARE = [
    f"{kernel}-{size}-c{chunk}" for kernel in ("query", "key") for size in _SIZES for chunk in (64, 128, 192)
]
_HEADS, _GROUP, _CHUNKS, _WINDOW = 2, 2, 4, 64
# What a prediction is for: 65,536 tokens of 8 heads.
_TOKENS = 8 * 65_536


def build(case: str):
    """The kernel, and the shapes of what plain JAX gives it."""
    kernel, layout, chunk, config = _parsed(case)
    options = {"layout": layout, "config": config, "chunk": chunk, "window": _WINDOW}
    if kernel == "query":
        return functools.partial(quartic_query_vjp.query_vjp, **options), _query(layout, chunk)
    return functools.partial(quartic_key_vjp.key_vjp, **options), _key(layout, chunk)


def predict(case, kernel):
    return [h100.Loop("x", loop, 0) for loop in kernel.loops if loop["HGMMA"]], ""


def _parsed(case):
    kernel, *sizes = case.split("-")
    head_dim, value_dim, chunk = (int(size[1:]) for size in sizes)
    config = configs.choose(
        power=4,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=jnp.bfloat16,
        chunk=chunk,
        window=_WINDOW,
        state_dtype=jnp.float16,
    )
    return kernel, layouts.Layout(head_dim, value_dim), chunk, config


def _half(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float16)


def _brain(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)


def _single(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def _query(layout, chunk):
    time, heads = chunk * _CHUNKS, _HEADS * _GROUP
    return [
        _brain(heads, time, layout.head_dim),
        _half(heads, time, layout.rows),
        _half(heads, layout.scalar_rows, time),
        _brain(heads, time, layout.value_dim),
        _half(_HEADS, _CHUNKS, layout.stacks, layout.value_dim, layout.width),
        _brain(_HEADS, _WINDOW + time, layout.head_dim),
        _brain(_HEADS, _WINDOW + time, layout.value_dim),
        _single(_HEADS, _CHUNKS, 2, (_WINDOW + chunk) // configs.BLOCK, configs.BLOCK),
        _single(heads, time // configs.BLOCK, len(quartic_query_vjp.Rows()), configs.BLOCK),
    ]


def _key(layout, chunk):
    time, heads = chunk * _CHUNKS, _HEADS * _GROUP
    padded, blocks = time + chunk, time // configs.BLOCK
    return [
        _brain(_HEADS, padded, layout.head_dim),
        _half(_HEADS, padded, layout.rows),
        _half(_HEADS, layout.scalar_rows, padded),
        _brain(_HEADS, padded, layout.value_dim),
        _half(_HEADS, _CHUNKS, layout.stacks, layout.value_dim, layout.width),
        _brain(heads, time, layout.head_dim),
        _brain(heads, time, layout.value_dim),
        _single(_HEADS, padded // configs.BLOCK, len(quartic_key_vjp.Rows()), configs.BLOCK),
        _single(heads, blocks, len(near_key_vjp.Columns()), configs.BLOCK),
    ]
