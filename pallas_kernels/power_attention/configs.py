"""Tile sizes of the kernels, and the constraints on their arguments."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels.hopper import tensor_core

# Warpgroups that compute in each thread block, with 64 queries or keys each. In the forward kernel a block of queries
# is as long as a block of keys, so that exactly one block of keys, the diagonal one, needs a mask.
WARPGROUPS = 2
BLOCK = WARPGROUPS * tensor_core.ROWS
# Shared memory available to one thread block on Hopper, minus an allowance for barriers and reductions.
_SHARED_BYTES = 227 * 1024 - 4096
# The largest weight is near 2^14: float16 ends just below 2^16.
_WEIGHT_BITS = 14
# From this power on most weights of a row are below float16's range with any scale that is known in advance.
_SCALED_POWER = 8
# Bits of weights that are scaled by row: their sums must fit in float32.
_SCALED_WEIGHT_BITS = 96
# Shape of the floats of a block of keys in the forward kernel: one per key, then five numbers, each repeated 64 times.
COLUMNS = (1 + -(-5 * tensor_core.ROWS // BLOCK), BLOCK)
# Rows of 32, 64 or 128 bytes, or several tiles of those, for which wgmma and TMA have a conflict-free swizzle.
_WIDTHS = (16, 32, 64, 96, 128)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Tiling of the forward kernel and of both passes of the gradient.

    head_dim, value_dim: sizes inside the kernels, which are the caller's sizes padded with zeros.
    stages: blocks of keys and values in flight in the forward kernel.
    query_stages: blocks of keys and values in flight in the pass over queries.
    key_stages: blocks of queries and cotangents in flight in the pass over keys.
    """

    head_dim: int
    value_dim: int
    stages: int
    query_stages: int
    key_stages: int

    @property
    def operands_in_registers(self) -> bool:
        """True if a warpgroup's own rows stay in registers in the pass over queries.

        Reading them from shared memory takes as long as reading the tiles that they are multiplied with.
        """
        return self.head_dim + self.value_dim <= 128

    @property
    def key_results(self) -> tuple[tuple[str, ...], ...]:
        """Gradients that each kernel of the pass over keys computes.

        One kernel computes both if registers can hold both sums; otherwise each has its own kernel.
        """
        both = max(self.head_dim, self.value_dim) <= 64
        return (("dkey", "dvalue"),) if both else (("dkey",), ("dvalue",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Static options of a call.

    power: p.
    config: tile sizes.
    interpret: `plgpu.InterpretGPUParams` to run on a CPU, or None.
    """

    power: int
    config: Config
    interpret: Any


def scaled_by_row(power: int) -> bool:
    """Returns True if weights are rounded to float16 relative to the largest of their row so far.

    The diagonal block always uses such a scale.
    """
    return power >= _SCALED_POWER


def query_bits(power: int) -> int:
    """Returns h: queries are scaled by 2^h, so that weights use the available range.

    Scores are then at most 2^h, and weights at most 2^(ph).
    """
    return (_SCALED_WEIGHT_BITS if scaled_by_row(power) else _WEIGHT_BITS) // power


def choose(*, head_dim: int, value_dim: int, power: int, dtype) -> Config:
    """Returns the tile sizes for these shapes.

    Raises:
        NotImplementedError: for unsupported requests, naming the constraint.
    """
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise NotImplementedError(
            f"query, key and value are {jnp.dtype(dtype)}; the kernel multiplies bfloat16 or float16"
        )
    if power % 2 or not 2 <= power <= 16:
        raise NotImplementedError(f"power is {power}; the kernel takes even powers from 2 to 16")
    for name, size in (("head", head_dim), ("value", value_dim)):
        if size > _WIDTHS[-1]:
            raise NotImplementedError(f"{name} size is {size}; the kernel takes at most {_WIDTHS[-1]}")
    head_dim, value_dim = (
        next(width for width in _WIDTHS if width >= size) for size in (head_dim, value_dim)
    )

    # Bytes of 64 queries or keys, of these with their cotangents or values, and of a number for each.
    row, both, vector = (tensor_core.ROWS * n for n in (2 * head_dim, 2 * (head_dim + value_dim), 4))
    return Config(
        head_dim=head_dim,
        value_dim=value_dim,
        stages=_stages(WARPGROUPS * row, WARPGROUPS * both + 4 * math.prod(COLUMNS)),
        query_stages=_stages(WARPGROUPS * both, both + 6 * vector),
        key_stages=_stages(WARPGROUPS * (both + 12 * vector), both + row + 9 * vector),
    )


def _stages(own: int, stage: int) -> int:
    """Returns the largest of 4, 3 and 2 stages of `stage` bytes that fits in shared memory with `own` other bytes."""
    return next(n for n in (4, 3, 2) if own + n * stage <= _SHARED_BYTES)
